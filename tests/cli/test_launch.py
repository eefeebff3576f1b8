"""The command ``launch``: what it refuses, and its script and container on two nodes that are this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_parallel.cli.launch import launch
from lightning_parallel.errors import ConfigurationError
from tests.cli.command import CONFIG, ROOT


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "model": {"class_path": "tests.models.cli_module.Layered"}}))
    return str(path)


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, str]:
    """An environment in which the programs are those of this interpreter."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, module in (("lightning-parallel", "lightning_parallel.cli.main"), ("torchrun", "torch.distributed.run")):
        (folder / name).write_text(f"#!{sys.executable}\nfrom {module} import main\nmain()\n")
        (folder / name).chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def arguments(
    recipe: str, on: str, *more: str, nodes: int = 2, gpus: int = 1, strategy: str = "ddp_custom"
) -> list[str]:
    shape = ["--on", on, f"--nodes={nodes}", f"--gpus-per-node={gpus}", *more]
    return [*shape, "--", "fit", "--config", recipe, f"--strategy={strategy}"]


def refused(*given: str) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as error:
        launch(list(given))
    return error.value.violations


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def outputs(nodes: list[Any]) -> list[str]:
    try:
        said = [node.communicate(timeout=150) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0] * len(nodes), said
    return [out for out, _ in said]


def losses(text: str) -> list[str]:
    return [part.split()[0] for part in text.split("last loss ")[1:]]


def test_everything_that_is_wrong_is_said_at_once(recipe: str) -> None:
    wrong = arguments(recipe, "kubernetes", "--name=LM", "--time=5", nodes=2, gpus=3, strategy="fsdp_custom:tensor=4")
    found = refused(*wrong)
    assert len(found) == 4
    for words in ("--time is for --on=slurm", "no DNS label", "--image is missing", "tensor=4 does not divide 6 ranks"):
        assert any(words in each for each in found)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--trainer.devices=4"], "--trainer.devices=4, but --gpus-per-node=8"),
        (["--trainer.num_nodes", "3"], "--trainer.num_nodes=3, but --nodes=2"),
        (["--strategy=hsdp_custom:replicate=3"], "replicate=3 does not divide 16"),
        (["--strategy=dp_custom"], "dp_custom is one process"),
        (["--strategy=fsdp_custom:layers=net.nope"], "'net.nope' does not exist"),
        (["--model.class_path=tests.models.nothing"], "cannot be read"),
    ],
)
def test_contradictions(recipe: str, more: list[str], words: str) -> None:
    if "class_path" in more[0]:
        Path(recipe).write_text(yaml.safe_dump({**CONFIG, "model": {"class_path": "tests.cli.test_launch.Broken"}}))
        more = []
    given = arguments(recipe, "slurm", nodes=2, gpus=8)
    assert any(words in each for each in refused(*given, *more))


class Broken(__import__("lightning").LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        raise OSError("no such data")


def test_what_only_a_gpu_can_show_is_not_refused(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    strategy = "fsdp_custom:process_group_backend=nccl,float8=tensorwise"
    more = ["--trainer.accelerator=gpu", "--trainer.precision=16-mixed", "--trainer.sync_batchnorm=true"]
    assert launch([*arguments(recipe, "slurm", nodes=2, gpus=8, strategy=strategy), *more, "--ckpt_path=x.ckpt"]) == 0
    out = capsys.readouterr().out
    assert f"--strategy={strategy}" in out
    assert "#SBATCH --gpus-per-node=8" in out
    assert "--trainer.devices=8" in out


def test_without_a_command_or_a_cluster() -> None:
    assert "no command is given" in refused("--on", "slurm", "--nodes=1", "--gpus-per-node=1")[0]
    given = refused("--on", "cloud", "--nodes=0", "--gpus-per-node=1", "--env=1=2", "--check=all", "--", "bench")
    assert len(given) == 5
    assert (
        "--endpoint is missing"
        in refused("--on", "torchrun", "--nodes=2", "--gpus-per-node=1", "--check=none", "--", "fit")[0]
    )


def test_a_restart_that_would_begin_anew_is_told(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments(recipe, "kubernetes", "--image=i", "--max-restarts=1")
    saving = ["--trainer.enable_checkpointing=true", "--trainer.logger=lightning.pytorch.loggers.CSVLogger"]
    in_folder = "--trainer.logger.save_dir=logs"
    assert launch([*given, *saving, in_folder]) == 0
    said = capsys.readouterr()
    assert "--ckpt_path=last" in said.out
    assert "a restart begins anew: checkpoints are in logs/lightning_logs" in said.err
    assert "are lost with their pod; give --volume" in said.err
    given = arguments(recipe, "kubernetes", "--image=i", "--max-restarts=1", "--volume=claim")
    assert launch([*given, *saving, "--trainer.logger.save_dir=/checkpoints", "--trainer.logger.version=1"]) == 0
    said = capsys.readouterr()
    assert "anew" not in said.err
    assert "lost" not in said.err
    assert "--trainer.default_root_dir=/checkpoints" in said.out


def test_submitting(monkeypatch: pytest.MonkeyPatch, recipe: str, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    given = arguments(recipe, "slurm", "--submit")
    assert "--submit needs sbatch" in refused(*given)[0]
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\nread line; echo $line > {tmp_path}/seen; exit 3\n")
    (tmp_path / "sbatch").chmod(0o755)
    assert launch(given) == 3
    assert (tmp_path / "seen").read_text() == "#!/bin/bash\n"


def test_help_answers_at_once(tmp_path: Path) -> None:
    script = tmp_path / "lightning-parallel"
    then = "import sys\nassert not {'torch', 'lightning'} & set(sys.modules), 'imported'\n"
    script.write_text(f"from lightning_parallel.cli.main import main\nmain()\n{then}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, script, "launch", "--help"]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--gpus-per-node" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_script_of_torchrun_runs(recipe: str, programs: dict[str, str], tmp_path: Path, nodes: int) -> None:
    endpoint = [f"--endpoint=127.0.0.1:{free_port()}"] if nodes == 2 else []
    more = [f"--output={tmp_path / 'run.sh'}", "--max-restarts=1", *endpoint]
    assert launch(arguments(recipe, "torchrun", *more, nodes=nodes, gpus=2 // nodes)) == 0
    assert subprocess.run(["bash", "-n", tmp_path / "run.sh"], check=False).returncode == 0
    started = [
        subprocess.Popen(
            ["bash", tmp_path / "run.sh"],
            env=programs,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(nodes)
    ]
    found = losses("".join(outputs(started)))
    assert len(found) == 2


@pytest.mark.slow
def test_the_container_of_a_jobset_runs(recipe: str, programs: dict[str, str], tmp_path: Path) -> None:
    """Two pods on this machine: their node ranks are those of the completion index, and node 0 is at its address."""
    more = [f"--output={tmp_path / 'run.yaml'}", "--image=i"]
    assert launch(arguments(recipe, "kubernetes", *more)) == 0
    spec = yaml.safe_load((tmp_path / "run.yaml").read_text())["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    given = {each["name"]: each.get("value", "") for each in container["env"]}
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    assert set(here) < set(given)
    started = [
        subprocess.Popen(
            container["command"],
            env={**programs, **given, **here, "NODE_RANK": str(index)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(spec["completions"])
    ]
    found = losses("".join(outputs(started)))
    assert len(found) == 2
