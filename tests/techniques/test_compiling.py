"""Layers that are compiled: how many graphs they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from lightning_parallel.techniques.compiling import apply_compile
from lightning_parallel.techniques.recompute import apply_recompute, parse_recompute
from tests.models.cases import GPT, VOCABULARY, Block, next_token_loss
from tests.models.hugging_face import CachingLlama


def test_graphs_of_a_model_with_a_cache_do_not_grow() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    model = CachingLlama().model
    apply_compile(list(model.model.layers), backend=counter)
    tokens = torch.randint(0, VOCABULARY, (2, 8))
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert counter.frame_count == 1


def kept(budget: float) -> int:
    """Bytes that the graph of a compiled layer keeps for backward."""
    block = Block()
    apply_compile([block], budget=budget, backend="aot_eager_decomp_partition")
    output = block(torch.randn(4, 16, 16, requires_grad=True))  # which has to live: torch 2.11 frees what it keeps
    node: Any = output.grad_fn
    return sum(tensor.nbytes for tensor in node.saved_tensors)


@pytest.mark.slow
def test_a_budget_keeps_fewer_bytes() -> None:
    """Whichever is compiled first: a graph of another budget is not used again."""
    torch._dynamo.reset()
    sizes = [kept(budget) for budget in (1.0, 0.5, 0.0)]
    assert sizes[2] < sizes[1] < sizes[0]


def compiled(depth: int, recompute: str) -> tuple[int, list[str]]:
    """How many graphs a model of `depth` layers takes over two lengths of batch, and its state-dict keys."""
    torch._dynamo.reset()
    graphs = 0

    def backend(module: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return module

    model = GPT(depth=depth)
    apply_recompute(list(model.blocks), parse_recompute(recompute))
    apply_compile(list(model.blocks), backend=backend)
    for length in (8, 8, 12, 16):
        tokens = torch.randint(0, VOCABULARY, (2, length))
        next_token_loss(model(tokens), tokens).backward()
    return graphs, list(model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_graphs_do_not_grow_with_depth(recompute: str) -> None:
    graphs, keys = compiled(2, recompute)
    assert compiled(7, recompute)[0] == graphs <= 2  # one, and one for any length
    assert keys == list(GPT(depth=2).state_dict())
