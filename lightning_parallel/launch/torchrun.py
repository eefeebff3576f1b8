"""A shell script that starts the ranks of a node with torchrun."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from lightning_parallel.launch.job import Job

SHUTDOWN = "90"
"""Seconds in which ranks may end after SIGTERM, and save; torchrun's own number is 30."""


def torchrun_script(job: Job, *, endpoint: str | None = None, setup: Sequence[str] = ()) -> str:
    """The script; every node runs the same.

    Args:
        job: What to run.
        endpoint: Host and port at which nodes meet; a free port where there is one node.
        setup: Lines that make the package available, such as one that activates an environment.

    Returns:
        The text of a script for bash.
    """
    options = {
        "--nnodes": job.nodes,
        "--nproc-per-node": job.ranks,
        "--max-restarts": job.max_restarts,
        "--rdzv-backend": "c10d",
        "--rdzv-id": job.name,
        "--rdzv-endpoint": endpoint or "localhost:0",
    }
    words = ["torchrun", *(f"{name}={value}" for name, value in options.items()), "--no-python", *job.command.line]
    where = "bash it" if job.nodes == 1 else f"bash it on each of the {job.nodes} nodes"
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# {job.title}; {where}.",
            "set -euo pipefail",
            *setup,
            *exports({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": SHUTDOWN, **job.variables}),
            f"exec {as_lines(words)}",
            "",
        ]
    )


def exports(variables: dict[str, str]) -> list[str]:
    """Lines that set variables.

    Args:
        variables: Name -> value.
    """
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]


def as_lines(words: Sequence[str]) -> str:
    """A command in quotes, with a line for each option.

    Args:
        words: Its words.
    """
    lines = [shlex.quote(words[0])]
    for word, before in zip(words[1:], words[:-1], strict=True):
        # A value that stands alone follows its option.
        is_value = before.startswith("-") and "=" not in before and not word.startswith("-")
        lines.append((" " if is_value else " \\\n    ") + shlex.quote(word))
    return "".join(lines)
