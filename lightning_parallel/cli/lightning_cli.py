"""Lightning's CLI with ``--strategy``, options in the same string."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch.cli as lightning_cli
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_parallel.cli.devices import device_violations
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.presets import PRESETS, build_strategy


class LightningCLI(lightning_cli.LightningCLI):
    """`lightning.pytorch.cli.LightningCLI` with one more argument, ``--strategy=name:option=value,...``.

    In YAML it is the key ``strategy`` beside ``trainer``, ``model`` and ``data``. Names of Lightning's own strategies
    are taken too; ``trainer.strategy`` with ``class_path`` and ``init_args`` works as before.

    Example:
        >>> LightningCLI(MyModule, MyDataModule)  # in train.py: python train.py fit --strategy=fsdp_custom
    """

    @override
    def add_core_arguments_to_parser(self, parser: lightning_cli.LightningArgumentParser) -> None:
        parser.add_argument(
            "--strategy",
            type=str | None,
            default=None,
            metavar="NAME[:OPTION=VALUE,...]",
            help=f"The parallelism: {', '.join(PRESETS)}, or a name of Lightning's own. See 'strategies'.",
        )
        super().add_core_arguments_to_parser(parser)

    @override
    def before_instantiate_classes(self) -> None:
        trainer = self._get(self.config, "trainer")
        violations = device_violations(trainer.get("accelerator"), trainer.get("devices"))
        if trainer.get("precision") in ("16-mixed", "16", 16) and _is_on_cpu(trainer.get("accelerator")):
            violations.append(
                "precision='16-mixed' on the CPU: Lightning would take bf16-mixed instead; give bf16-mixed or 32-true"
            )
        if (text := self._get(self.config, "strategy")) is not None:
            if trainer.get("strategy") not in (None, "auto"):
                violations.append(f"--strategy={text} and --trainer.strategy are both given; leave one out")
            try:
                _build(text)
            except ConfigurationError as error:
                violations.extend(error.violations)
        if violations:
            raise ConfigurationError(violations)

    def after_fit(self) -> None:
        """Say where the checkpoint is, and the command that tests it."""
        callback = self.trainer.checkpoint_callback
        path = getattr(callback, "best_model_path", "") or getattr(callback, "last_model_path", "")
        if path:
            score = getattr(callback, "best_model_score", None)
            of_best = "" if score is None else f" ({getattr(callback, 'monitor', 'score')} {float(score):.4g})"
            rank_zero_info(f"checkpoint{of_best}: {path}")
            if is_overridden("test_step", self.model) and sys.argv[1:2] == ["fit"]:
                rank_zero_info(f"to test it: {_test_command(sys.argv, path)}")

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        if (text := self._get(self.config, "strategy")) is not None:
            kwargs["strategy"] = _build(text)
        return super().instantiate_trainer(**kwargs)


def _test_command(given: Sequence[str], path: str) -> str:
    """The command of a fit, as one that tests the checkpoint at `path`."""
    kept = [text for text in given[2:] if not text.startswith("--ckpt_path=")]
    if "--ckpt_path" in kept:
        at = kept.index("--ckpt_path")
        del kept[at : at + 2]
    command = ["python", given[0]] if given[0].endswith(".py") else [Path(given[0]).name]
    return shlex.join([*command, "test", *kept, f"--ckpt_path={path}"])


def _build(text: str) -> Any:
    from lightning.pytorch.strategies import StrategyRegistry

    is_lightnings = text == "auto" or (text in StrategyRegistry and text not in PRESETS)
    return text if is_lightnings else build_strategy(text)


def _is_on_cpu(accelerator: Any) -> bool:
    from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator

    has_accelerator = CUDAAccelerator.is_available() or MPSAccelerator.is_available()
    return accelerator == "cpu" or (accelerator in ("auto", None) and not has_accelerator)


def is_first_process() -> bool:
    """Whether this is the process that speaks for all: the others were started with a rank of their own."""
    return all(int(os.environ.get(name, "0")) == 0 for name in ("LOCAL_RANK", "RANK", "NODE_RANK", "SLURM_PROCID"))
