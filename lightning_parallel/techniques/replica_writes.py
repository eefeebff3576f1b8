"""Writes of a step into parameters of which every rank has a copy: refused where the copies are no longer equal."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.module.differences import first_of
from lightning_parallel.ranks.fingerprints import differing, of_copies, of_parameters
from lightning_parallel.ranks.mesh import build_host_group

ALWAYS = 4
"""Steps that are looked at one after the other; afterwards those whose number is a power of two."""


class ReplicaWrites:
    """Looks whether a step has written into parameters, in the first steps and then ever more rarely.

    DDP makes copies equal once and averages gradients. What a step writes into a parameter by itself stays on its rank:
    `nn.Embedding` with `max_norm` shortens the rows that its own samples use, running means are those of its samples.
    Torch counts such writes, but for those through ``.data``, behind which the bits have another sum.

    Args:
        module: The module, whose parameters are equal on all ranks.

    Example:
        >>> writes = ReplicaWrites(module)
        >>> writes.note()
        >>> ...  # forward
        >>> writes.check()
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._num_steps = 0
        self._before: dict[str, tuple[Tensor, int]] = {}
        self._sums: dict[str, int] = {}

    def note(self) -> None:
        """Call it before a training step, on all ranks: they evaluate different numbers of batches."""
        self._num_steps += 1
        looks = self._num_steps <= ALWAYS or not self._num_steps & (self._num_steps - 1)
        parameters = self._module.named_parameters() if looks and dist.get_world_size() > 1 else ()
        self._before = {name: (parameter, parameter._version) for name, parameter in parameters}
        self._sums = self._sums_of_bits()

    def _sums_of_bits(self) -> dict[str, int]:
        return {name: number for _, name, number in of_copies((name, p) for name, (p, _) in self._before.items())}

    def check(self) -> None:
        """Refuse a step that has made copies differ. Call it before its backward; a collective where it looks.

        A step that optimizes by itself writes into all parameters after its first backward, alike on all ranks.

        Raises:
            ConfigurationError: On all ranks, with the names of the parameters.
        """
        if not self._before:
            return
        sums = self._sums_of_bits()
        before, self._before = self._before, {}
        device = next(iter(before.values()))[0].device
        is_written = [p._version != v or sums.get(name) != self._sums.get(name) for name, (p, v) in before.items()]
        written = torch.tensor(is_written, dtype=torch.uint8)
        dist.all_reduce(written, op=dist.ReduceOp.MAX, group=build_host_group(device.type))
        names = [name for name, is_written in zip(before, written.tolist(), strict=True) if is_written]
        # All ranks may have written the same, as those do that clip weights.
        if names and (different := differing(list(of_parameters((name, before[name][0]) for name in names)))):
            raise ConfigurationError([_DIFFER.format(first_of(sorted(different)), self._hint(different))])

    def _hint(self, names: Collection[str]) -> str:
        shortened = [
            f"{path}.weight"
            for path, child in self._module.named_modules()
            if getattr(child, "max_norm", None) is not None
        ]
        if any(name in shortened for name in names):
            return "max_norm of nn.Embedding does so with the rows of its samples: normalize them in forward instead"
        return _REMEDY


_REMEDY = (
    "Keep it in a buffer, which all ranks get from rank 0, write what all ranks have computed alike, or draw first "
    "values in setup()"
)
_DIFFER = (
    "the step writes into {}, on each rank what its own samples give, so that the ranks would differ from now on. {}"
)
