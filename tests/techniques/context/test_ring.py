"""Ring attention: equal to attention over whole sequences, for any number of heads, and what it sends."""

from __future__ import annotations

import itertools
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_parallel import ConfigurationError, _torch, build_strategy
from lightning_parallel.techniques.context.ring import attend_in_ring
from lightning_parallel.techniques.context.sequences import Sequences
from tests.data import batches
from tests.models.cases import ByteGPT
from tests.models.tables import CONTEXT_MODULES
from tests.parity import TOLERANCE, largest, make_trainer, reference, train, worst

RING = "context_attention=ring"

# Attention by itself ------------------------------------------------------------------------------------------------


def errors_of_attention(dtype: torch.dtype, has_kernel: bool) -> dict[str, float]:
    """The largest difference to attention in one process and fp64, of outputs and all gradients."""
    group = dist.group.WORLD
    assert group is not None
    pieces = 2 * group.size()
    found = {}
    for is_causal, kv_heads, value_dim, odd in itertools.product((True, False), (4, 2, 1), (8, 6), (True, False)):
        if odd and not is_causal:
            continue
        torch.manual_seed(0)
        length = 3 * pieces - (3 if odd else 0)
        shapes = ((2, 4, length, 8), (2, kv_heads, length, 8), (2, kv_heads, length, value_dim))
        given = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        wide = [each.detach().double().requires_grad_() for each in given]
        expected = F.scaled_dot_product_attention(*wide, is_causal=is_causal, enable_gqa=True)
        weights = torch.randn_like(expected)
        gradients = torch.autograd.grad((expected * weights).sum(), wide)
        with mock.patch.object(_torch.attention, "has_flash_attention", return_value=has_kernel and value_dim == 8):
            sequences = Sequences(group, folds=True)
            parts = [sequences.cut(each, 2) for each in given]
            output = sequences.join(attend_in_ring(*parts, group, is_causal=is_causal), 2)
            ours = [g.contiguous() for g in torch.autograd.grad((output * weights.to(dtype)).sum(), given)]
        for gradient in ours:  # each rank has that of its part
            dist.all_reduce(gradient)
        pairs = [(output, expected), *((a / group.size(), b) for a, b in zip(ours, gradients, strict=True))]
        name = f"causal={is_causal} kv_heads={kv_heads} value_dim={value_dim} length={length}"
        found[name] = largest((a - b).detach().abs().max() for a, b in pairs)
    return found


@pytest.mark.parametrize("has_kernel", [True, False], ids=["kernel", "plain"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 5e-6)], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_equal_to_whole_attention(
    ranks: Any, size: int, dtype: torch.dtype, tolerance: float, has_kernel: bool
) -> None:
    for found in ranks(size).run(errors_of_attention, dtype, has_kernel):
        assert {name: error for name, error in found.items() if not error <= tolerance} == {}


def test_half_precision(ranks: Any) -> None:
    """Rows are summed in fp32; what is left is the rounding of bf16, eight bits."""
    for found in ranks(2).run(errors_of_attention, torch.bfloat16, True):
        assert largest(found.values()) < 4e-2


def of_nothing(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    group = dist.group.WORLD
    assert group is not None
    query, key, value = (torch.zeros(shape, requires_grad=True) for _ in range(3))
    output = attend_in_ring(query, key, value, group, is_causal=True)
    output.sum().backward()
    return [tuple(each.shape) for each in (output, query.grad, key.grad, value.grad) if each is not None]


@pytest.mark.parametrize("shape", [(0, 2, 4, 8), (1, 2, 0, 8)], ids=["no_samples", "no_positions"])
def test_of_no_numbers_at_all(ranks: Any, shape: tuple[int, ...]) -> None:
    """The kernel divides by their number, which ends a process without a word."""
    assert ranks(2).run(of_nothing, shape) == [[shape] * 4] * 2


def pieces_of(size: int) -> list[int]:
    group = dist.group.WORLD
    assert group is not None
    sequences = Sequences(group, folds=True)
    positions = torch.arange(size)
    assert torch.equal(sequences.join(sequences.cut(positions, 0), 0), positions)
    return sequences.cut(positions, 0).tolist()


def test_a_part_is_as_far_from_the_beginning_as_from_the_end(ranks: Any) -> None:
    """So that ranks have the same number of earlier positions to attend to."""
    assert ranks(2).run(pieces_of, 8) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert ranks(2).run(pieces_of, 7) == [[0, 1, 6, 0], [2, 3, 4, 5]]
    assert ranks(4).run(pieces_of, 8) == [[0, 7], [1, 6], [2, 5], [3, 4]]


def options_after_an_error() -> bool:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    before = dict(vars(_attention._cp_options))
    states, block = torch.randn(1, 2, 4, 8), mock.Mock(side_effect=ValueError("in the middle"))
    with pytest.raises(ValueError, match="in the middle"):
        _torch.attention.ring_attention(block, states, states, states, dist.group.WORLD, is_causal=True)
    return before == vars(_attention._cp_options)


def test_switches_of_the_process_are_put_back(ranks: Any) -> None:
    assert all(ranks(2).run(options_after_an_error))


# Modules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CONTEXT_MODULES)
def test_sequences_over_two_ranks(ranks: Any, case: str) -> None:
    expected = reference(case)
    assert worst(ranks(2).run(train, case, "adamw", f"cp_custom:{RING}", 2, 1)[0], expected) < TOLERANCE


@pytest.mark.parametrize(
    ("strategy", "readers"),
    [
        (f"cp_custom:{RING}", 1),
        (f"fsdp_custom:replicate=2,context=2,{RING},recompute=full", 2),
        (f"fsdp_custom:context=2,tensor=2,{RING}", 1),
        (f"fsdp_custom:context=2,pipeline=2,{RING}", 1),
        (f"fsdp_custom:context=2,{RING},compile=layers", 2),
        (f"fsdp_custom:context=2,{RING},recompute=selective,accumulation_sync=last", 2),
    ],
)
@pytest.mark.parametrize("case", ["byte_gpt", "odd_length", "one_key_head", "encoder"])
def test_more_ranks_than_heads_and_products(ranks: Any, case: str, strategy: str, readers: int) -> None:
    """`byte_gpt` has two heads, which Ulysses cannot share among four ranks."""
    expected = reference(case)
    assert worst(ranks(4).run(train, case, "adamw", strategy, 4, readers)[0], expected) < TOLERANCE


def test_mixed_precision(ranks: Any) -> None:
    expected = reference("llama", precision="bf16-mixed")
    ours = ranks(2).run(train, "llama", "adamw", f"cp_custom:{RING}", 2, 1, precision="bf16-mixed")[0]
    assert ours.losses == pytest.approx(expected.losses, rel=2e-2)


# What is sent -------------------------------------------------------------------------------------------------------


class Sends(TorchDispatchMode):
    """Counts the all-to-alls by which torch's ring sends on."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func.namespace == "_c10d_functional" and "all_to_all" in func.overloadpacket.__name__
        return func(*args, **(kwargs or {}))


def rounds(num_ranks: int) -> tuple[int, int]:
    """How often keys and values are sent on in forward and in backward, of the second step."""
    forward, backward = Sends(), Sends()

    class Module(ByteGPT):
        def loss(self, tokens: Tensor) -> Tensor:
            if self.global_step != 1:
                return super().loss(tokens)
            with forward:
                return super().loss(tokens)

        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            if self.global_step != 1:
                return super().backward(loss, *args, **kwargs)
            with backward:
                return super().backward(loss, *args, **kwargs)

    make_trainer(build_strategy(f"cp_custom:{RING}"), num_ranks).fit(Module(), batches("byte_gpt", 1, 3))
    return forward.number, backward.number


@pytest.mark.parametrize("size", [2, 4])
def test_keys_and_values_go_round_once(ranks: Any, size: int) -> None:
    """Forward, n - 1 times; backward once more, and their gradients n times, until they are at home."""
    num_layers = 3
    forward, backward = num_layers * (size - 1), num_layers * (2 * size - 1)
    assert ranks(size).run(rounds, size) == [(forward, backward)] * size


# Refusals -----------------------------------------------------------------------------------------------------------


def refusal(case: str, strategy: str, num_ranks: int) -> str:
    try:
        train(case, "adamw", strategy, num_ranks, 1)
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "strategy", "words"),
    [
        ("byte_gpt", f"fsdp_custom:{RING}", "context_attention='ring' is for context > 1, but context=1"),
        ("byte_gpt", "cp_custom:context_attention=tree", "'tree' is not known; possible: ulysses, ring"),
        ("byte_gpt", "cp_custom:context=4", "needs no division of heads with context_attention='ring'"),
    ],
)
def test_what_a_ring_cannot_do_is_refused(ranks: Any, case: str, strategy: str, words: str) -> None:
    size = 4 if "context=4" in strategy else 2
    message = ranks(size).run(refusal, case, strategy, size)[0]
    assert re.search(re.escape(words), message), message
