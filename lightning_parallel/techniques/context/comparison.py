"""Sentences for users where a layer on parts of sequences differs from itself on whole ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.module.given_containers import GivenContainers, has_containers, is_of_words
from lightning_parallel.module.layer_check import Difference, Wording
from lightning_parallel.module.layer_run import HIDDEN_STATES
from lightning_parallel.techniques.context.attention import SplitAttention
from lightning_parallel.techniques.context.sequences import Sequences

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def sequence_dims(layer: nn.Module) -> list[int]:
    """Dimensions of hidden states that may be the sequence, the likelier one first."""
    is_batch_first = all(c.batch_first for c in layer.modules() if isinstance(c, nn.MultiheadAttention))
    return [1, 0] if is_batch_first else [0, 1]


def wording_for(
    path: str,
    layer: nn.Module,
    sequences: Sequences,
    *,
    has_attention: Callable[[], bool],
    kind: Callable[[], str],
) -> Wording:
    """Sentences for users about one layer.

    Args:
        path: Where it is.
        layer: The layer.
        sequences: Of which it holds parts.
        has_attention: Whether it has called attention when it was run last.
        kind: Of the attention that it computes on whole sequences: ``"torch"``, ``"own"`` or ``""``.
    """
    name = _name(path, layer)

    def failure(error: Exception) -> list[str]:
        if isinstance(error, ConfigurationError):
            return list(error.violations)
        if has_attention() or kind() == "torch":  # it may fail before it gets there
            return [_failed(path, layer, error)]
        return [f"{_bypassed(path, layer, has_own=bool(kind()))}. On a part of a sequence it fails with: {error}"]

    def described(difference: Difference) -> str:
        # Where it is not the positions, such as a loss that is returned beside hidden states, the difference says more.
        is_mixed = difference.part == "hidden states" and difference.kind in ("numbers", "shape")
        if has_attention() or not is_mixed:
            return _described(name, difference, sequences.dim)
        return _bypassed(path, layer, has_own=bool(kind()))

    return Wording(
        name,
        difference=described,
        failure=failure,
        elsewhere=f"{name}: the check of context parallel failed on another rank; see its message, or give context=1",
        apart=lambda place: (
            f"{name}: ranks do not do the same on their parts of the sequence: this one has come to {place}, another "
            "one has not, and would be waited for. Attention has to be called alike on every part, whatever its "
            "numbers are; change the layer, or give context=1"
        ),
    )


def _described(name: str, difference: Difference, dim: int) -> str:
    """In words, where the split layer differs from the whole one."""
    if difference.part == "gradient":
        return _described_gradient(name, difference, dim)
    start = f"context parallel changes what {name} computes"
    if difference.kind == "number":
        return f"{start}: {difference.ours} tensors in place of {difference.whole}; give context=1"
    if difference.part != "hidden states":
        what = "returns" if difference.part == "others" else "keeps"
        return (
            f"{name} {what} a tensor {difference.whole} beside hidden states, which a rank computes from its part of "
            "the sequence, and which nobody joins; leave it out, such as the loss that balances experts, or give "
            "context=1"
        )
    if difference.kind == "shape":
        return f"{start}: {difference.ours} in place of {difference.whole}; give context=1"
    return (
        f"{start}: {_size(difference)}, {_place(difference, dim)}. A layer that makes positions by itself, or mixes "
        "positions outside of scaled_dot_product_attention, cannot work on a part of the sequence; give it positions "
        "as an argument, or give context=1"
    )


def _described_gradient(name: str, difference: Difference, dim: int) -> str:
    start = f"context parallel changes the gradient of {difference.name} that {name} computes, but not its result"
    match difference.kind:
        case "presence":
            found = f"there is {'one' if difference.ours else 'none'} on a part of the sequence"
        case "numbers":
            found = _size(difference)
            if difference.name == HIDDEN_STATES:
                found += f", {_place(difference, dim)}"
        case _:
            found = f"{difference.ours} in place of {difference.whole}"
    return (
        f"{start}: {found}. A backward that goes by positions, or by the length of the sequence, cannot work on a part "
        "of it; change it, or give context=1"
    )


def _size(difference: Difference) -> str:
    return f"by {difference.error:.2g} where {difference.allowed:.2g} is allowed"


def _place(difference: Difference, dim: int) -> str:
    return f"from position {difference.position(dim)} of {difference.whole[dim]} on"


def batch_statistics_violations(path: str, layer: nn.Module) -> list[str]:
    """Reasons why the layer cannot be trained on parts of sequences; empty if it can."""
    names = [n for n, c in layer.named_modules() if isinstance(c, _BATCH_NORMS) and c.training]
    return [
        f"{path}.{name} takes statistics of all positions, of which a rank has a part; freeze them (eval()), use a "
        "norm without statistics, or give context=1"
        for name in names[:1]
    ]


def _failed(path: str, layer: nn.Module, error: Exception) -> str:
    """In words, that the layer fails on a part."""
    return (
        f"{_name(path, layer)} fails on a part of the sequence: {error}. Shapes, masks or "
        "positions that it makes by itself are those of whole sequences; give context=1"
    )


def hidden_violations(path: str, layer: nn.Module, hidden: Any) -> list[str]:
    """Reasons why the sequence of a layer cannot be cut; empty if it can.

    Args:
        path: Where it is.
        layer: The layer.
        hidden: What it is given as its first argument.
    """
    if isinstance(hidden, Tensor) and not hidden.is_nested:
        return []
    kind = "a nested tensor" if isinstance(hidden, Tensor) else type(hidden).__name__
    return [
        f"{_name(path, layer)} is given {kind} as its first argument, where context parallel cuts the hidden states, "
        "as one plain tensor, along the sequence; give the layer a tensor, or context=1"
    ]


@contextlib.contextmanager
def refusing_changes(path: str, layer: nn.Module, given: Any, used: Any) -> Iterator[None]:
    """Inside this context, a layer may not put anything into a container that it is given: it has a part of it.

    Args:
        path: Where it is.
        layer: The layer.
        given: Its arguments, by position and by name.
        used: The same, cut for this rank.
    """
    containers = GivenContainers(given, used) if has_containers(given) else None
    yield
    if containers is None:
        return
    if kinds := containers.changed(lambda own, news: not is_of_words(own, news)):
        raise ConfigurationError(
            [
                f"{_name(path, layer)} changes an argument, a {' and a '.join(kinds)}, in which it puts what a rank "
                "computes from its part of the sequence, and which nobody joins; leave it out, such as the loss that "
                "balances experts, or give context=1"
            ]
        )
    containers.give_back()


def attention_violations(
    path: str, layer: nn.Module, attention: SplitAttention, *, shares: bool, counted: int
) -> list[str]:
    """Reasons why a layer cannot run on a part as it was seen to run on the whole; empty if it can.

    One without torch's attention is compared with itself as others are: what maps each position alone is right on a
    part, such as experts that a softmax chooses.

    Args:
        path: Where it is.
        layer: The layer.
        attention: That which it has called on the part.
        shares: Whether it calls torch's attention, as it did on the whole.
        counted: How often it counted positions when it was compared.
    """
    if shares and not attention.calls:
        return [_bypassed(path, layer, has_own=True)]
    if attention.calls and not shares:
        return [
            f"{_name(path, layer)} calls scaled_dot_product_attention, and did not when it was compared with itself on "
            "a whole sequence; let it call it from the first step on, or give context=1"
        ]
    if attention.counted == counted:
        return []
    return [
        f"{_name(path, layer)} counts positions by torch.arange in some steps, and in others goes "
        "by what it has kept; a part has other positions in each length. Give it positions as an argument, or context=1"
    ]


def _bypassed(path: str, layer: nn.Module, *, has_own: bool) -> str:
    """In words, that the layer has no attention that ranks could share.

    Args:
        path: Where it is.
        layer: The layer.
        has_own: Whether it computes attention by itself.
    """
    start = (
        f"{_name(path, layer)} does not call torch's scaled_dot_product_attention, which is what "
        "ranks share under context parallel"
    )
    if has_own:
        return (
            f"{start}; for Hugging Face models that have it give attn_implementation='sdpa', for "
            "nn.MultiheadAttention need_weights=False, or give context=1"
        )
    return (
        f"{start}, and computes no attention by itself either: what such a layer does with positions, such as a "
        "convolution, a recurrence or a state space (Mamba), needs those of other ranks, which nobody sends; give "
        "context=1"
    )


def _name(path: str, layer: nn.Module) -> str:
    return f"{path} ({type(layer).__name__})"
