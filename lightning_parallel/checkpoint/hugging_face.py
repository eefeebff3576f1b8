"""A folder that ``from_pretrained`` of transformers reads: weights, and the config that names their class."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_parallel.errors import check

CONFIG = "config.json"
_CLASS = "model_type"
_DTYPES = ("dtype", "torch_dtype")
_MOST_BEGINNINGS = 5


def prefix_of(names: Iterable[str]) -> str:
    """The name of the one attribute in which a LightningModule has its model, with a dot: that of all tensors.

    Args:
        names: Of the tensors.

    Raises:
        ConfigurationError: If there are several; with their names.
    """
    beginnings = dict.fromkeys(f"{name.partition('.')[0]}." if "." in name else name for name in names)
    if len(beginnings) == 1 and (first := next(iter(beginnings))).endswith("."):
        return first
    some = ", ".join(list(beginnings)[:_MOST_BEGINNINGS])
    more = " and more" if len(beginnings) > _MOST_BEGINNINGS else ""
    check(
        [
            f"--to huggingface: names begin with {some}{more}, and which of these is the model is not to be seen; give "
            "--prefix, such as --prefix=model. (the others are left out), or --prefix= if all is the model"
        ]
    )
    return ""


def config_text(given: Path | None, hyper_parameters: Any, dtype: torch.dtype | None) -> str:
    """The contents of ``config.json``.

    Args:
        given: A file, or a folder that has it; ``None`` to look for it in the hyperparameters.
        hyper_parameters: Those of the checkpoint.
        dtype: That to which the weights are converted, which takes the place of the one that the config names.

    Raises:
        ConfigurationError: If there is none.
    """
    config = _in_hyper_parameters(hyper_parameters) if given is None else _read(given)
    if dtype is not None:
        # Else from_pretrained would convert them back.
        config |= {key: str(dtype).removeprefix("torch.") for key in _DTYPES if key in config}
    elif given is not None:
        return _path_of(given).read_text(encoding="utf-8")  # as it is
    return json.dumps(config, indent=2) + "\n"


def _path_of(given: Path) -> Path:
    return given / CONFIG if given.is_dir() else given


def _read(given: Path) -> dict[str, Any]:
    path = _path_of(given)
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except ValueError:
        config = None
    if not isinstance(config, dict) or _CLASS not in config:
        why = f"is no config of transformers: it must be JSON with {_CLASS}" if path.is_file() else "does not exist"
        check(
            [
                f"--config={given}: {path} {why}; give the config.json of the model, which "
                "model.config.save_pretrained(folder) writes"
            ]
        )
    return dict(config or {})


def _in_hyper_parameters(hyper_parameters: Any) -> dict[str, Any]:
    values = hyper_parameters.values() if isinstance(hyper_parameters, Mapping) else ()
    as_dicts = (value.to_dict() if hasattr(value, "to_dict") else value for value in values)
    found = [dict(value) for value in as_dicts if isinstance(value, Mapping) and _CLASS in value]
    if len(found) != 1:
        held = "several configs" if found else "no config"
        check(
            [
                f"--to huggingface needs a {CONFIG}, and the checkpoint's hyperparameters have {held} with {_CLASS}; "
                "give --config, a file or a folder that has it: model.config.save_pretrained(folder) writes it"
            ]
        )
    return found[0]
