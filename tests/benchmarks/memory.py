# python tests/benchmarks/memory.py
# python tests/benchmarks/memory.py --accelerator cuda --ranks 8 --batch 32
# python tests/benchmarks/memory.py --only fsdp_custom fsdp_custom:recompute=full
"""How much memory a rank holds at most under each policy.

Every policy runs in processes of its own. On the CPU the peak is that of the resident set, on a GPU what torch
allocated (`max_memory_allocated`); what the rank held before its module was built is taken off. The largest of the
ranks counts. On the CPU the C library is told to give freed tensors back, or the resident set would only ever grow.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from contenders import Module, set_up, start_ranks, tokens
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

import lightning_parallel
from lightning_parallel.ranks.memory import peak_memory, reset_peak_memory

LENGTH, STEPS = 256, 3
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("ddp_custom", {}),
    ("zero1_custom", {}),
    ("zero2_custom", {}),
    ("fsdp_custom", {}),
    ("fsdp_custom", {"precision": "bf16-mixed"}),
    ("fsdp_custom", {"precision": "bf16-true"}),
    ("fsdp_custom:recompute=full", {}),
    ("fsdp_custom:recompute=every:2", {}),
    ("fsdp_custom:recompute=selective", {}),
    ("fsdp_custom:compile=layers", {}),
    ("fsdp_custom:compile=layers,recompute=budget:0.5", {}),
    ("fsdp_custom:accumulation_sync=every", {"accumulate_grad_batches": 2}),
    ("fsdp_custom:accumulation_sync=last", {"accumulate_grad_batches": 2}),
    ("fsdp_custom:optimizer_in_backward=true", {}),
    ("fsdp_custom:offload=optimizer", {}),
    ("fsdp_offload_custom", {}),
)


class Peak(Callback):
    """Notes the peak of the last step, when everything that training needs is there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """From here on."""
        reset_peak_memory(self._device)

    def on_train_batch_end(self, *args: Any) -> None:
        """To here; the optimizer's step included."""
        self.bytes = max(self.bytes, peak_memory(self._device))


def label(strategy: str, trainer: dict[str, Any]) -> str:
    """The policy as one line."""
    return " ".join([strategy, *(f"{name}={value}" for name, value in trainer.items())])


def train(number: int, accelerator: str, batch: int) -> None:
    """Run policy `number` on this rank; rank 0 prints a line."""
    device = set_up(accelerator)
    strategy, arguments = POLICIES[number]
    reset_peak_memory(device)
    before = peak_memory(device)
    peak = Peak(device)
    trainer = L.Trainer(
        accelerator=accelerator,
        devices=dist.get_world_size(),
        # The plain copy of the first step is freed before the second one, but would be the peak.
        strategy=lightning_parallel.build_strategy(f"{strategy}{',' if ':' in strategy else ':'}check=off"),
        max_epochs=1,
        callbacks=[peak],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    steps = STEPS * arguments.get("accumulate_grad_batches", 1)
    dataset = tokens(steps * batch * dist.get_world_size(), LENGTH)
    trainer.fit(Module(), DataLoader(dataset, batch_size=batch, shuffle=False))
    most = torch.tensor(peak.bytes - before, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"{label(strategy, arguments):60} {int(most) / 2**20:8.0f} MiB", flush=True)
    dist.barrier()


def main() -> None:
    """Start the ranks of each policy in turn, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--only", nargs="*", help="strategies, as they are listed in POLICIES")
    parser.add_argument("--policy", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.policy is not None:
        train(options.policy, options.accelerator, options.batch)
        return
    print(f"peak memory of a rank; {options.ranks} ranks, {options.batch} x {LENGTH} tokens a rank, AdamW", flush=True)
    for number, (strategy, _) in enumerate(POLICIES):
        if not options.only or strategy in options.only:
            status = start_ranks([*sys.argv, "--policy", str(number)], options.ranks, GIVE_BACK)
            if status:
                sys.exit(status)


if __name__ == "__main__":
    main()
