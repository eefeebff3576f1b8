"""The script by which a shell completes a command: run by bash, as bash calls it."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

from lightning_parallel.cli import completion, main
from lightning_parallel.cli.completion import SHELLS
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.presets import PRESETS

_ROOT = Path(__file__).parents[2]
_PRESS_TAB = """
COMP_WORDS=({words}) COMP_CWORD={last}
_lightning_parallel lightning-parallel
echo "${{COMPREPLY[*]}}"
"""


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    pytest.importorskip("shtab")
    with pytest.MonkeyPatch.context() as patch:
        written: list[str] = []
        patch.setattr("builtins.print", lambda text: written.append(text))
        for shell in SHELLS:
            assert completion.completion([shell]) == 0
    return dict(zip(SHELLS, written, strict=True))


def _completed(script: str, *words: str) -> list[str]:
    """What bash offers for the last word, in the folder of the repository."""
    quoted = " ".join(f"'{word}'" for word in ["lightning-parallel", *words])
    text = script + _PRESS_TAB.format(words=quoted, last=len(words))
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True, timeout=30, cwd=_ROOT)
    return done.stdout.split()


def test_every_command_is_completed(scripts: dict[str, str]) -> None:
    known = {word for line in main._USAGE.splitlines()[2:-2] for word in line[:34].replace("|", " ").split()}
    commands = {word for word in known if word.islower() and "-" not in word} - set(SHELLS)
    assert len(commands) == 15
    assert commands <= set(_completed(scripts["bash"], ""))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["fit", "--strategy", "fsdp_t"], ["fsdp_tp_custom"]),
        (["fit", "--strategy", "=", "fsdp_t"], ["fsdp_tp_custom"]),  # as bash cuts it
        (["fit", "--strategy", "="], sorted(PRESETS)),
        (["fit", "--config", "=", "rec", "--trainer.devices", "=", "2", "--strategy", "=", "pp"], ["pp_custom"]),
        (["fit", "--config", "=", "recip"], ["recipes"]),
        (["verify", "--ran"], ["--ranks"]),
        (["verify", "--trainer.num_n"], ["--trainer.num_nodes"]),
        (["strategies", "pp"], ["pp_custom"]),
        (["launch", "--on", "s"], ["slurm"]),
        (["completion", "z"], ["zsh"]),
    ],
)
def test_bash_offers(scripts: dict[str, str], words: list[str], expected: list[str]) -> None:
    assert sorted(_completed(scripts["bash"], *words)) == expected


def test_the_script_of_zsh_knows_commands_and_strategies(scripts: dict[str, str]) -> None:
    assert scripts["zsh"].startswith("#compdef lightning-parallel")
    assert "(cp_custom ddp_custom dp_custom" in scripts["zsh"]


def test_without_shtab_there_is_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pip install shtab"):
        completion.completion(["bash"])


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        completion.completion(["fish"])
    assert "invalid choice: 'fish'" in capsys.readouterr().err
