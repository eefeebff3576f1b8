"""The options of ``launch``, without imports that take time, so that their help is there at once."""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from lightning_parallel.launch.command import PROGRAM, Command
from lightning_parallel.launch.job import endpoint_violations, environment_violations, size_violations
from lightning_parallel.launch.kubernetes import kind_violations
from lightning_parallel.launch.pods import Pods
from lightning_parallel.launch.slurm import Request, slurm_name_violations

TORCHRUN, SLURM, KUBERNETES = "torchrun", "slurm", "kubernetes"
MODULE, DEGREES, NONE = "module", "degrees", "none"
SUBMITTING = {TORCHRUN: "bash", SLURM: "sbatch", KUBERNETES: "kubectl"}
"""Cluster -> the command that takes what is written."""
_NEEDED = {TORCHRUN: "torchrun", **{name: command for name, command in SUBMITTING.items() if name != TORCHRUN}}
_OWN = {
    "endpoint": (TORCHRUN,),
    "setup": (TORCHRUN, SLURM),
    "max_restarts": (TORCHRUN, KUBERNETES),
    **dict.fromkeys(("time", "partition", "account", "gres"), (SLURM,)),
    **dict.fromkeys(
        ("kind", "image", "volume", "mount", "namespace", "gpu_resource", "shared_memory", "runtime"), (KUBERNETES,)
    ),
}
"""Option -> the clusters for which it is."""
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def split(arguments: Sequence[str]) -> tuple[list[str], Command]:
    """The options of ``launch``, and the command behind the two dashes.

    Args:
        arguments: All of them.
    """
    given = list(arguments)
    at = given.index("--") if "--" in given else len(given)
    words = given[at + 1 :]
    return given[:at], Command(tuple(words[1:] if words[:1] == [PROGRAM] else words))


def build_parser() -> argparse.ArgumentParser:
    """Build what reads the options in front of the two dashes."""
    parser = argparse.ArgumentParser(
        prog="lightning-parallel launch",
        usage="%(prog)s --on CLUSTER --nodes N --gpus-per-node M [options] -- fit --config recipe.yaml [...]",
        description="Write what starts a command on a cluster: a script, or a manifest.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--on", required=True, metavar="|".join(SUBMITTING), help="what starts the ranks")
    add("--nodes", required=True, type=int, help="machines, or pods")
    add("--gpus-per-node", required=True, type=int, help="GPUs of each, with one rank for each of them")
    add("--name", default=PROGRAM, help="of the job (default %(default)s)")
    add("--cpus-per-rank", type=int, help="cores of a rank, asked for and used (default: 1 thread, nothing asked for)")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="one more variable of all ranks; repeatable")
    add("--output", type=Path, metavar="FILE", help="where to write it (default: to the terminal)")
    add("--submit", action="store_true", help="hand it to sbatch or kubectl, or run it here (torchrun)")
    checks = "what to check here: the recipe's module, which is built for it; its degrees alone; none (default module)"
    add("--check", default=MODULE, metavar=f"{MODULE}|{DEGREES}|{NONE}", help=checks)
    _add_of_clusters(parser)
    return parser


def _add_of_clusters(parser: argparse.ArgumentParser) -> None:
    """Add what only some clusters have; their defaults show whether they are given."""
    scripts = parser.add_argument_group("torchrun and slurm").add_argument
    scripts("--setup", action="append", metavar="LINE", help="a line before the command, such as: . venv/bin/activate")
    torchrun = parser.add_argument_group("torchrun").add_argument
    torchrun("--endpoint", metavar="HOST:PORT", help="where nodes meet: one of them, and a free port of it")
    slurm = parser.add_argument_group("slurm").add_argument
    slurm("--time", help="the time limit, as sbatch has it")
    slurm("--partition", help="where to queue")
    slurm("--account", help="whom to charge")
    slurm("--gres", metavar="gpu[:TYPE]:M", help="in place of --gpus-per-node in the script")
    kubernetes = parser.add_argument_group("kubernetes").add_argument
    kubernetes("--kind", metavar="jobset|trainjob|pytorchjob", help="of the object (default jobset)")
    kubernetes("--image", help="of the containers; it is needed")
    kubernetes("--volume", metavar="CLAIM", help="a PersistentVolumeClaim for checkpoints")
    kubernetes("--mount", metavar="PATH", help="where it is seen (default /checkpoints)")
    kubernetes("--namespace", help="of the object")
    kubernetes("--gpu-resource", help="what counts GPUs (default nvidia.com/gpu)")
    kubernetes("--shared-memory", metavar="16Gi", help="the most that /dev/shm may hold")
    kubernetes("--runtime", help="of a TrainJob: a ClusterTrainingRuntime (default torch-distributed)")
    both = parser.add_argument_group("torchrun and kubernetes").add_argument
    both("--max-restarts", type=int, help="starts after a failure, from ckpt_path=last (default 0)")


def option_violations(options: argparse.Namespace) -> list[str]:
    """Everything that is wrong with the values, at once."""
    on, found = options.on, []
    if on not in SUBMITTING:
        found.append(f"--on={on} is unknown; possible: {', '.join(SUBMITTING)}")
    if options.check not in (MODULE, DEGREES, NONE):
        found.append(f"--check={options.check} is unknown; possible: {MODULE}, {DEGREES}, {NONE}")
    found += size_violations(
        nodes=options.nodes, gpus_per_node=options.gpus_per_node, cpus_per_rank=options.cpus_per_rank
    )
    if options.max_restarts is not None and options.max_restarts < 0:
        found.append(f"--max-restarts={options.max_restarts}: give 0 or more")
    found += environment_violations(options.env)
    found += [
        f"--{name.replace('_', '-')} is for --on={' and '.join(clusters)}, not for --on={on}; leave it out"
        for name, clusters in _OWN.items()
        if on in SUBMITTING and getattr(options, name) is not None and on not in clusters
    ]
    return [*found, *_cluster_violations(options), *_place_violations(options)]


def _cluster_violations(options: argparse.Namespace) -> list[str]:
    """Reasons that lie in what one of the clusters takes."""
    if options.on == SLURM:
        return [*slurm_name_violations(options.name), *request_of(options).violations(options.gpus_per_node)]
    if options.on == KUBERNETES:
        kind, restarts = options.kind or "jobset", options.max_restarts or 0
        of_kind = kind_violations(kind, options.name, options.nodes, runtime=options.runtime, max_restarts=restarts)
        return [*of_kind, *pods_of(options).violations()]
    is_name = _RUN_ID.fullmatch(options.name)
    of_name = [] if is_name else [f"--name={options.name!r} is no name of a run; give letters, digits, ., _ and -"]
    return [*of_name, *endpoint_violations(options.endpoint, options.nodes)] if options.on == TORCHRUN else []


def _place_violations(options: argparse.Namespace) -> list[str]:
    """Reasons why what is written can't be put where it is to go."""
    found = []
    path = options.output
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        found.append(f"--output={path}: give a file, in a folder that is there")
    needed = _NEEDED.get(options.on)
    if options.submit and needed and shutil.which(needed) is None:
        found.append(
            f"--submit needs {needed}, and this machine has no such command; leave --submit out, and take what is "
            "written to a machine that has it"
        )
    return found


def request_of(options: argparse.Namespace) -> Request:
    """The request to SLURM."""
    return Request(time=options.time, partition=options.partition, account=options.account, gres=options.gres)


def pods_of(options: argparse.Namespace) -> Pods:
    """The pods."""
    given = {
        "namespace": options.namespace,
        "claim": options.volume,
        "mount": options.mount,
        "gpu": options.gpu_resource,
        "shared_memory": options.shared_memory,
    }
    return Pods(options.image or "", **{name: value for name, value in given.items() if value is not None})
