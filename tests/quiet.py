"""What Lightning and others say that no test is about."""

from __future__ import annotations

import functools
import logging
import warnings

from lightning.fabric.utilities import registry

KNOWN = (
    r"(?s).*(JsonargparseDeprecationWarning|was deprecated in v4\.)",
    # Lightning about small loaders and missing loops
    r".*does not have many workers.*",
    r".*The number of training batches.*is smaller than the logging interval.*",
    r".*You defined a `validation_step` but have no `val_dataloader`.*",
    r".*GPU available but not used.*",
    r".*`tensorboardX` has been removed.*",
    r".*'set_vital' is deprecated.*",  # torchdata calls it
    r".*Checkpoint directory .* exists and is not empty.*",
    r".*isinstance\(treespec, LeafSpec\).*",
    r".*Using `DistributedSampler` with the dataloaders.*",
    r".*torch.jit.script.*deprecated.*",
    r".*Experiment logs directory .* exists and is not empty.*",
    r".*The total number of parameters detected may be inaccurate.*",
    r".*was called without a model.*",
    r".*It is recommended to use `self.log\(.*sync_dist=True\)`.*",
    r".*enable_nested_tensor is True.*",
    # the compiler does so itself where it traces DTensors
    r".*autograd.function.Function.* should not be instantiated.*",
    # and breaks its graph where DTensors are made
    r"(?s).*Dynamo does not know how to trace the builtin `torch._C._DTensor.*",
    # and with torch 2.11 at partial methods, by which layers are split
    r"(?s).*Dynamo does not know how to trace the builtin `<unknown module>.function.__get__.*",
    # T5's layers return the view that they were given
    r".*FSDP2-wrapped module .* returned a view tensor.*",
    r".*Sparse CSR tensor support is in beta state.*",
    r".*Validating sparse tensor invariants.*",  # of torch 2.15, where a checkpoint has some
    # torch.compile looks at every input's `.grad` while it traces
    r".*The .grad attribute of a Tensor that is not a leaf Tensor is being accessed.*",
    # Lightning's `all_gather` takes it
    r".*torch.distributed.nn.functional.all_gather is deprecated.*",
    r".*`training_step` returned `None`.*",
    r".*You're resuming from a checkpoint that ended before the epoch ended.*",
    r".*Found .* module\(s\) in eval mode at the start of training.*",
)


def look_for_plugins_once() -> None:
    """Each Trainer looks through all that is installed for callbacks of other packages: here, the first one does."""
    registry.entry_points = functools.cache(registry.entry_points)


def silence() -> None:
    """Turn warnings into errors, but for `KNOWN` ones, and logs off."""
    warnings.resetwarnings()
    warnings.simplefilter("error")
    for message in KNOWN:
        warnings.filterwarnings("ignore", message=message)
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
