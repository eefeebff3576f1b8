"""Weights of a checkpoint in the formats of other tools, equal in every bit; and what is refused."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor

from lightning_parallel import CheckpointError, ConfigurationError
from lightning_parallel.checkpoint import opened
from lightning_parallel.checkpoint.chosen_weights import ChosenWeights
from lightning_parallel.checkpoint.safetensors_files import shards_of
from lightning_parallel.checkpoint.whole_file import damage_of
from lightning_parallel.cli import export as command
from lightning_parallel.cli.byte_sizes import bytes_in
from lightning_parallel.cli.export import export
from tests.cli.command import ROOT, run
from tests.jobs.exports import ReadAnew, WithHyperParameters, damage, is_equal, trained
from tests.models.cases import CASES
from tests.models.hugging_face import Llama
from tests.models.pipelined import DeepTied


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints by the name of their module."""
    path = tmp_path_factory.mktemp("export")
    torch.manual_seed(0)
    trained(CASES["byte_gpt"](), path / "byte_gpt.ckpt")
    trained(DeepTied(), path / "tied.ckpt")
    trained(WithHyperParameters(32), path / "hyper.ckpt")
    for name, module in (("gpt2", CASES["hf_gpt2"]("adamw")), ("llama", Llama())):
        trained(module, path / f"{name}.ckpt")
        module.model.config.save_pretrained(path / f"{name}_config")
    return path


def weights_of(path: Path) -> dict[str, Tensor]:
    return dict(torch.load(path)["state_dict"])


def rest(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Each format ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["byte_gpt", "tied"])
def test_a_state_dict(folder: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "new" / "model.pt"
    assert export([str(folder / f"{name}.ckpt"), "--to", "torch", "--out", str(out)]) == 0
    found = torch.load(out)
    assert is_equal(found, weights_of(folder / f"{name}.ckpt"))
    assert found._metadata == torch.load(folder / f"{name}.ckpt")["state_dict"]._metadata
    is_tied = found["model.head.weight"].data_ptr() == found["model.tokens.weight"].data_ptr()
    assert is_tied == (name == "tied")
    assert damage_of(out) == ""
    assert rest(out.parent) == ["model.pt"]


def test_a_checkpoint_without_training(folder: Path, tmp_path: Path) -> None:
    source, out = folder / "hyper.ckpt", tmp_path / "small.ckpt"
    assert export([str(source), "--to", "lightning", "--out", str(out)]) == 0
    module = WithHyperParameters.load_from_checkpoint(out, map_location="cpu", weights_only=True)
    assert is_equal(module.state_dict(), weights_of(source))
    assert module.hparams["width"] == 32
    assert module.loaded == "kept"
    assert set(torch.load(source)) - set(torch.load(out)) == {"optimizer_states", "lr_schedulers", "callbacks"}
    assert out.stat().st_size < source.stat().st_size / 2


@pytest.mark.parametrize("name", ["byte_gpt", "tied"])
def test_safetensors(folder: Path, tmp_path: Path, name: str) -> None:
    source = folder / f"{name}.ckpt"
    assert export([str(source), "--to", "safetensors", "--out", str(tmp_path / "out")]) == 0
    assert rest(tmp_path / "out") == ["model.safetensors"]
    assert rest(tmp_path) == ["out"]
    path = tmp_path / "out" / "model.safetensors"
    expected = weights_of(source)
    module = DeepTied() if name == "tied" else CASES[name]()
    assert load_model(module, path) == (set(), [])
    assert is_equal(module.state_dict(), expected)
    tied = {"model.head.weight": "model.tokens.weight"} if name == "tied" else {}
    assert is_equal(load_file(path), {key: value for key, value in expected.items() if key not in tied})
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", **tied}


def test_safetensors_in_shards(folder: Path, tmp_path: Path) -> None:
    """No file has more than the size, but for one tensor that is larger by itself; the index names them all."""
    source, out = folder / "tied.ckpt", tmp_path / "out"
    assert export([str(source), "--to", "safetensors", "--out", str(out), "--shard-size", "5kB"]) == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 5
    assert rest(out) == [*files, "model.safetensors.index.json"]
    parts = {name: load_file(out / name) for name in files}
    sizes = [sum(each.nbytes for each in part.values()) for part in parts.values()]
    assert max(sizes) <= 5000
    assert index["metadata"]["total_size"] == sum(sizes)
    assert {key: name for name, part in parts.items() for key in part} == index["weight_map"]
    expected = weights_of(source)
    del expected["model.head.weight"]
    assert is_equal({key: value for part in parts.values() for key, value in part.items()}, expected)
    large = ChosenWeights({"large": torch.ones(9), "small": torch.ones(1)})
    assert [[each.name for each in shard] for shard in shards_of(large, 4)] == [["large"], ["small"]]


@pytest.mark.parametrize("size", ["5GB", "8kB"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_folder_of_hugging_face(folder: Path, tmp_path: Path, name: str, size: str) -> None:
    from transformers import AutoModelForCausalLM

    source, out = folder / f"{name}.ckpt", tmp_path / "out"
    given = ["--config", str(folder / f"{name}_config"), "--shard-size", size]
    assert export([str(source), "--to", "huggingface", "--out", str(out), *given]) == 0
    assert ("model.safetensors" in rest(out)) == (size == "5GB")
    assert (out / "config.json").read_text() == (folder / f"{name}_config" / "config.json").read_text()
    model, told = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(told.values())
    expected = weights_of(source)
    assert is_equal({f"model.{key}": value for key, value in model.state_dict().items()}, expected)


def test_the_config_of_hyperparameters(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = torch.load(folder / "llama.ckpt")
    config = json.loads((folder / "llama_config" / "config.json").read_text())
    torch.save({**checkpoint, "hyper_parameters": {"width": 3, "config": config}}, tmp_path / "a.ckpt")
    arguments = [str(tmp_path / "a.ckpt"), "--to", "huggingface", "--out", str(tmp_path / "out")]
    assert export([*arguments, "--dtype", "bfloat16"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    weight = checkpoint["state_dict"]["model.lm_head.weight"]
    assert torch.equal(model.lm_head.weight, weight.bfloat16())


# What is chosen -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["torch", "lightning", "safetensors"])
def test_averages_in_the_place_of_weights(folder: Path, tmp_path: Path, to: str) -> None:
    source, out = folder / "tied.ckpt", tmp_path / f"out.{to}"
    assert export([str(source), "--to", to, "--out", str(out), "--average"]) == 0
    average = torch.load(source)["callbacks"]["ExponentialMovingAverage"]["average"]
    raw = weights_of(source)
    assert not torch.equal(average["model.tokens.weight"], raw["model.tokens.weight"])
    found = load_file(out) if to == "safetensors" else torch.load(out)
    found = found["state_dict"] if to == "lightning" else dict(found)
    expected = {**raw, **average, "model.head.weight": average["model.tokens.weight"]}
    if to == "safetensors":
        del expected["model.head.weight"]
    assert is_equal(found, expected)


@pytest.mark.parametrize("to", ["torch", "safetensors"])
def test_dtypes(tmp_path: Path, to: str) -> None:
    """Integers and booleans stay; what is contiguous, a view or without elements is written alike."""
    weights = {
        "scalar": torch.tensor(1.5), "flag": torch.tensor([True, False]), "steps": torch.tensor(7),
        "turned": torch.arange(6.0).reshape(2, 3).T, "part": torch.arange(10.0)[3:5], "empty": torch.ones(0, 4),
        "half": torch.ones(3, dtype=torch.bfloat16), "double": torch.ones(3, dtype=torch.float64),
        "float8": torch.ones(3).to(torch.float8_e4m3fn), "byte": torch.ones(3, dtype=torch.uint8),
        "odd": torch.tensor([math.inf, math.nan, -math.inf, 1.0]),
    }  # fmt: skip
    torch.save({"state_dict": weights}, tmp_path / "a.ckpt")
    for dtype in (None, torch.bfloat16, torch.float16, torch.float32):
        out = tmp_path / f"{dtype}.{to}"
        given = ["--dtype", str(dtype).removeprefix("torch.")] if dtype else []
        assert export([str(tmp_path / "a.ckpt"), "--to", to, "--out", str(out), *given]) == 0
        found = load_file(out) if to == "safetensors" else torch.load(out)
        floating = {name for name, value in weights.items() if dtype and value.is_floating_point()}
        assert is_equal(found, {key: value.to(dtype) if key in floating else value for key, value in weights.items()})


def test_the_average_of_a_tied_name_alone(folder: Path, tmp_path: Path) -> None:
    """The callback saves it under the first name, which is not among those that are exported."""
    source, out = folder / "tied.ckpt", tmp_path / "a.pt"
    assert export([str(source), "--to", "torch", "--out", str(out), "--average", "--prefix", "model.head"]) == 0
    average = torch.load(source)["callbacks"]["ExponentialMovingAverage"]["average"]["model.tokens.weight"]
    assert is_equal(torch.load(out), {"weight": average})


def test_a_prefix(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.pt"
    source = str(folder / "tied.ckpt")
    for prefix in ("model.blocks", "model.blocks."):
        assert export([source, "--to", "torch", "--out", str(out), "--prefix", prefix, "--force"]) == 0
        found = torch.load(out)
        expected = {key.removeprefix("model.blocks."): value for key, value in weights_of(Path(source)).items()}
        assert is_equal(found, {key: value for key, value in expected.items() if not key.startswith("model.")})
        assert {"", "0.attention"} < set(found._metadata)
        assert "blocks" not in " ".join(found._metadata)


def test_any_mapping_will_do(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other forms of checkpoints read a tensor when it is asked for: one at a time is in memory."""
    source = folder / "byte_gpt.ckpt"
    checkpoint = opened.open_checkpoint(source)
    kinds = [("torch", "float32"), ("torch", "bfloat16"), ("lightning", "float32"), ("safetensors", "float32")]
    for to, dtype in kinds:
        weights = ReadAnew(checkpoint["state_dict"])
        monkeypatch.setattr(command, "open_checkpoint", lambda path, **_: {**checkpoint, "state_dict": weights})  # noqa: B023
        out = tmp_path / f"{dtype}.{to}"
        assert export([str(source), "--to", to, "--out", str(out), "--dtype", dtype]) == 0
        found = load_file(out) if to == "safetensors" else torch.load(out)
        found = found["state_dict"] if to == "lightning" else dict(found)
        expected = {name: value.to(getattr(torch, dtype)) for name, value in weights_of(source).items()}
        assert is_equal(found, expected)
        assert weights.most_alive <= 3


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("byte_gpt --to huggingface --out {out}", "the checkpoint's hyperparameters have no config"),
        ("gpt2 --to huggingface --out {out} --config {out}", "does not exist; give the config.json"),
        ("gpt2 --to huggingface --out {out} --config {folder}/gpt2.ckpt", "it must be JSON with model_type"),
        ("hyper --to lightning --out {out} --prefix model", "the module has the names of the checkpoint"),
        ("hyper --to torch --out {out} --config {folder}", "only huggingface has one; leave it out"),
        ("hyper --to torch --out {out} --shard-size 1GB", "which is one file; leave it out"),
        ("hyper --to safetensors --out {out} --shard-size many", "is no number of bytes; give one such as"),
        ("hyper --to safetensors --out {out}.safetensors --shard-size 1kB", "more than 1kB a file; give a folder"),
        ("hyper --to torch --out {out} --prefix net", "begins no name of a tensor; there are model.tokens.weight"),
        ("hyper --to torch --out {out}.safetensors", "give a name that does not end in .safetensors"),
        ("hyper --to torch --out {folder}", "is a folder, and --to torch writes a file; give one such as"),
        ("hyper --to safetensors --out {folder} --force", "files of others"),
        ("hyper --to safetensors --out {folder}/hyper.ckpt --force", "writes a folder; give another path"),
        ("hyper --to torch --out {folder}/hyper.ckpt", "exists; give another path, or --force to replace it"),
    ],
)
def test_what_is_refused(folder: Path, tmp_path: Path, given: str, words: str) -> None:
    name, *arguments = given.format(out=tmp_path / "out", folder=folder).split()
    before = rest(folder)
    with pytest.raises(ConfigurationError) as error:
        export([str(folder / f"{name}.ckpt"), *arguments])
    assert words in str(error.value)
    assert rest(tmp_path) == []
    assert rest(folder) == before


@pytest.mark.parametrize(
    ("value", "given", "words"),
    [
        ({"state_dict": {"a": torch.ones(2)}}, "--average", "no averages of ExponentialMovingAverage"),
        (
            {"state_dict": {"a": torch.ones(2)}, "callbacks": {"E": {"steps": 1, "average": {"b": torch.ones(2)}}}},
            "--average",
            "b has an average, and the state_dict lacks it",
        ),
        (
            {"state_dict": {"a": torch.ones(2)}, "callbacks": {"E": {"steps": 1, "average": {"a": torch.ones(3)}}}},
            "--average",
            "a has the shape (2,), and its average (3,)",
        ),
        (
            {"state_dict": {"a": torch.tensor([math.nan, 1e5])}},
            "--dtype float16",
            "a has values up to 1e+05, and the largest",
        ),
        ({"state_dict": {"a": torch.ones(2, dtype=torch.complex128)}}, "", "which safetensors lacks; give --to torch"),
        ({"state_dict": {"a": torch.ones(2), "b._extra_state": {"c": 1}}}, "", "b._extra_state is a dict"),
        ({"state_dict": {"a.b": torch.ones(2), "c.d": torch.ones(2)}}, "--to huggingface", "names begin with a., c.,"),
    ],
)
def test_checkpoints_that_do_not_fit(tmp_path: Path, value: Any, given: str, words: str) -> None:
    torch.save(value, tmp_path / "a.ckpt")
    arguments = [str(tmp_path / "a.ckpt"), "--to", "safetensors", "--out", str(tmp_path / "out"), *given.split()]
    with pytest.raises(ConfigurationError) as error:
        export(arguments)
    assert words in str(error.value)
    assert rest(tmp_path) == ["a.ckpt"]


def test_no_checkpoint_of_lightnings(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="Lightning has not written it; give"):
        export([str(tmp_path / "a.pt"), "--to", "lightning", "--out", str(tmp_path / "out.ckpt")])


def test_extra_state_is_kept_where_it_can_be(tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.ones(2), "b._extra_state": {"c": 1}}}, tmp_path / "a.ckpt")
    assert export([str(tmp_path / "a.ckpt"), "--to", "torch", "--out", str(tmp_path / "a.pt")]) == 0
    assert torch.load(tmp_path / "a.pt")["b._extra_state"] == {"c": 1}


def test_a_damaged_one(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    changed, cut = damage(folder / "byte_gpt.ckpt", tmp_path)
    for path, words in ((changed, "differs from its checksum"), (cut, "its end is missing")):
        assert run(monkeypatch, "export", str(path), "--to", "torch", "--out", str(tmp_path / "out")) == 2
        error = capsys.readouterr().err
        assert error.count(words) == 1
        assert "Traceback" not in error
    assert rest(tmp_path) == ["changed.ckpt", "cut.ckpt"]


# What was there before ------------------------------------------------------------------------------------------------


AT_THE_END = {"torch": "cli.export.save_into", "safetensors": "checkpoint.whole_folder.sync_folder"}
"""Format -> what is called when all, or all but the tensors, has been prepared."""


@pytest.mark.parametrize("to", AT_THE_END)
def test_what_was_there_stays_until_all_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    given = [str(folder / "gpt2.ckpt"), "--to", to, "--out", str(tmp_path / "out")]
    assert export(given) == 0
    first = content()
    with pytest.raises(ConfigurationError, match="--force"):
        export(given)
    with monkeypatch.context() as patch:
        patch.setattr(f"lightning_parallel.{AT_THE_END[to]}", fail)
        with pytest.raises(CheckpointError, match=r"No space left.*bytes are free there.*what was there is unchanged"):
            export([*given, "--force", "--dtype", "float16"])
    assert content() == first
    assert rest(tmp_path) == ["out"]
    assert export([*given, "--force", "--dtype", "float16"]) == 0
    assert set(content()) == set(first)
    assert content() != first
    assert rest(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4096", 4096), ("500MB", 500_000_000), ("1.5 GiB", 3 * 2**29), ("5gb", 5 * 10**9), ("2T", 2 * 10**12)],
)
def test_sizes(text: str, expected: int) -> None:
    assert bytes_in(text) == expected


@pytest.mark.parametrize("text", ["", "0", "-1", "GB", "5XB", "0.1", "inf"])
def test_no_sizes(text: str) -> None:
    assert bytes_in(text) is None


SCRIPT = """
import sys
from lightning_parallel.cli.main import main
try:
    main()
except SystemExit as end:
    assert not end.code
assert not any(name.startswith("tests") for name in sys.modules)
"""


@pytest.mark.slow
def test_without_the_code_that_trained(folder: Path, tmp_path: Path) -> None:
    arguments = ["export", str(folder / "hyper.ckpt"), "--to", "safetensors", "--out", "out", "--prefix", "model"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for given, words in ((arguments, "without the prefix model."), (["inspect", str(folder / "hyper.ckpt")], "intact")):
        command = [sys.executable, "-c", SCRIPT, *given]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        assert words in done.stdout
        assert done.stderr == ""
    assert rest(tmp_path / "out") == ["model.safetensors"]
