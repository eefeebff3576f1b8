"""The command ``export``: the weights of a checkpoint in the format of another tool."""

from __future__ import annotations

import argparse
import errno
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_parallel.checkpoint import safetensors_files
from lightning_parallel.checkpoint.chosen_weights import ChosenWeights, averages_in
from lightning_parallel.checkpoint.hugging_face import CONFIG, config_text, prefix_of
from lightning_parallel.checkpoint.opened import damage_in, open_checkpoint
from lightning_parallel.checkpoint.plain_files import state_dict_of, without_training
from lightning_parallel.checkpoint.safetensors_files import bytes_of, shards_of, unwritable_violations, write_shards
from lightning_parallel.checkpoint.whole_file import bytes_of_tensors, save_into, written_aside
from lightning_parallel.checkpoint.whole_folder import folder_aside
from lightning_parallel.cli.byte_sizes import bytes_in, in_words
from lightning_parallel.errors import CheckpointError, check

_FORMATS = ("safetensors", "huggingface", "lightning", "torch")
_OF_SAFETENSORS = ("safetensors", "huggingface")
_DTYPES = ("bfloat16", "float16", "float32")
_SHARD_SIZE = "5GB"
_ONE_FILE = ".safetensors"
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|config\.json")
"""Files that an export writes into a folder."""


def export(arguments: list[str]) -> int:
    """Write the weights of a checkpoint in another format, and say what was written.

    It takes one process and none of the code that trained. Tensors are read from the disk one at a time; what was at
    the destination stays until all is written.

    Args:
        arguments: The options of `_parser`.

    Returns:
        The exit status, 0.

    Raises:
        ConfigurationError: For options that do not go together, or that the checkpoint does not fit.
        CheckpointError: If the checkpoint cannot be read, or the export not be written.
    """
    options = build_parser().parse_args(arguments)
    check(_violations(options))
    if damage := damage_in(options.checkpoint):
        raise CheckpointError(f"{options.checkpoint} is damaged: {damage}. Give an intact checkpoint")
    checkpoint = open_checkpoint(options.checkpoint, unsafe=options.unsafe)
    weights = _chosen(checkpoint, options)
    try:
        if options.to in _OF_SAFETENSORS:
            _write_safetensors(checkpoint, weights, options)
        else:
            _write_torch(checkpoint, weights, options)
    except OSError as error:
        raise CheckpointError(_not_written(options.out, error, weights)) from error
    print(_done(weights, options))
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Build what reads the options."""
    parser = argparse.ArgumentParser(
        prog="lightning-parallel export",
        description="Write the weights of a checkpoint in another format; without the code that trained them.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="a checkpoint")
    parser.add_argument(
        "--to",
        required=True,
        choices=_FORMATS,
        help="safetensors: model.safetensors, or shards with an index; huggingface: these and config.json, as "
        "from_pretrained reads them; lightning: as load_from_checkpoint reads it, without states of training; torch: "
        "a plain state_dict",
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder for the first two, a file for the others")
    parser.add_argument("--force", action="store_true", help="replace what is at --out")
    parser.add_argument("--dtype", choices=_DTYPES, help="convert floating tensors")
    parser.add_argument("--average", action="store_true", help="the averages of ExponentialMovingAverage as weights")
    parser.add_argument("--prefix", help="only names that begin with this, without it; found by itself for huggingface")
    parser.add_argument("--config", type=Path, help="config.json for huggingface, or a folder that has it")
    parser.add_argument("--shard-size", help=f"the most of a safetensors file, such as 500MB (default {_SHARD_SIZE})")
    parser.add_argument("--unsafe", action="store_true", help="unpickle objects of any class: runs code of the file")
    return parser


def _violations(options: argparse.Namespace) -> list[str]:
    violations = []
    if options.prefix and options.to == "lightning":
        violations.append(
            f"--prefix={options.prefix} with --to lightning: the module has the names of the checkpoint; leave it out"
        )
    if options.config is not None and options.to != "huggingface":
        violations.append(f"--config={options.config} with --to {options.to}: only huggingface has one; leave it out")
    if options.shard_size is not None:
        if options.to not in _OF_SAFETENSORS:
            violations.append(
                f"--shard-size={options.shard_size} with --to {options.to}, which is one file; leave it out"
            )
        elif bytes_in(options.shard_size) is None:
            violations.append(f"--shard-size={options.shard_size} is no number of bytes; give one such as 500MB or 5GB")
    return [*violations, *_place_violations(options)]


def _place_violations(options: argparse.Namespace) -> list[str]:
    """Say why the export cannot take the place that it is given."""
    out = options.out
    if options.to not in _OF_SAFETENSORS and out.suffix == _ONE_FILE:  # by which torch.load chooses how to read it
        return [f"--out={out} with --to {options.to}: give a name that does not end in {_ONE_FILE}"]
    if _is_file(options) and out.is_dir():
        example = out / {"torch": "model.pt", "lightning": "model.ckpt"}.get(options.to, "model.safetensors")
        return [f"--out={out} is a folder, and --to {options.to} writes a file; give one such as {example}"]
    if not _is_file(options) and out.exists() and not out.is_dir():
        return [f"--out={out} is a file, and --to {options.to} writes a folder; give another path"]
    inside = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    if strange := [name for name in inside if not _OURS.fullmatch(name)]:
        return [
            f"--out={out} is a folder with files of others ({', '.join(strange[:3])}), which would be lost, since an "
            "export replaces it as a whole; give a new folder"
        ]
    if (inside or out.is_file()) and not options.force:
        return [f"--out={out} exists; give another path, or --force to replace it"]
    return []


def _is_file(options: argparse.Namespace) -> bool:
    return options.to not in _OF_SAFETENSORS or (options.to == "safetensors" and options.out.suffix == _ONE_FILE)


def _chosen(checkpoint: Mapping[str, Any], options: argparse.Namespace) -> ChosenWeights:
    weights, prefix = checkpoint["state_dict"], options.prefix
    if prefix is None:
        prefix = prefix_of(weights) if options.to == "huggingface" else ""
    elif prefix and not prefix.endswith("."):
        prefix += "."
    return ChosenWeights(
        weights,
        prefix=prefix,
        averages=averages_in(checkpoint) if options.average else None,
        dtype=_dtype_of(options),
    )


def _write_torch(checkpoint: Mapping[str, Any], weights: ChosenWeights, options: argparse.Namespace) -> None:
    options.out.parent.mkdir(parents=True, exist_ok=True)
    value: Any = state_dict_of(weights, options.out.parent)
    if options.to == "lightning":
        value = without_training(checkpoint, value)
    with written_aside(options.out, bytes_of_tensors(value)) as file:
        save_into(value, file)


def _write_safetensors(checkpoint: Mapping[str, Any], weights: ChosenWeights, options: argparse.Namespace) -> None:
    check(unwritable_violations(weights))
    given = options.shard_size or _SHARD_SIZE
    shards = shards_of(weights, bytes_in(given) or 0)
    if _is_file(options):
        if len(shards) > 1:
            size = in_words(bytes_of(shards))
            check(
                [
                    f"--out={options.out} is one file, and the tensors take {size}, more than {given} a file; give a "
                    "folder, or a larger --shard-size"
                ]
            )
        with written_aside(options.out, bytes_of(shards)) as file:
            safetensors_files.write_file(file, weights, shards[0])
        return
    text = ""
    if options.to == "huggingface":
        text = config_text(options.config, checkpoint.get("hyper_parameters"), _dtype_of(options))
    with folder_aside(options.out, bytes_of(shards)) as folder:
        write_shards(folder, weights, shards)
        if text:
            (folder / CONFIG).write_text(text, encoding="utf-8")


def _dtype_of(options: argparse.Namespace) -> torch.dtype | None:
    return getattr(torch, options.dtype) if options.dtype else None


def _done(weights: ChosenWeights, options: argparse.Namespace) -> str:
    entries = [entry for entry in weights.entries.values() if not entry.tied_to]
    lines = [f"{options.out}: {len(entries)} tensors, {in_words(sum(entry.num_bytes for entry in entries))}"]
    if tied := [f"{name} is {entry.tied_to}" for name, entry in weights.entries.items() if entry.tied_to]:
        lines.append(f"tied, and written once: {', '.join(tied)}")
    if weights.prefix:
        lines.append(f"without the prefix {weights.prefix}")
    if left_out := weights.left_out:
        lines.append(f"left out, without this prefix: {', '.join(left_out)}")
    return "\n".join(lines)


def _not_written(out: Path, error: OSError, weights: ChosenWeights) -> str:
    num_bytes = sum(entry.num_bytes for entry in weights.entries.values() if not entry.tied_to)
    folder = next((each for each in out.absolute().parents if each.is_dir()), Path("/"))
    room = f"; {shutil.disk_usage(folder).free:,} bytes are free there" if error.errno == errno.ENOSPC else ""
    return (
        f"the export {out} could not be written: {error.strerror or error}. Its tensors take {num_bytes:,} "
        f"bytes{room}. Make room, or give another --out; what was there is unchanged"
    )
