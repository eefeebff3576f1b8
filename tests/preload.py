"""What the servers of ranks import before they fork: all that takes time. None of it may start a thread."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest  # noqa: F401
import torch.distributed.pipelining  # noqa: F401
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401

import tests.jobs.lifecycle  # noqa: F401
from lightning_parallel import build_strategy

PROCESS = os.getpid()
"""The process that has imported this: a server."""
THREADS = len(list(Path("/proc/self/task").iterdir())) if Path("/proc/self/task").exists() else 1
"""Threads of that process; a fork leaves all but one of them behind, with the locks that they hold."""

# Parsers of options are made once, and what they import is imported here.
for _name in ("dp_custom", "ddp_custom", "zero1_custom", "fsdp_custom"):
    build_strategy(f"{_name}:check=off")

# What is here stays: ranks that collected garbage would go through all of it, and copy the pages that they share.
gc.collect()
gc.freeze()
