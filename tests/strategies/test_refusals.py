"""Set-ups that cannot run: refused when the Trainer is made or when `fit` begins, in words, with every reason."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader

from lightning_parallel import ConfigurationError, DDPStrategy, MeshStrategy, build_strategy
from lightning_parallel.presets import PRESETS
from lightning_parallel.strategies.process_group import ProcessGroupStrategy
from tests.data import data_of
from tests.jobs.fits import fit_module, messages
from tests.jobs.lifecycle import fast_dev_run
from tests.models.cases import LENGTH, REFUSED_CASES, VOCABULARY, ByteGPT
from tests.parity import make_trainer


@pytest.mark.parametrize(
    ("strategy", "devices", "kwargs", "words"),
    [
        ("hsdp_custom", 3, {}, ["replicate=2 does not divide 3 ranks", "even number"]),
        ("fsdp_custom:shard=3", 4, {}, ["3 ranks, but there are 4", "shard=4"]),
        ("fsdp_custom:reshard=3", 4, {}, ["reshard=3", "1, 2, 4"]),
        ("fsdp_custom:offload=some", 2, {}, ["offload='some'", "none, optimizer, all"]),
        ("ddp_custom:comm_hook=bf16", 2, {}, ["needs NCCL", "gloo", "fp16"]),
        ("ddp_custom:comm_hook=zip", 2, {}, ["'zip' is unknown", "powersgd"]),
        ("ddp_custom:comm_hook=powersgd,find_unused_parameters=true", 2, {}, ["wait for ever", "comm_hook='fp16'"]),
        ("ddp_custom:powersgd_rank=2", 2, {}, ["belongs to comm_hook='powersgd'"]),
        ("fsdp_custom:schedule=gpipe,virtual_stages=2", 2, {}, ["'gpipe' is for pipeline > 1", "virtual_stages=2"]),
        ("fsdp_custom:stages=[1,2],microbatches=4", 2, {}, ["stages=[1, 2] is for pipeline > 1", "microbatches=4"]),
        ("fsdp_custom:tensor_plan={up: colwise}", 2, {}, ["tensor_plan is for tensor > 1, but tensor=1"]),
        ("fsdp_custom:shard=3,sequence=true", 4, {}, ["2 problems", "sequence=True is for tensor > 1"]),
        ("fsdp_custom", 2, {"precision": "transformer-engine"}, []),
        ("fsdp_custom", 2, {"sync_batchnorm": True}, ["sync_batchnorm=True needs CUDA"]),
        ("pp_custom", 2, {"sync_batchnorm": True}, ["2 problems", "sync_batchnorm=True with pipeline=2", "microbatch"]),
        ("fsdp_custom:tensor=2,reshard=2", 8, {}, ["reshard=2 with tensor=2", "'always' or 'never'"]),
        ("dp_custom", 2, {"num_nodes": 2}, ["num_nodes=2", "ddp_custom"]),
        ("fsdp_custom:process_group_backend=nccl", 2, {}, ["'nccl' needs CUDA devices"]),
        ("fsdp_custom:process_group_backend=mpi", 2, {}, ["'mpi' is not available"]),
        ("fsdp_custom:shard=3,reshard=7,offload=some", 4, {}, ["2 problems", "offload='some'", "shard 3"]),
    ],
)
def test_the_trainer_is_not_made(strategy: str, devices: int, kwargs: dict[str, Any], words: list[str]) -> None:
    start = time.monotonic()
    with pytest.raises((ConfigurationError, ImportError, ModuleNotFoundError)) as caught:
        make_trainer(build_strategy(strategy), devices, **kwargs)
    assert time.monotonic() - start < 5
    assert not dist.is_initialized()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("reshard", ["1", "4", "always"])
def test_what_torch_takes_for_always_and_never_is_taken_with_tensor(reshard: str) -> None:
    make_trainer(build_strategy(f"fsdp_custom:tensor=2,reshard={reshard}"), 8)


@pytest.mark.parametrize(
    ("strategy", "module", "words"),
    [
        ("fsdp_custom:layers=model.block", ByteGPT, ["layers='model.block' does not exist", "model.blocks"]),
        ("fsdp_custom:forward_methods=[model.fly]", ByteGPT, ["'model.fly'", "no such method"]),
        ("ddp_custom", REFUSED_CASES["all_frozen"], ["no trainable parameters"]),
        ("zero2_custom", REFUSED_CASES["meta_in_init"], ["meta device", "configure_model", "model.tokens.weight"]),
        ("fsdp_custom:layers=x,forward_methods=[y]", REFUSED_CASES["all_frozen"], ["3 problems", "'x'", "'y'"]),
    ],
)
def test_fit_starts_no_process(
    strategy: str, module: type[L.LightningModule], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen", fail)
    trainer = make_trainer(build_strategy(strategy), 2)
    start = time.monotonic()
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(module(), DataLoader(data_of("byte_gpt", 8, 4), batch_size=2))
    assert time.monotonic() - start < 5
    assert not dist.is_initialized()
    for word in words:
        assert word in str(caught.value)


class Lazy(ByteGPT):
    """Its head gets its shape from what it is given first."""

    def __init__(self) -> None:
        super().__init__()
        self.model.head = nn.LazyLinear(VOCABULARY)


class LazyInSetup(Lazy):
    def setup(self, stage: str) -> None:
        self(torch.zeros(1, LENGTH, dtype=torch.long))


@pytest.mark.parametrize("strategy", [name for name in PRESETS if name != "auto_custom"])
def test_modules_without_shapes_are_refused(strategy: str) -> None:
    devices = 4 if "_tp" in strategy or strategy == "hsdp_custom" else 1 if strategy == "dp_custom" else 2
    trainer = make_trainer(build_strategy(strategy), devices)
    with pytest.raises(ConfigurationError, match=r"2 tensors of Lazy have no shape yet \(model.head.weight"):
        trainer.fit(Lazy(), DataLoader(data_of("byte_gpt", 8, 4), batch_size=2))
    assert not dist.is_initialized()


def test_modules_that_get_their_shapes_in_setup_are_trained() -> None:
    trainer = make_trainer(build_strategy("fsdp_custom"), 1, max_epochs=1)
    trainer.fit(LazyInSetup(), DataLoader(data_of("byte_gpt", 4, 4), batch_size=2))
    assert trainer.global_step == 2


def packed() -> L.LightningModule:
    """Its linear maps are frozen, in 8 bits."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    module = ByteGPT()
    quantize_(module.model.blocks, Int8WeightOnlyConfig())
    module.model.blocks.requires_grad_(False)
    return module


@pytest.mark.parametrize(
    ("strategy", "devices"), [(name, 2) for name in PRESETS if name != "dp_custom"] + [("ddp_custom", 1)]
)
def test_packed_weights_are_refused_where_they_would_be_sent(strategy: str, devices: int) -> None:
    trainer = make_trainer(build_strategy(strategy), 4 if "_tp" in strategy or strategy == "hsdp_custom" else devices)
    with pytest.raises(ConfigurationError, match=r"are packed \(torchao's Int8Tensor\): model.blocks.0"):
        trainer.fit(packed(), DataLoader(data_of("byte_gpt", 8, 4), batch_size=2))
    assert not dist.is_initialized()


def test_packed_weights_train_on_one_device() -> None:
    trainer = make_trainer(build_strategy("fsdp_custom"), 1, max_epochs=1)
    trainer.fit(packed(), DataLoader(data_of("byte_gpt", 4, 4), batch_size=2))
    assert trainer.global_step == 2


@pytest.mark.parametrize(
    ("strategy", "kwargs", "words"),
    [
        ("fsdp_custom", {"callbacks": [ModelPruning("l1_unstructured")]}, ["ModelPruning sorts and replaces"]),
        ("fsdp_custom", {"callbacks": [StochasticWeightAveraging(0.1)]}, ["StochasticWeightAveraging copies"]),
        ("fsdp_custom:optimizer_in_backward=true", {"gradient_clip_val": 1.0}, ["gradient_clip_val"]),
        ("pp_custom", {"callbacks": [StochasticWeightAveraging(0.1)]}, ["2 problems", "iterator"]),
    ],
)
def test_what_is_known_of_a_module_that_is_not_built(strategy: str, kwargs: dict[str, Any], words: list[str]) -> None:
    class Unbuilt(REFUSED_CASES["all_frozen"]):  # type: ignore[misc]
        def configure_model(self) -> None:
            raise AssertionError("the module was built")

        def predict_step(self, dataloader_iter: Any) -> None: ...

    module = Unbuilt()
    trainer = make_trainer(build_strategy(strategy), 2, **kwargs)
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(module, DataLoader(data_of("byte_gpt", 8, 4), batch_size=2))
    assert all(word in str(caught.value) for word in words)
    assert not dist.is_initialized()


@pytest.mark.parametrize("name", PRESETS)
def test_a_compiled_module_is_refused_with_what_to_give(name: str) -> None:
    trainer = make_trainer(build_strategy(name), 1)
    for run in (trainer.fit, trainer.validate):
        with pytest.raises(ConfigurationError, match="compile=layers"):
            run(torch.compile(ByteGPT()), DataLoader(data_of("byte_gpt", 8, 4), batch_size=2))


def test_validation_needs_no_trainable_parameters(ranks: Any) -> None:
    assert ranks(2).run(validate_frozen) == [True, True]


def validate_frozen() -> bool:
    loader = DataLoader(data_of("byte_gpt", 8, 4), batch_size=2)
    return bool(
        make_trainer(build_strategy("fsdp_custom"), 2).validate(REFUSED_CASES["all_frozen"](), loader, verbose=False)
    )


def test_the_reasons_are_given_once(ranks: Any) -> None:
    """All ranks refuse, one says why."""
    found = ranks(2).run(messages, fit_module, REFUSED_CASES["all_frozen"], "fsdp_custom", 2)
    assert "no trainable parameters" in found[0][0]
    assert found[1] == ["refused; rank 0 says why"]


def test_another_number_of_ranks_than_the_group_has(ranks: Any) -> None:
    ranks(2).run(fast_dev_run, "fsdp_custom", 2)
    found = ranks(2).run(messages, make_other_trainer)
    assert "already belongs to a group of 2 ranks" in found[0][0]


def make_other_trainer() -> None:
    make_trainer(DDPStrategy(), 4)


def test_configuration_errors_are_value_errors_that_pickle() -> None:
    import pickle

    error = ConfigurationError(["a", "b"])
    assert isinstance(error, ValueError)
    assert pickle.loads(pickle.dumps(error)).violations == ("a", "b")


def test_the_mesh_exists_once_training_has_begun() -> None:
    with pytest.raises(RuntimeError, match="only once fit"):
        _ = MeshStrategy().mesh
    assert issubclass(MeshStrategy, ProcessGroupStrategy)


@pytest.mark.parametrize(
    "strategy", ["tp_custom:sequence=true", "pp_custom:schedule=gpipe,stages=[1,2]", "cp_custom:context_attention=ring"]
)
def test_options_of_a_degree_that_the_machine_makes_1_are_kept(strategy: str) -> None:
    """The same line serves one device and many."""
    assert build_in_trainer(strategy).set_up_violations() == []


def build_in_trainer(strategy: str) -> MeshStrategy:
    found = make_trainer(build_strategy(strategy), 1).strategy
    assert isinstance(found, MeshStrategy)
    return found
