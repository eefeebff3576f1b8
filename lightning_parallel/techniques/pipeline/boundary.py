"""Boundary of two stages in a run: what the first layer behind it is given is sent, and put in place on the other side.

Hidden states come first, then other arguments that depend on parameters, then results that are carried past the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.module.hidden_states import hidden_in, with_hidden
from lightning_parallel.module.placeholders import is_placeholder, placeholders_in
from lightning_parallel.techniques.pipeline.joined import JoinedOutputs
from lightning_parallel.techniques.pipeline.routing_refusals import foreign, plain_hidden
from lightning_parallel.techniques.pipeline.side_inputs import SideInputs
from lightning_parallel.techniques.pipeline.substitution import Substitutes


class StageBoundary:
    """Boundaries of the stages in one step.

    Args:
        step: The step's name.
        paths: The paths of the layers, in order.
        side_inputs: What passes beside hidden states.
        substitutes: Gets what has been received.
    """

    def __init__(self, step: str, paths: Sequence[str], side_inputs: SideInputs, substitutes: Substitutes) -> None:
        self._step, self._paths = step, paths
        self._side_inputs, self._substitutes = side_inputs, substitutes

    def sent(self, index: int, args: Any, kwargs: Any) -> tuple[Tensor, ...]:
        """Return the tensors that are sent to the stage that begins with layer `index`.

        Args:
            index: The layer's number.
            args: Its arguments.
            kwargs: Those by name.

        Raises:
            ConfigurationError: If this stage does not have one of them.
        """
        self.check_values(index, hidden_in(args, kwargs))
        beside = self._substitutes.replace(self._beside(index, args, kwargs))
        self.check_values(index, beside)
        return (plain_hidden(self._paths[index], hidden_in(args, kwargs)), *beside)

    def take(self, index: int, received: tuple[Tensor, ...], args: Any, kwargs: Any) -> Any:
        """Put received tensors in place of what layer `index` is given, and of what is carried past it.

        Args:
            index: The number of the first layer of this stage.
            received: The tensors.
            args: The layer's arguments.
            kwargs: Those by name.

        Returns:
            The arguments with the hidden states.
        """
        hidden, *beside = received
        if (placeholder := hidden_in(args, kwargs)) is not None:
            self._substitutes.put(placeholder, hidden)
        for placeholder, tensor in zip(self._beside(index, args, kwargs), beside, strict=True):
            self._substitutes.put(placeholder, tensor)
        return with_hidden(hidden, args, kwargs)

    def take_joined(self, index: int, joined: JoinedOutputs, args: Any, kwargs: Any) -> None:
        """Put what the last stage has received for all microbatches in its place in a run on the whole batch.

        Args:
            index: The number of the first layer of the last stage.
            joined: What was received.
            args: The layer's arguments.
            kwargs: Those by name.
        """
        self._put(self._beside(index, args, kwargs), joined)

    def kept(self) -> tuple[Tensor, ...]:
        """The results of the last stage, before the end of its layers, that the rest of the step takes."""
        return tuple(self._substitutes.replace(self._side_inputs.carried.kept()))

    def take_kept(self, joined: JoinedOutputs) -> None:
        """Put what the last stage has kept of all microbatches in its place in a run on the whole batch.

        Args:
            joined: What was kept.
        """
        kept = self._side_inputs.carried.kept()
        self._put(kept, joined, after=self._side_inputs.num_beside(self._step) - len(kept))

    def _put(self, placeholders: Sequence[Tensor], joined: JoinedOutputs, *, after: int = 0) -> None:
        carried = self._side_inputs.carried
        for placeholder, tensor in zip(placeholders, joined.side_inputs(placeholders, after=after), strict=True):
            self._substitutes.put(placeholder, tensor)
            if is_placeholder(tensor) and (name := carried.name_of_layer(placeholder)) is not None:
                joined.unjoined = joined.unjoined or name

    def check_values(self, index: int, values: Any) -> None:
        """Refuse what this stage has no values of.

        Args:
            index: The number of the layer that is given it.
            values: What it is given.
        """
        if placeholders := placeholders_in(values):
            raise ConfigurationError([foreign(f"{self._paths[index]} is given", placeholders)])

    def _beside(self, index: int, args: Any, kwargs: Any) -> list[Tensor]:
        return self._side_inputs.find(self._step, index, args, kwargs)
