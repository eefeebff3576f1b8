"""Names for `Trainer(strategy=...)`: a table, and the string in which options follow the name."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.strategies.data_parallel import DataParallelStrategy
from lightning_parallel.strategies.ddp import DDPStrategy
from lightning_parallel.strategies.mesh import MeshStrategy
from lightning_parallel.strategies.zero import ZeroStrategy

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


@dataclass(frozen=True)
class Preset:
    """The class and the arguments that a name stands for.

    Args:
        build: The strategy's class.
        summary: One line for people.
        arguments: Arguments that the name sets; the others keep the class's defaults.
    """

    build: Callable[..., Strategy]
    summary: str
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """The arguments that can follow the name, with their annotations and the defaults under this name."""
        signature = inspect.signature(self.build)
        return {
            name: parameter.replace(default=self.arguments.get(name, parameter.default))
            for name, parameter in signature.parameters.items()
        }


PRESETS: dict[str, Preset] = {
    "dp_custom": Preset(DataParallelStrategy, "one process over all devices of a machine (nn.DataParallel)"),
    "ddp_custom": Preset(DDPStrategy, "every rank holds the whole model; gradients are averaged (DDP)"),
    "zero1_custom": Preset(ZeroStrategy, "DDP with the optimizer state sharded (ZeRO-1)"),
    "zero2_custom": Preset(
        MeshStrategy,
        "gradients and optimizer state sharded, parameters whole from forward to backward (ZeRO-2)",
        {"reshard": "never"},
    ),
    "fsdp_custom": Preset(MeshStrategy, "parameters, gradients and optimizer state sharded, layer by layer (FSDP2)"),
    "hsdp_custom": Preset(
        MeshStrategy, "sharded inside a machine, replicated across machines (HSDP)", {"replicate": "auto"}
    ),
    "fsdp_offload_custom": Preset(MeshStrategy, "fsdp_custom with all state in host memory", {"offload": "all"}),
    "cp_custom": Preset(
        MeshStrategy,
        "sequences split inside a machine (context parallel, Ulysses), sharded over all",
        {"context": "node"},
    ),
    "tp_custom": Preset(
        MeshStrategy,
        "matrix products and heads split inside a machine (tensor parallel), sharded across machines",
        {"tensor": "node"},
    ),
    "fsdp_tp_custom": Preset(
        MeshStrategy,
        "two ranks (a machine, if there are several) share each layer, sharded over the rest",
        {"tensor": "auto"},
    ),
    "pp_custom": Preset(
        MeshStrategy,
        "layers split over as many ranks as a machine has, stage by stage (pipeline parallel), sharded over the rest",
        {"pipeline": "node"},
    ),
}
"""Name -> the class and the arguments that it stands for."""


_MISSING = {
    "accumulation_sync": "one process has nothing to reduce between microsteps",
    "optimizer_in_backward": "gradients are whole on every rank before any can be used up, so there is no memory to "
    "save; use zero2_custom or fsdp_custom",
    "reshard": "its parameters are whole on every rank; use zero2_custom or fsdp_custom",
    "precision_policy": "it gathers no parameters; use fsdp_custom, or Trainer(precision=...)",
}
"""Option that some names lack -> why, and what to use."""


def build_strategy(text: str) -> Strategy:
    """The strategy of ``"name"`` or ``"name:option=value,option=value"``, as on the command line.

    Values are YAML; a list is written in brackets. `Trainer(strategy=...)` itself takes bare names only.

    Args:
        text: Such as ``"fsdp_custom:reshard=2,layers=model.blocks"``.

    Raises:
        ConfigurationError: With everything that is wrong in `text`, and what is possible.

    Example:
        >>> Trainer(strategy=build_strategy("hsdp_custom:replicate=4"), devices=8)
    """
    name, _, options = text.partition(":")
    if name not in PRESETS:
        raise ConfigurationError([unknown_name(name)])
    preset = PRESETS[name]
    return preset.build(**{**preset.arguments, **_parse_options(name, options)})


def unknown_name(name: str) -> str:
    """A violation: no strategy is called `name`; with those that are near it, and all there are."""
    near = difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"strategy {name!r} is unknown; {hint}Possible: {', '.join(PRESETS)}"


def register() -> None:
    """Make the names known to `Trainer(strategy=...)`; a second call changes nothing."""
    for name, preset in PRESETS.items():
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, preset.build, description=preset.summary, **preset.arguments)


def _parse_options(name: str, text: str) -> dict[str, Any]:
    """Options by the types in the class's signature; all that is wrong with them at once."""
    if not text.strip():
        return {}
    parser = _parser(PRESETS[name].build)
    instantiate = getattr(parser, "instantiate", parser.instantiate_classes)  # renamed in jsonargparse 4.5x
    possible = PRESETS[name].options
    values: dict[str, Any] = {}
    violations = []
    for item in split_items(text):
        option, equals, value = item.partition("=")
        option = option.strip()
        if not equals:
            violations.append(f"{item!r} in the options of {name} is not of the form option=value; give a value")
        elif option not in possible:
            near = difflib.get_close_matches(option, possible, n=1)
            hint = f"{_MISSING[option]}. " if option in _MISSING else f"did you mean {near[0]}? " if near else ""
            violations.append(f"{name} has no option {option!r}; {hint}Possible: {', '.join(possible) or 'none'}")
        elif option in values:
            violations.append(f"option {option!r} of {name} is given twice; leave one out")
        else:
            try:
                values[option] = getattr(instantiate(parser.parse_args([f"--{option}={value.strip()}"])), option)
            except Exception as error:
                # jsonargparse has several exceptions for a wrong value, and wraps those that our own classes raise.
                values[option] = None
                if reasons := _own_reasons(error):
                    violations.extend(reasons)
                    continue
                wanted = inspect.formatannotation(possible[option].annotation).strip("'")
                violations.append(f"{option}={value!r} of {name} is not of type {wanted}; give one")
    if violations:
        raise ConfigurationError(violations)
    return values


@functools.cache
def _parser(build: Callable[..., Strategy]) -> ArgumentParser:
    """Reads options by the signature of `build`; cached, since making it takes longer than building the strategy."""
    # Imported here: a Trainer that is given a bare name does not need it.
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(build)
    return parser


def _own_reasons(error: BaseException | None) -> tuple[str, ...]:
    """Violations of a :class:`ConfigurationError` of this package that the parser has wrapped in its own."""
    while error is not None and not isinstance(error, ConfigurationError):
        error = error.__cause__ or error.__context__
    return () if error is None else error.violations


def split_items(text: str) -> list[str]:
    """Split at commas outside brackets."""
    items, depth = [""], 0
    for character in text:
        depth += (character in "[({") - (character in "])}")
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    return [item.strip() for item in items if item.strip()]
