"""`RankLogs`: each rank's output is in its own file, rank 0's on the screen, and all is as before behind it."""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger

from lightning_parallel import ConfigurationError
from lightning_parallel.callbacks import RankLogs
from lightning_parallel.callbacks.screen_output import Screen
from tests.data import loader
from tests.models.cases import ByteGPT
from tests.names import num_readers
from tests.parity import trainer_for

SCRIPT = """
import logging, os, sys, warnings
import lightning as L
import torch
import lightning_parallel
from lightning_parallel.callbacks import RankLogs
from torch.utils.data import DataLoader

class Prints(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        rank = self.global_rank
        print(f"printed by {rank} in step {batch_idx}")
        os.write(2, f"written by {rank}\\n".encode())
        logging.getLogger("lightning.pytorch").warning(f"logged by {rank}")
        if "fail" in sys.argv and batch_idx == 1 and rank == 1:
            raise ValueError(f"as asked on {rank}")
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    options = dict(accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
                   enable_progress_bar=False, enable_model_summary=False)
    strategy = lightning_parallel.build_strategy("ddp_custom:check=off")
    trainer = L.Trainer(strategy=strategy, callbacks=[RankLogs()], default_root_dir=sys.argv[1], **options)
    trainer.fit(Prints(), DataLoader(torch.randn(8, 2), batch_size=2))
    print(f"behind it on {trainer.global_rank}")
"""


def run(folder: Path, *arguments: str) -> Any:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, str(script), str(folder / "run"), *arguments]
    return subprocess.run(line, env=environment, cwd=folder, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
def test_ranks_of_a_script(tmp_path: Path) -> None:
    done = run(tmp_path)
    screen = done.stdout + done.stderr
    assert done.returncode == 0, screen
    files = [tmp_path / "run" / "ranks" / f"rank{rank}.log" for rank in (0, 1)]
    for rank, path in enumerate(files):
        text = path.read_text()
        for step in (0, 1):
            assert text.count(f"printed by {rank} in step {step}\n") == 1
        assert f"by {1 - rank}" not in text
        assert text.count(f"logged by {rank}") == 2
        assert "behind it" not in text
    assert files[1].read_text().count("written by 1\n") == 2
    assert screen.count("printed by 0") == screen.count("written by 0") == screen.count("logged by 0") == 2
    assert "by 1" not in screen
    assert "behind it on 0" in screen
    assert "behind it on 1" in screen
    assert f"RankLogs: the output of each rank is in {files[0].parent}" in screen


@pytest.mark.slow
def test_the_error_of_a_rank(tmp_path: Path) -> None:
    done = run(tmp_path, "fail")
    assert done.returncode != 0
    text = (tmp_path / "run" / "ranks" / "rank1.log").read_text()
    assert "ValueError: as asked on 1" in text
    assert "training_step" in text
    assert "as asked on 1" in done.stdout + done.stderr  # it ends with its own words, as without the callback


def printed(strategy: str, size: int, folder: str) -> list[Any]:
    class Prints(ByteGPT):
        def on_train_start(self) -> None:
            print(f"here is {dist.get_rank()}")

    logs, before = RankLogs(), (sys.stdout, sys.stderr)
    options = {"callbacks": [logs], "logger": CSVLogger(folder, name="", version="run")}
    for _ in range(2):
        trainer_for(strategy, size, **options).fit(Prints(), loader(num_readers(strategy, size), 2))
    return [str(logs.path), (sys.stdout, sys.stderr) == before, logs._screen is None]


def test_files_are_in_the_loggers_folder_and_go_on(ranks: Any, tmp_path: Path) -> None:
    for rank, found in enumerate(ranks(2).run(printed, "fsdp_custom", 2, str(tmp_path))):
        path = tmp_path / "run" / "ranks" / f"rank{rank}.log"
        assert found == [str(path), True, True]
        assert path.read_text().count(f"here is {rank}\n") == 2


def test_streams_beside_and_in_place_of_the_screen(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler()
    logger = logging.getLogger("of a test")
    logger.addHandler(handler)
    try:
        for is_shown in (True, False):
            path = tmp_path / "deep" / f"{is_shown}.log"
            before = sys.stdout, sys.stderr, handler.stream
            screen = Screen(path, is_shown=is_shown)
            print("out")
            sys.stderr.writelines(["err\n"])
            logger.warning("logged")
            os.write(1, b"raw\n")
            assert sys.stdout.isatty() is False
            assert copy.deepcopy(screen) is None
            screen.close()
            assert (sys.stdout, sys.stderr, handler.stream) == before
            print("behind")
            lines = path.read_text().splitlines()
            shown = "".join(capfd.readouterr()).splitlines()
            if is_shown:
                assert lines == ["out", "err", "logged"]
                assert sorted(shown) == ["behind", "err", "logged", "out", "raw"]
            else:
                assert lines == ["out", "err", "logged", "raw"]
                assert shown == ["behind"]
    finally:
        logger.removeHandler(handler)


def test_folders_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    trainer_for("auto", 1, callbacks=[RankLogs(blocked)]).fit(ByteGPT(), loader(1, 2))
    assert "RankLogs: rank 0 prints on the screen: " in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match="writes no files to memory://runs; give folder="):
        trainer_for("auto", 1, callbacks=[RankLogs()], default_root_dir="memory://runs").fit(ByteGPT(), loader(1, 2))
