"""The command that all ranks run: what it says of nodes and devices, and what is put in."""

from __future__ import annotations

from dataclasses import dataclass, replace

COMMANDS = ("fit", "validate", "test", "predict")
PROGRAM = "lightning-parallel"
_NODES, _DEVICES = "--trainer.num_nodes", "--trainer.devices"
CHECKPOINT, ROOT, ACCELERATOR = "--ckpt_path", "--trainer.default_root_dir", "--trainer.accelerator"


@dataclass(frozen=True)
class Command:
    """A command of `lightning-parallel` that runs a recipe.

    Args:
        words: Its name and options, without the program.

    Example:
        >>> Command(("fit", "--config", "recipe.yaml")).completed(nodes=2, devices=8)
    """

    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``, if it is one of these."""
        return self.words[0] if self.words else ""

    @property
    def line(self) -> tuple[str, ...]:
        """All words of it, the program first."""
        return PROGRAM, *self.words

    def value(self, option: str) -> str | None:
        """The last value of an option, which is the one that counts; ``None`` if it is not given.

        Args:
            option: With its dashes.
        """
        found = None
        for word, following in zip(self.words, (*self.words[1:], None), strict=True):
            name, equals, value = word.partition("=")
            if name == option:
                found = value if equals else following
        return found

    def without(self, options: tuple[str, ...]) -> list[str]:
        """The words without some options and their values.

        Args:
            options: With their dashes.
        """
        kept, skips = [], False
        for word in self.words:
            name, equals, _ = word.partition("=")
            if not skips and name not in options:
                kept.append(word)
            skips = not skips and name in options and not equals
        return kept

    def violations(self, nodes: int, devices: int) -> list[str]:
        """Reasons why a cluster cannot run it; empty if it can.

        Args:
            nodes: The number of machines.
            devices: The number of ranks on each.
        """
        if not self.words:
            return ["no command is given; put it at the end, behind two dashes: -- fit --config recipe.yaml"]
        if self.name not in COMMANDS:
            return [f"{self.name!r} is no command that a cluster can run; possible: {', '.join(COMMANDS)}"]
        found = []
        given = self.value(_NODES)
        if given is not None and given != str(nodes):
            found.append(f"{_NODES}={given}, but --nodes={nodes}; leave {_NODES} out, or give the same number")
        given = self.value(_DEVICES)
        if given is not None and _number(given) != devices:
            found.append(
                f"{_DEVICES}={given}, but --gpus-per-node={devices}; leave {_DEVICES} out, or give the same number"
            )
        return found

    def completed(self, *, nodes: int, devices: int) -> Command:
        """The command with the numbers of nodes and devices, which replace those of the recipe.

        Args:
            nodes: The number of machines.
            devices: The number of ranks on each.
        """
        found = self
        for option, number in ((_NODES, nodes), (_DEVICES, devices)):
            if self.value(option) is None:
                found = found.with_option(option, str(number))
        return found

    def with_option(self, option: str, value: str) -> Command:
        """The command with one more option.

        Args:
            option: With its dashes.
            value: Its value.
        """
        return replace(self, words=(*self.words, f"{option}={value}"))


def _number(devices: str) -> int | None:
    """The number of devices; ``None`` where that depends on the machine."""
    if "," in devices:
        return len([part for part in devices.strip("[]").split(",") if part.strip()])
    return int(devices) if devices.isdecimal() else None
