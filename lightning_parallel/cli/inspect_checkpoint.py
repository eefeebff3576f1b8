"""The command ``inspect``: what a checkpoint holds, without reading its tensors."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_parallel.checkpoint.opened import TensorEntry, damage_in, entries_of, open_checkpoint
from lightning_parallel.checkpoint.plain_files import VERSION
from lightning_parallel.checkpoint.sharded_folder import read_manifest
from lightning_parallel.checkpoint.stored_tensors import StoredTensors
from lightning_parallel.cli.byte_sizes import in_words
from lightning_parallel.errors import CheckpointError

_DAMAGED = 2
_LARGEST = 10
"""Tensors that are listed without ``--tensors``."""
_TOLD = ("state_dict", "epoch", "global_step", VERSION, "callbacks", "loops", "optimizer_states", "lr_schedulers")
_TOLD_OF_HYPER_PARAMETERS = ("hyper_parameters", "hparams_name", "hparams_type")


def inspect(arguments: list[str]) -> int:
    """Print what a checkpoint holds, and whether its parts have the checksums with which they were written.

    Args:
        arguments: The options of `_parser`.

    Returns:
        The exit status: 0, or 2 if the checkpoint is damaged.

    Raises:
        CheckpointError: If there is none, or it cannot be read and is intact.
    """
    options = build_parser().parse_args(arguments)
    path = options.checkpoint
    damage = damage_in(path)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    form = f"folder of {len(files)} files" if path.is_dir() else "whole file"
    num_bytes = sum(each.stat().st_size for each in files)
    report: dict[str, Any] = {"path": str(path), "form": form, "bytes": num_bytes, "damage": damage}
    try:
        # What differs from what was written is trusted by nobody.
        report |= describe(open_checkpoint(path, unsafe=options.unsafe and not damage))
        if path.is_dir():
            manifest = read_manifest(path)
            report["versions"] |= manifest["versions"]
            report |= {key: manifest.get(key) for key in ("strategy", "degrees", "dtypes", "plan")}
    except CheckpointError:
        if not damage:
            raise
    print(json.dumps(report, indent=2) if options.json else to_text(report, all_tensors=options.tensors))
    return _DAMAGED if damage else 0


def build_parser() -> argparse.ArgumentParser:
    """Build what reads the options."""
    parser = argparse.ArgumentParser(
        prog="lightning-parallel inspect",
        description="What a checkpoint holds, and whether it is intact; its tensors stay on the disk.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="a checkpoint")
    parser.add_argument("--tensors", action="store_true", help=f"list all tensors, and not the {_LARGEST} largest")
    parser.add_argument("--json", action="store_true", help="the same as JSON, with all tensors")
    parser.add_argument("--unsafe", action="store_true", help="unpickle objects of any class: runs code of the file")
    return parser


def describe(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Describe what a checkpoint holds, in values of JSON.

    Args:
        checkpoint: An open checkpoint.

    Example:
        >>> describe(open_checkpoint(Path("last.ckpt")))["global_step"]
    """
    weights = checkpoint["state_dict"]
    entries = entries_of(weights)
    names = {entry.name for entry in entries}
    told = {*_TOLD, *_TOLD_OF_HYPER_PARAMETERS}
    return {
        "versions": {"pytorch-lightning": checkpoint[VERSION]} if VERSION in checkpoint else {},
        "epoch": checkpoint.get("epoch"),
        "global_step": checkpoint.get("global_step"),
        "hyper_parameters": sorted(map(str, checkpoint.get("hyper_parameters") or {})),
        "callbacks": {str(key): _sizes(value) for key, value in (checkpoint.get("callbacks") or {}).items()},
        "loops": list(checkpoint.get("loops") or {}),
        "optimizers": [_optimizer(state) for state in checkpoint.get("optimizer_states") or []],
        "schedulers": len(checkpoint.get("lr_schedulers") or []),
        "others": {str(key): _sizes(value) for key, value in checkpoint.items() if key not in told},
        "extra_state": [name for name in weights if name not in names],
        "totals": _totals(entries),
        "tied": _tied(entries),
        "tensors": [_entry(entry) for entry in entries],
    }


def _optimizer(state: Mapping[str, Any]) -> dict[str, Any]:
    """Groups and states; which class it is of is not in a checkpoint."""
    groups = state.get("param_groups") or []
    entries: defaultdict[str, list[Any]] = defaultdict(list)
    for value in (state.get("state") or {}).values():
        of_parameter = value.described() if isinstance(value, StoredTensors) else value
        for name, value in of_parameter.items() if isinstance(of_parameter, Mapping) else ():
            entries[str(name)].append(value)
    return {
        "groups": len(groups),
        "parameters": sum(len(group.get("params", ())) for group in groups),
        "states": len(state.get("state") or {}),
        "entries": {name: _sizes(values) for name, values in entries.items()},
        "options": sorted({str(key) for group in groups for key in group if key != "params"}),
    }


def _sizes(value: Any) -> dict[str, int]:
    tensors = list(_tensors_in(value))
    return {"tensors": len(tensors), "bytes": sum(each.numel() * each.dtype.itemsize for each in tensors)}


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, StoredTensors):
        value = value.described()
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(each)


def _totals(entries: Sequence[TensorEntry]) -> dict[str, dict[str, int]]:
    """Dtype -> its tensors, tied ones once."""
    totals: dict[str, dict[str, int]] = {}
    for entry in entries:
        if not entry.tied_to:
            total = totals.setdefault(_dtype(entry), {"tensors": 0, "elements": 0, "bytes": 0})
            total["tensors"] += 1
            total["elements"] += entry.numel
            total["bytes"] += entry.num_bytes
    return totals


def _tied(entries: Sequence[TensorEntry]) -> list[list[str]]:
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for entry in entries:
        if entry.tied_to:
            groups[entry.tied_to].append(entry.name)
    return [[first, *others] for first, others in groups.items()]


def _entry(entry: TensorEntry) -> dict[str, Any]:
    shown = {"name": entry.name, "shape": list(entry.shape), "dtype": _dtype(entry), "bytes": entry.num_bytes}
    return {**shown, "tied_to": entry.tied_to} if entry.tied_to else shown


def _dtype(entry: TensorEntry) -> str:
    return str(entry.dtype).removeprefix("torch.")


# In words -------------------------------------------------------------------------------------------------------------


def to_text(report: Mapping[str, Any], *, all_tensors: bool) -> str:
    """A report for people.

    Args:
        report: Of `describe`, with the path, the form, the bytes and the damage of the file.
        all_tensors: Whether to list all tensors.
    """
    state = f"damaged: {report['damage']}" if report["damage"] else "intact"
    lines = [f"{report['path']}: {report['form']}, {in_words(report['bytes'])}, {state}"]
    if "tensors" not in report:
        return "\n".join(lines)
    lines += _of_run(report)
    lines += [f"optimizer {index}: {_of_optimizer(each)}" for index, each in enumerate(report["optimizers"])]
    if report["schedulers"]:
        lines.append(f"learning rate schedulers: {report['schedulers']}")
    if report["others"]:
        lines.append(f"other keys: {', '.join(_with_size(name, each) for name, each in report['others'].items())}")
    return "\n".join([*lines, "", *_of_tensors(report, all_tensors=all_tensors)])


def _of_run(report: Mapping[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [f"written by {versions}" if versions else "written by: not stored; not by Lightning"]
    if report["epoch"] is not None or report["global_step"] is not None:
        lines.append(f"epoch {report['epoch']}, global step {report['global_step']}")
    if report["hyper_parameters"]:
        lines.append(f"hyperparameters: {', '.join(report['hyper_parameters'])}")
    lines += [f"callback: {_with_size(name, each)}" for name, each in report["callbacks"].items()]
    if degrees := report.get("degrees"):
        given = ", ".join(f"{name}={degree}" for name, degree in degrees.items() if degree != 1)
        lines.append(f"by {report['strategy']}({given})")
    return [*lines, *([f"loops: {', '.join(report['loops'])}"] if report["loops"] else [])]


def _of_optimizer(optimizer: Mapping[str, Any]) -> str:
    entries = ", ".join(_with_size(name, each) for name, each in optimizer["entries"].items())
    groups = f"{optimizer['groups']} group{'s' if optimizer['groups'] != 1 else ''}"
    state = f"state of {optimizer['states']}: {entries}" if entries else "no state"
    return f"{optimizer['parameters']} parameters in {groups}; {state}"


def _with_size(name: str, sizes: Mapping[str, int]) -> str:
    if not sizes["tensors"]:
        return name
    return f"{name} ({sizes['tensors']} tensor{'s' if sizes['tensors'] > 1 else ''}, {in_words(sizes['bytes'])})"


def _of_tensors(report: Mapping[str, Any], *, all_tensors: bool) -> list[str]:
    tensors = report["tensors"]
    total = sum(each["bytes"] for each in report["totals"].values())
    lines = [f"state_dict: {len(tensors)} names, {in_words(total)}"]
    for dtype, each in report["totals"].items():
        lines.append(f"  {dtype}: {each['tensors']} tensors, {each['elements']:,} elements, {in_words(each['bytes'])}")
    lines += [f"  tied: {' = '.join(names)}" for names in report["tied"]]
    lines += [f"  no tensor: {name}" for name in report["extra_state"]]
    shown = tensors if all_tensors else sorted(tensors, key=lambda each: -each["bytes"])[:_LARGEST]
    width = max((len(each["name"]) for each in shown), default=0)
    lines += ["", *(_of_tensor(each, width) for each in shown)]
    if more := len(tensors) - len(shown):
        lines.append(f"and {more} smaller; --tensors lists all")
    return lines


def _of_tensor(tensor: Mapping[str, Any], width: int) -> str:
    shape = " x ".join(map(str, tensor["shape"])) or "one element"
    tied = f"  tied to {tensor['tied_to']}" if "tied_to" in tensor else ""
    return f"  {tensor['name']:<{width}}  {shape:<16} {tensor['dtype']:<9} {in_words(tensor['bytes']):>10}{tied}"
