"""Fits that begin with weights of files: every strategy, every kind of file, and what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_parallel import CheckpointError, ConfigurationError, build_strategy, full_state_dict
from lightning_parallel.callbacks import PretrainedWeights
from lightning_parallel.checkpoint.pretrained import _prefixes
from lightning_parallel.presets import PRESETS
from tests.data import batches
from tests.models.cases import VOCABULARY, ByteGPT, Case, next_token_loss
from tests.names import num_ranks, num_readers
from tests.parity import TOLERANCE, Outcome, checked, difference, make_trainer, train_module, worst
from tests.rank_pool import RankError


class Begun(ByteGPT):
    """A module with the weights that the files have."""

    def __init__(self) -> None:
        super().__init__()
        self.load_state_dict(weights())


def weights(seed: int = 7) -> dict[str, Tensor]:
    """Weights that no fit begins with by itself."""
    generator = torch.Generator().manual_seed(seed)
    own = ByteGPT().state_dict()
    return {name: 0.3 * torch.randn(each.shape, generator=generator) for name, each in own.items()}


def begun(name: str, size: int, steps: int = 3) -> Outcome:
    """One process, or a strategy, from the weights themselves."""
    return train_module(Begun, batches("byte_gpt", 1, steps), name, size)


def trained(
    path: str, name: str, steps: int = 3, make: Callable[[], L.LightningModule] = ByteGPT, **kw: Any
) -> Outcome:
    """A fit that begins with what is in a file."""
    size = 1 if name == "auto" else num_ranks(name.partition(":")[0])
    loader = batches("byte_gpt", num_readers(name.partition(":")[0], size), steps)
    return train_module(make, loader, name, size, watching=[PretrainedWeights(path, **kw)])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(weights(), path)
    return str(path)


@pytest.mark.parametrize("name", PRESETS)
def test_every_strategy_begins_with_them(ranks: Any, file: str, name: str) -> None:
    is_one = name == "dp_custom"
    found = trained(file, checked(name)) if is_one else ranks(num_ranks(name)).run(trained, file, checked(name))[0]
    assert worst(found, begun("auto", 1)) < TOLERANCE


# Kinds of files -----------------------------------------------------------------------------------------------------


def as_shards(path: Path) -> Path:
    """Two files and their index, beside a file in another layout of names."""
    own = weights()
    halves = [dict(list(own.items())[::2]), dict(list(own.items())[1::2])]
    files = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    for name, half in zip(files, halves, strict=True):
        save_file(half, path / name)
    index = {"weight_map": {key: name for name, half in zip(files, halves, strict=True) for key in half}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"consolidated": torch.zeros(2)}, path / "consolidated.safetensors")
    return path


def as_whole(path: Path) -> Path:
    """One file, beside another one."""
    save_file(weights(), path / "model.safetensors")
    save_file({"consolidated": torch.zeros(2)}, path / "consolidated.safetensors")
    return path


def as_state_dict(path: Path) -> Path:
    torch.save(weights(), path / "weights.pt")
    return path / "weights.pt"


def as_checkpoint(path: Path) -> Path:
    trainer = make_trainer("auto", 1, max_steps=0)
    trainer.fit(Begun(), batches("byte_gpt", 1, 1))
    trainer.save_checkpoint(path / "a.ckpt")
    return path / "a.ckpt"


def save_folder(path: str) -> None:
    """The sharded checkpoint of two ranks."""
    trainer = make_trainer(build_strategy("fsdp_custom:checkpoint=sharded,check=off"), 2, max_steps=0)
    trainer.fit(Begun(), batches("byte_gpt", 2, 1))
    trainer.save_checkpoint(path)


@pytest.mark.parametrize("kind", [as_shards, as_whole, as_state_dict, as_checkpoint, "folder"])
@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom", "pp_custom"])
def test_every_kind_of_file(ranks: Any, tmp_path: Path, kind: Any, name: str) -> None:
    if kind == "folder":
        path = tmp_path / "a.ckpt"
        ranks(2).run(save_folder, str(path))
    else:
        path = kind(tmp_path)
    assert worst(ranks(2).run(trained, str(path), name)[0], begun("auto", 1)) < TOLERANCE


def read_elements(path: str) -> tuple[int, int]:
    """The elements that this rank reads, and those of the module."""
    read: list[int] = []
    opened = safetensors.safe_open

    class Slice:
        def __init__(self, own: Any) -> None:
            self.own = own

        def __getattr__(self, name: str) -> Any:
            return getattr(self.own, name)

        def __getitem__(self, index: Any) -> Tensor:
            found: Tensor = self.own[index]
            read.append(found.numel())
            return found

    class Opened:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.own = opened(*args, **kwargs)

        def __enter__(self) -> Any:
            self.own.__enter__()
            return self

        def __exit__(self, *args: object) -> None:
            self.own.__exit__(*args)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.own, name)

        def get_slice(self, name: str) -> Slice:
            return Slice(self.own.get_slice(name))

    with mock.patch.object(safetensors, "safe_open", Opened):
        trained(path, "fsdp_custom", 1)
    return sum(read), sum(each.numel() for each in weights().values())


def test_a_rank_reads_its_own_slices(ranks: Any, file: str) -> None:
    found = ranks(2).run(read_elements, file)
    assert sum(read for read, _ in found) == found[0][1]
    assert all(0.4 < read / whole < 0.6 for read, whole in found)


# A model inside of a module -----------------------------------------------------------------------------------------


class Wrapped(Case):
    """A model in an attribute, that is built where it is on no device yet, with a head of its own."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = ByteGPT().model
            self.head = nn.Linear(VOCABULARY, VOCABULARY)

    def loss(self, tokens: Tensor) -> Tensor:
        return next_token_loss(self.head(self.model(tokens)), tokens)


def first_weights(path: str, name: str, **kw: Any) -> dict[str, Tensor]:
    """What a fit of no steps begins with."""
    L.seed_everything(3, verbose=False)
    trainer = make_trainer(
        build_strategy(name), num_ranks(name), callbacks=[PretrainedWeights(path, **kw)], max_steps=0
    )
    trainer.fit(Wrapped(), batches("byte_gpt", 1, 1))
    return full_state_dict(trainer)


def of_model() -> dict[str, Tensor]:
    return {name.removeprefix("model."): each for name, each in weights().items()}


@pytest.mark.parametrize("name", ["fsdp_custom", "tp_custom", "pp_custom", "zero1_custom"])
@pytest.mark.parametrize("prefix", [None, "model."])
def test_a_model_inside_of_a_module(ranks: Any, tmp_path: Path, name: str, prefix: str | None) -> None:
    save_file(of_model(), tmp_path / "own.safetensors")
    found = ranks(2).run(first_weights, str(tmp_path / "own.safetensors"), name, prefix=prefix)[0]
    assert difference({key: each for key, each in found.items() if key.startswith("model.")}, weights()) == 0.0
    assert found["head.weight"].abs().sum() > 0


def of_llama(path: str, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights of a model of Hugging Face that a strategy reads, and those of `from_pretrained`."""
    import transformers

    class Module(L.LightningModule):
        def configure_model(self) -> None:
            self.net = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(path))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch[0], labels=batch[0]).loss  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-3)

    trainer = make_trainer(build_strategy(name), 2, callbacks=[PretrainedWeights(path)], max_steps=0)
    trainer.fit(Module(), batches("byte_gpt", 1, 1))
    own = transformers.LlamaForCausalLM.from_pretrained(path).state_dict()
    return full_state_dict(trainer), {f"net.{key}": each for key, each in own.items()}


@pytest.mark.parametrize("tied", [True, False])
def test_what_hugging_face_has_saved(ranks: Any, tmp_path: Path, tied: bool) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size="8KB")
    for name in ("fsdp_custom", "pp_custom"):
        ours, theirs = ranks(2).run(of_llama, str(tmp_path), name)[0]
        assert difference(ours, theirs) == 0.0


# What does not fit --------------------------------------------------------------------------------------------------


def refusal(own: dict[str, Tensor], path: Path, **kw: Any) -> str:
    save_file(own, path / "own.safetensors")
    with pytest.raises(ConfigurationError) as caught:
        trained(str(path / "own.safetensors"), "auto", 1, **kw)
    return str(caught.value)


def test_all_that_does_not_fit_is_said_at_once(tmp_path: Path) -> None:
    own = weights()
    first, second, third, *_ = own
    own["other.weight"] = torch.zeros(2)
    own[first] = torch.zeros(3, 5)
    own[second] = torch.zeros_like(own[second], dtype=torch.int8)
    del own[third]
    said = refusal(own, tmp_path)
    assert f"{first} has the shape [3, 5] in the files, and {list(weights()[first].shape)} in the module" in said
    assert f"{second} is of torch.int8 in the files, and of torch.float32 in the module" in said
    assert f"the files lack {third}; give strict=False" in said
    assert "the module has no other.weight; give strict=False" in said


def test_files_of_another_model(tmp_path: Path) -> None:
    said = refusal({"a.weight": torch.zeros(2)}, tmp_path)
    assert "no name in the files is one of the module: the files have a.weight, and the module has " in said
    assert "with 'encoder.' in front" in refusal(weights(), tmp_path, prefix="encoder.")


class Twins(ByteGPT):
    """A model and the teacher that begins alike."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.teacher = ByteGPT().model


def test_a_prefix_that_could_be_either(tmp_path: Path) -> None:
    said = refusal(of_model(), tmp_path, make=Twins)
    assert "give prefix='model.' or prefix='teacher.'" in said


def test_what_is_not_strict_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = weights()
    lacking = next(iter(own))
    del own[lacking]
    own["other.weight"] = torch.zeros(2)
    save_file(own, tmp_path / "own.safetensors")
    with caplog.at_level("INFO"):
        found = trained(str(tmp_path / "own.safetensors"), "auto", 1, strict=False)
    assert f"{len(own) - 1} tensors from {tmp_path / 'own.safetensors'}; not in the files: {lacking}" in caplog.text
    assert "; not in the module: other.weight" in caplog.text
    assert not torch.equal(found.initial[lacking], weights()[lacking])


def missing_on_one(path: str) -> str:
    import torch.distributed as dist

    try:
        trained(path if dist.get_rank() == 0 else f"{path}.gone", "fsdp_custom", 1)
    except CheckpointError as error:
        return str(error)
    return ""


def test_files_that_one_rank_lacks_end_all(ranks: Any, file: str) -> None:
    said = ranks(2).run(missing_on_one, file)
    assert len(set(said)) == 1
    assert "there is no file" in said[0]
    assert said[0].endswith("(rank 1)")


def test_damaged_files(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "own.safetensors").write_bytes(b"no weights")
    with pytest.raises(RankError, match=r"own\.safetensors cannot be read"):
        ranks(2).run(trained, str(tmp_path / "own.safetensors"), "ddp_custom", 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="is a folder, and no sharded checkpoint"):
        trained(str(tmp_path / "empty"), "auto", 1)


# Later fits ---------------------------------------------------------------------------------------------------------


def test_a_second_fit_and_a_resumed_one_read_nothing(
    file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module, loader = ByteGPT(), batches("byte_gpt", 1, 2)
    trainer = make_trainer("auto", 1, callbacks=[PretrainedWeights(file)], max_steps=1)
    trainer.fit(module, loader)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    after = {name: each.clone() for name, each in module.state_dict().items()}
    trainer.fit_loop.epoch_loop.max_steps = 1
    with caplog.at_level("INFO"):
        trainer.fit(module, loader)
    assert "nothing is read into a module which has trained on them already" in caplog.text
    assert difference(dict(module.state_dict()), after) == 0.0
    again = make_trainer("auto", 1, callbacks=[PretrainedWeights(file)], max_steps=1)
    again.fit(other := ByteGPT(), loader, ckpt_path=tmp_path / "a.ckpt")
    assert difference(dict(other.state_dict()), after) == 0.0


def test_one_callback_for_several_modules_and_behind_an_error(file: str, tmp_path: Path) -> None:
    """In a search over modules, and in a notebook where the path was mended."""
    callback, loader = PretrainedWeights(tmp_path / "gone.safetensors"), batches("byte_gpt", 1, 1)
    module = ByteGPT()
    with pytest.raises(CheckpointError, match="there is no file"):
        make_trainer("auto", 1, callbacks=[callback], max_steps=0).fit(module, loader)
    callback.path = Path(file)
    for each in (module, ByteGPT(), ByteGPT()):
        make_trainer("auto", 1, callbacks=[callback], max_steps=0).fit(each, loader)
        assert difference(dict(each.state_dict()), weights()) == 0.0


def fails_on_one(path: str) -> str:
    import torch.distributed as dist

    from lightning_parallel.callbacks import pretrained_weights

    def read(*args: Any) -> None:
        if dist.get_rank() == 1:
            raise OSError("the disk is gone")

    with mock.patch.object(pretrained_weights, "read_weights", read), pytest.raises(CheckpointError) as caught:
        trained(path, "fsdp_custom", 1)
    return str(caught.value)


def test_a_rank_that_fails_in_reading_ends_all(ranks: Any, file: str) -> None:
    said = ranks(2).run(fails_on_one, file)
    assert len(set(said)) == 1
    assert "cannot be read (OSError: the disk is gone)" in said[0]


def test_a_prefix_is_found_among_many_names() -> None:
    """As many as a model of experts has: one pass over these, and not one for each prefix."""
    described = [f"model.layers.{i}.mlp.experts.{j}.up.weight" for i in range(48) for j in range(128)]
    assert _prefixes([f"net.{name}" for name in described], described) == ["net."]
    assert _prefixes([f"{twin}.{name}" for twin in "ab" for name in described], described) == ["a.", "b."]
    assert _prefixes(["a.b"], ["c"]) == []
