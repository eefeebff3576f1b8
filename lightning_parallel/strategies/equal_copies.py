"""Parameters of which several ranks have a copy, or the same shard, are equal on them: a look while a fit goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn.parameter import UninitializedParameter
from typing_extensions import override

from lightning_parallel.errors import RanksDifferError
from lightning_parallel.module.differences import first_of
from lightning_parallel.module.placeholders import is_placeholder
from lightning_parallel.ranks.dtensors import local_of
from lightning_parallel.ranks.fingerprints import Partings, differing, of_copies, parted_in_words, where_in_words
from lightning_parallel.ranks.objects import of_all_ranks
from lightning_parallel.ranks.sketches import Sketches
from lightning_parallel.strategies.looks import Looks

if TYPE_CHECKING:
    from collections.abc import Collection

    from lightning.pytorch import LightningModule

_ROUNDING = 1e-4
"""The difference, as a share of the norm, that is not taken for that of another value."""
_ROUNDING_OF_KERNELS = 5e-2
"""The same in 16 bits, and on devices whose kernels may add in no fixed order: Adam makes whole steps of the signs."""


class _ValueLooks(Looks):
    """Compares values, of which those that differ by rounding are told once, and end nothing.

    Args:
        module: The module.
        device: This rank's device.
    """

    def __init__(self, module: LightningModule, device: torch.device) -> None:
        super().__init__(module)
        self._device = device
        self._has_told = False

    @override
    def compare(self) -> None:
        trainer = self._module.trainer
        found = differing(of_copies(self._own().items()))
        if found and (parted := self._parted(found)):
            if trainer.global_rank != 0:
                raise RanksDifferError("ranks hold different values; rank 0 says which")
            raise RanksDifferError(self._in_words(parted, trainer.global_step, self._agreed))
        self._agreed = trainer.global_step

    def _own(self) -> dict[str, Tensor]:
        """The values of this rank, by name."""
        raise NotImplementedError

    def _in_words(self, parted: Partings, step: int, agreed: int | None) -> str:
        """The error, in words."""
        raise NotImplementedError

    def _parted(self, found: Partings) -> Partings:
        """Those that differ by more than rounding. A collective."""
        local = {name: local_of(each.detach()) for name, each in self._own().items() if name in found}
        sketches = Sketches(self._device).of(local, local)
        is_exact = {name: tensor.element_size() > 2 and tensor.device.type == "cpu" for name, tensor in local.items()}
        widths = {name: _ROUNDING if exact else _ROUNDING_OF_KERNELS for name, exact in is_exact.items()}
        of_ranks = of_all_ranks({name: (sketch, widths[name]) for name, sketch in sketches.items()})
        parted: Partings = {}
        for name, groups in ((name, groups) for name, parts in found.items() for groups in parts):
            (first, allowed), *others = (of_ranks[ranks[0]][name] for ranks in groups)
            distances = [(other - first).norm() for other, _ in others]
            if not all(distance <= allowed * first.norm() for distance in distances):  # not a number is no rounding
                parted.setdefault(name, []).append(groups)
        if not parted and not self._has_told:
            self._has_told = True
            rank_zero_info(_BY_ROUNDING.format(first_of(sorted(found))))
        return parted


class EqualCopies(_ValueLooks):
    """Ends a fit whose ranks have parted: gradients are averaged, and a rank may have done something else by itself.

    Such as drawn the first values of a parameter in a step, written through ``.data`` what its own samples give, or
    skipped an update. The states of optimizers are not looked at; the callback `Verify` does.

    Args:
        module: The module.
        device: This rank's device.

    Example:
        >>> copies = EqualCopies(module, device)
        >>> copies.look()  # before each step
    """

    @override
    def look(self) -> None:
        """Compare the ranks, if it is time to. A collective then. Call it before each batch, and behind none.

        At the end of a fit, hooks of the user's may have made of a rank's copy what they export.

        Raises:
            RanksDifferError: What differs, on rank 0, and since when.
        """
        super().look()

    @override
    def _own(self) -> dict[str, Tensor]:
        """The parameters of which this rank has values."""
        return {
            name: p
            for name, p in self._module.named_parameters()
            if not is_placeholder(p) and not isinstance(p, UninitializedParameter) and not p.is_meta
        }

    @override
    def _in_words(self, parted: Partings, step: int, agreed: int | None) -> str:
        return parted_in_words(parted, step, agreed)


class EqualGradients(_ValueLooks):
    """Ends a fit in which each rank is about to update its share of the parameters by gradients of its own samples.

    Where each rank updates all of them, the copies part, which `EqualCopies` finds; where it updates some for all
    ranks, the copies stay equal and are wrong. Nobody averages what code assigns, as from `torch.autograd.grad`.

    Args:
        module: The module, whose gradients are whole on each rank.
        device: This rank's device.

    Example:
        >>> gradients = EqualGradients(module, device)
        >>> gradients.look_at(parameters)  # before each update
    """

    _updated: frozenset[Tensor] = frozenset()

    def look_at(self, parameters: Collection[Tensor]) -> None:
        """Compare the gradients of `parameters`, if it is time to: those of other optimizers may not be reduced yet.

        Raises:
            RanksDifferError: If they differ.
        """
        self._updated = frozenset(parameters)
        self.look()

    @override
    def _own(self) -> dict[str, Tensor]:
        named = ((name, p) for name, p in self._module.named_parameters() if p in self._updated)
        return {name: p.grad for name, p in named if p.grad is not None}

    @override
    def _in_words(self, parted: Partings, step: int, agreed: int | None) -> str:
        return _NOT_AVERAGED.format(step + 1, *where_in_words(parted))


_NOT_AVERAGED = (
    "before update {0}, the gradient of {1} differs between {2}{3}. Each rank updates a part of the parameters for all "
    "ranks, by the samples of one rank alone then: nobody has averaged these gradients. Call "
    "self.manual_backward(loss) in place of torch.autograd.grad, or assign the mean over ranks, "
    "self.all_gather(gradient).mean(0)"
)

_BY_ROUNDING = (
    "ranks hold values of {} that differ by rounding, though they must hold equal ones: a kernel adds in no fixed "
    "order, which torch.use_deterministic_algorithms(True) names. Ranks are compared again, and more ends the fit"
)
