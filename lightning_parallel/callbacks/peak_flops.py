"""The peak of a device in FLOP/s, as its maker's data sheet has it, without sparsity."""

from __future__ import annotations

import torch

_HALF, _TF32, _SINGLE = "16 bit", "TF32", "32 bit"
_PEAKS = {
    # NVIDIA A100 Tensor Core GPU data sheet, 1758950-r4
    "A100": {_HALF: 312e12, _TF32: 156e12, _SINGLE: 19.5e12},
    # NVIDIA H100 Tensor Core GPU data sheet: 1,979 and 989 TFLOPS of the SXM module, 1,513 and 756 of the PCIe card,
    # "shown with sparsity", are twice these. An H200 is an H100 SXM with other memory.
    "H100 PCIe": {_HALF: 756e12, _TF32: 378e12, _SINGLE: 51e12},
    "H100 80GB HBM3": {_HALF: 989.4e12, _TF32: 494.7e12, _SINGLE: 66.9e12},
    "H200": {_HALF: 989.4e12, _TF32: 494.7e12, _SINGLE: 66.9e12},
}
"""Part of the name that torch has for a device -> the peak of its dense matrix products."""
_OTHER_CARDS = ("NVL", "GH200", "MIG")
"""Parts of names of devices that compute at other rates, of which no data sheet was at hand."""


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The peak of `device` in FLOP/s; ``None`` where it is not known.

    Args:
        device: The device of this rank.
        precision: As the Trainer has it, such as ``"bf16-mixed"``.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if any(other in name for other in _OTHER_CARDS):
        return None
    peaks = next((peaks for part, peaks in _PEAKS.items() if part in name), None)
    kind = _kind_of(precision)
    return None if peaks is None or kind is None else peaks[kind]


def _kind_of(precision: str) -> str | None:
    if precision.startswith(("bf16", "16")):
        return _HALF
    if not precision.startswith("32"):
        return None
    return _SINGLE if torch.get_float32_matmul_precision() == "highest" else _TF32
