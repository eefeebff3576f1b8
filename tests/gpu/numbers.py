"""Sections about numbers: each yields a `Check` for each thing that it looks at."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_parallel import MeshStrategy, build_strategy, full_state_dict
from tests.gpu.machine import NO_GPU, Check, Machine, readers_of, tried
from tests.gpu.models import Module, Size

STEPS = 4
TOLERANCES = {"32-true": 1e-5, "bf16-mixed": 2e-2, "bf16-true": 2e-2, "16-mixed": 5e-3}
"""Of the largest difference in weights in fp32, and in losses in 16 bits, of which bf16 has 8, and fp16 11."""


Plain = functools.partial(Module, optimizer="sgd")
"""With AdamW, whose first steps are as large for rounding as for anything else, differences would say little."""


class _Losses(Callback):
    """Those of each step, as Lightning hands them out: in a pipeline, only the last stage computes them."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach())


def trained(
    machine: Machine, strategy: Any, size: Size, readers: int, make: Callable[[Size], Module] = Plain, **arguments: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Mean losses of the steps over all ranks, and the weights at the end; those only on rank 0."""
    L.seed_everything(1, verbose=False)
    module, noted = make(size), _Losses()
    trainer = machine.fit(strategy, module, size, STEPS, readers, callbacks=[noted], **arguments)
    weights = module.state_dict() if strategy is None else full_state_dict(trainer)
    losses = torch.stack(noted.losses).double().cpu()
    if strategy is not None and dist.is_initialized() and dist.get_world_size() > 1:
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, losses)
        losses = torch.stack(of_ranks).mean(0)
    return losses.tolist(), {name: value.cpu() for name, value in weights.items()}


def apart(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The largest difference of two elements; a NaN if there is one."""
    return float(torch.stack([(first[name] - second[name]).abs().max() for name in second]).max()) if first else 0.0


def parity(machine: Machine) -> Iterator[Check]:
    """Every name against plain Lightning on one device: fp32 without TF32, bf16; an overflow in fp16; a resumed run."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    size = Size()
    expected: dict[tuple[str, int], Any] = {}
    for name in machine.names:
        for precision in TOLERANCES:
            if precision == "16-mixed" and not machine.has_gpu:
                continue
            what = f"parity/{name} {precision}"
            yield from tried(what, lambda name=name, precision=precision: _equal(machine, name, precision, expected))
    yield from tried("parity/resumed", lambda: iter([_resumed(machine, size)]))
    yield from _overflown(machine, size)


def _equal(machine: Machine, name: str, precision: str, expected: dict[tuple[str, int], Any]) -> Iterator[Check]:
    readers, size = readers_of(name, machine.num_ranks), Size()
    key = precision, readers
    expected[key] = expected.get(key) or trained(machine, None, size, readers, precision=precision)
    losses, weights = trained(machine, build_strategy(name), size, readers, precision=precision)
    if precision == "32-true":
        value = apart(weights, expected[key][1])
    else:
        value = float((torch.tensor(losses) - torch.tensor(expected[key][0])).abs().max())
    yield Check(f"parity/{name} {precision}", machine.largest(value), TOLERANCES[precision])


def _resumed(machine: Machine, size: Size) -> Check:
    """An epoch under one name, and one under another, from its checkpoint."""
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        if dist.is_initialized():
            dist.broadcast_object_list(folder)
        path = Path(folder[0]) / "first.ckpt"
        L.seed_everything(1, verbose=False)
        machine.fit(build_strategy("fsdp_custom"), Plain(size), size, STEPS, machine.num_ranks).save_checkpoint(path)
        trainer = machine.trainer(build_strategy("ddp_custom"), max_epochs=2)
        trainer.fit(Plain(size), machine.loader(size, STEPS, machine.num_ranks), ckpt_path=path)
        weights = {name: value.cpu() for name, value in full_state_dict(trainer).items()}
        assert trainer.global_step == 2 * STEPS
        if dist.is_initialized():
            dist.barrier()  # until all have read the file
    _, expected = trained(machine, None, size, machine.num_ranks, max_epochs=2)
    value = machine.largest(apart(weights, expected))
    return Check("parity/resumed: fsdp_custom, then ddp_custom", value, TOLERANCES["32-true"])


class _Overflowing(Module):
    """The loss of the last rank has no number in the second step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss, or infinity."""
        loss = super().training_step(batch, batch_idx)
        return loss * torch.inf if batch_idx == 1 and self.global_rank == self.trainer.world_size - 1 else loss


def _overflown(machine: Machine, size: Size) -> Iterator[Check]:
    for name in ("ddp_custom", "fsdp_custom"):
        if not machine.has_gpu:
            yield Check(f"parity/{name} 16-mixed, an overflow on one rank", why=NO_GPU)
            continue
        what = f"parity/{name} 16-mixed, an overflow on one rank"
        yield from tried(what, lambda name=name, what=what: _finite(machine, size, name, what))


def _finite(machine: Machine, size: Size, name: str, what: str) -> Iterator[Check]:
    _, weights = trained(machine, build_strategy(name), size, machine.num_ranks, _Overflowing, precision="16-mixed")
    no_numbers = sum(int((~torch.isfinite(each)).sum()) for each in weights.values())
    yield Check(what, machine.largest(no_numbers), 0.0)


class _Draws(Module):
    """Notes what a step draws."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss."""
        self.drawn = torch.rand(8, device=batch[0].device).tolist()
        return super().training_step(batch, batch_idx)


def rng(machine: Machine) -> Iterator[Check]:
    """Ranks that read different samples draw different numbers, after a random operation on shards too."""
    for name in machine.names:
        module, readers = _Draws(Size(), dropout=0.1), readers_of(name, machine.num_ranks)
        if machine.num_ranks == 1 or readers == 1:
            yield Check(f"rng/{name}", why="needs two ranks that read different samples")
            continue
        yield from tried(f"rng/{name}", lambda name=name, module=module: _draws(machine, name, module))


def _draws(machine: Machine, name: str, module: _Draws) -> Iterator[Check]:
    machine.fit(build_strategy(name), module, module.size, STEPS, readers_of(name, machine.num_ranks))
    drawn: list[Any] = [None] * machine.num_ranks
    dist.all_gather_object(drawn, module.drawn)
    yield Check(f"rng/{name}: ranks that draw alike", float(drawn[0] == drawn[1]), 0.0)


def kernels(machine: Machine) -> Iterator[Check]:
    """Attention by the flash kernel alone, as far as a name may compute it in parts."""
    # Heads of 64, as the kernels want them; a CPU has none of them, and takes long.
    size = replace(Size(), width=128, heads=2, length=256) if machine.has_gpu else Size()
    precision = "bf16-true"
    flash = functools.partial(Plain, is_flash=machine.has_gpu)
    expected: dict[int, list[float]] = {}
    strategies = {name: name for name in machine.names}
    if machine.num_ranks > 1:
        strategies["cp_custom:context_attention=ring"] = "cp_custom"

    def losses_of(text: str, name: str) -> Iterator[Check]:
        readers = readers_of(name, machine.num_ranks)
        is_ring = text != name
        if readers not in expected:
            expected[readers], _ = trained(machine, None, size, readers, flash, precision=precision)
        strategy = (
            MeshStrategy(context=machine.num_ranks, context_attention="ring", check="off")
            if is_ring
            else build_strategy(f"{name}:check=off")
        )
        make = Plain if is_ring else flash  # the ring has kernels of its own
        losses, _ = trained(machine, strategy, size, readers, make, precision=precision)
        value = float((torch.tensor(losses) - torch.tensor(expected[readers])).abs().max())
        yield Check(f"kernels/{text}: largest difference in losses", machine.largest(value), TOLERANCES["bf16-mixed"])

    for text, name in strategies.items():
        yield from tried(f"kernels/{text}", lambda text=text, name=name: losses_of(text, name))


def compile(machine: Machine) -> Iterator[Check]:
    """Graphs and breaks of 24 layers that are compiled one by one, and equal losses."""
    from torch._dynamo.utils import counters

    size = replace(Size(), depth=24)
    degrees: dict[str, dict[str, Any]] = {"fsdp_custom": {}}
    shared = {"tp_custom": {"tensor": machine.num_ranks}, "cp_custom": {"context": machine.num_ranks}}
    degrees |= {name: degree for name, degree in shared.items() if machine.num_ranks > 1 and name in machine.names}

    def graphs_of(name: str, degree: dict[str, Any]) -> Iterator[Check]:
        readers = readers_of(name, machine.num_ranks)
        expected, _ = trained(machine, None, size, readers)
        torch.compiler.reset()
        counters.clear()
        losses, _ = trained(machine, MeshStrategy(compile="layers", check="off", **degree), size, readers)
        value = float((torch.tensor(losses) - torch.tensor(expected)).abs().max())
        yield Check(f"compile/{name}: largest difference in losses", machine.largest(value), 1e-4)
        graphs = machine.largest(counters["stats"]["unique_graphs"])
        breaks = machine.largest(sum(counters["graph_break"].values()))
        # Under tensor and context parallelism, a break at each collective is known: docs/differences.md.
        is_whole = name == "fsdp_custom"
        yield Check(f"compile/{name}: graphs of 24 layers", graphs, 2.0 if is_whole else None)
        yield Check(f"compile/{name}: graph breaks", breaks, 0.0 if is_whole else None)

    for name, degree in degrees.items():
        yield from tried(f"compile/{name}", lambda name=name, degree=degree: graphs_of(name, degree))
