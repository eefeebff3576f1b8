"""A command on the nodes of a cluster, and what is wrong with its description on any of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_parallel.launch.command import Command

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ENDPOINT = re.compile(r"[A-Za-z0-9._-]+:[0-9]{1,5}|\[[0-9a-fA-F:]+\]:[0-9]{1,5}")


@dataclass(frozen=True)
class Folder:
    """A folder to which checkpoints are written.

    Args:
        path: As it is seen on a node; checkpoints are in it, or in folders below it.
        is_lasting: Whether a run that is started again looks for them where the run before has left them.
    """

    path: str
    is_lasting: bool = True


@dataclass(frozen=True)
class Job:
    """A command on the nodes of a cluster.

    Args:
        name: Of the job.
        nodes: The number of machines.
        ranks: The number of ranks on each, one for each GPU.
        command: What each rank runs.
        has_gpus: Whether GPUs are asked for; else the ranks compute on the host.
        cpus: Cores of a rank; ``None`` if that is left to the cluster.
        environment: More variables.
        max_restarts: How often the ranks are started again after a failure.
        folders: Where checkpoints are written, as far as the recipe tells.
    """

    name: str
    nodes: int
    ranks: int
    command: Command
    has_gpus: bool = True
    cpus: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    folders: Sequence[Folder] = ()

    @property
    def variables(self) -> dict[str, str]:
        """Variables of each rank."""
        return {"OMP_NUM_THREADS": str(self.cpus or 1), **self.environment}

    @property
    def title(self) -> str:
        """One line for people."""
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{self.name}: {nodes} x {self.ranks} {'ranks' if self.ranks > 1 else 'rank'}"


def size_violations(**sizes: int | None) -> list[str]:
    """Numbers that count nothing; empty if all do.

    Args:
        sizes: Option, without its dashes and with low lines -> the number; ``None`` if it is not given.
    """
    return [
        f"--{name.replace('_', '-')}={number}: give 1 or more"
        for name, number in sizes.items()
        if number is not None and number < 1
    ]


def environment_of(pairs: Sequence[str]) -> dict[str, str]:
    """Variables of ``NAME=VALUE``.

    Args:
        pairs: As `environment_violations` accepts them.
    """
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def environment_violations(pairs: Sequence[str]) -> list[str]:
    """Reasons why variables are none; empty if they are.

    Args:
        pairs: As given.
    """
    found = []
    for pair in pairs:
        name, equals, _ = pair.partition("=")
        if not equals or not _VARIABLE.fullmatch(name):
            found.append(f"--env={pair} is not of the form NAME=VALUE; give a name of letters, digits and _")
    return found


def endpoint_violations(endpoint: str | None, nodes: int) -> list[str]:
    """Reasons why nodes cannot meet; empty if they can.

    Args:
        endpoint: As given: a host and a port.
        nodes: The number of machines.
    """
    if endpoint is None:
        missing = "--endpoint is missing: the nodes meet at a port of one of them"
        return [f"{missing}; give its name or address, such as --endpoint=node0:29500"] if nodes > 1 else []
    port = endpoint.rpartition(":")[2]
    if not _ENDPOINT.fullmatch(endpoint) or not int(port) < 2**16:
        return [f"--endpoint={endpoint} is no host and port; give one such as node0:29500"]
    return []
