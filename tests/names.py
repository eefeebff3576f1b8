"""Names of strategies: on how many ranks the tests run them, and which of these read different samples."""

from __future__ import annotations

from lightning_parallel.presets import PRESETS

SHARING = ("cp_custom", "tp_custom", "fsdp_tp_custom", "pp_custom")
"""Names under which some ranks read the same samples."""
SEPARATE = [name for name in PRESETS if name not in ("dp_custom", *SHARING)]
"""Names with several processes, each of which reads samples of its own."""


def num_ranks(name: str) -> int:
    return 4 if name in ("hsdp_custom", "fsdp_tp_custom") else 2


def num_readers(name: str, num_ranks: int) -> int:
    """How many ranks read other samples."""
    if name in ("dp_custom", "cp_custom", "tp_custom", "pp_custom"):
        return 1
    return num_ranks // 2 if name == "fsdp_tp_custom" else num_ranks
