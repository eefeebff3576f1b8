"""A script for sbatch, whose job is queued again before its time limit and goes on from what it has saved."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_parallel.launch.command import CHECKPOINT, ROOT
from lightning_parallel.launch.job import Job
from lightning_parallel.launch.torchrun import as_lines, exports

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_INTERACTIVE = ("bash", "interactive")
_TIME = re.compile(r"\d+|\d+:\d+|\d+:\d+:\d+|\d+-\d+(:\d+){0,2}")
_WORD = re.compile(r"[^\s#'\"]+")
_GRES = re.compile(r"gpu(:[A-Za-z0-9._-]+)?:(\d+)")
_SIGNAL = "SIGUSR1@90"
"""The signal at which the package saves and queues the job again, and seconds before the time limit."""


@dataclass(frozen=True)
class Request:
    """Options of sbatch beside the numbers of nodes, ranks and cores.

    Args:
        time: The time limit.
        partition: Where the job is queued.
        account: Who is charged.
        gres: In place of ``--gpus-per-node``, for clusters that do not know it.
    """

    time: str | None = None
    partition: str | None = None
    account: str | None = None
    gres: str | None = None

    def violations(self, ranks: int) -> list[str]:
        """Reasons why sbatch would not take them; empty if it may.

        Args:
            ranks: The number of ranks of a node.
        """
        found = []
        if self.time is not None and not _TIME.fullmatch(self.time):
            found.append(f"--time={self.time} is no time limit; give minutes, hours:minutes:seconds or days-hours")
        for name, value in (("partition", self.partition), ("account", self.account)):
            if value is not None and not _WORD.fullmatch(value):
                found.append(f"--{name}={value!r} is no name that sbatch takes; give one word")
        if self.gres is not None:
            match = _GRES.fullmatch(self.gres)
            if match is None:
                found.append(f"--gres={self.gres} names no GPUs; give gpu:{ranks}, or gpu:TYPE:{ranks}")
            elif int(match[2]) != ranks:
                found.append(
                    f"--gres={self.gres} are {match[2]} GPUs of a node, but --gpus-per-node={ranks}; give the same "
                    "number"
                )
        return found


def slurm_name_violations(name: str) -> list[str]:
    """Reasons why a job of SLURM cannot be called `name`; empty if it can.

    Args:
        name: As given.
    """
    if name in _INTERACTIVE:
        return [f"--name={name}: Lightning takes jobs of this name for interactive ones, with one rank; give another"]
    if not _NAME.fullmatch(name):
        return [f"--name={name!r} is no name of a job; give letters, digits, ., _ and -"]
    return []


def slurm_script(job: Job, request: Request, *, root: str | None = None, setup: Sequence[str] = ()) -> str:
    """The script.

    Args:
        job: What to run.
        request: Options of sbatch.
        root: The Trainer's `default_root_dir`, if the command or the recipe gives it; else a folder of the job.
        setup: Lines that make the package available, such as one that activates an environment.

    Returns:
        The text of a script for bash.
    """
    is_fit = job.command.name == "fit"
    cpus = [] if job.cpus is None else [f"--cpus-per-task={job.cpus}"]
    words = ["srun", "--kill-on-bad-exit=1", *cpus, *job.command.line]
    folder = [] if job.command.value(ROOT) is not None else [f'{ROOT}="$root"']
    # Bash before 4.4 takes an empty array for one that is not set.
    resume = ['${resume[@]+"${resume[@]}"}'] if is_fit else []
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in _options(job, request)),
            f"# {job.title}; submit it with sbatch.",
            "set -euo pipefail",
            *setup,
            *exports(job.variables),
            f"root={f'{job.name}-' + '$SLURM_JOB_ID' if root is None else shlex.quote(root)}",
            *(_resume_lines(job, root) if is_fit else []),
            " \\\n    ".join([as_lines(words), *folder, *resume]),
            "",
        ]
    )


def _options(job: Job, request: Request) -> Iterable[str]:
    yield f"--job-name={job.name}"
    yield f"--nodes={job.nodes}"
    yield f"--ntasks-per-node={job.ranks}"
    if job.has_gpus:
        yield f"--gres={request.gres}" if request.gres else f"--gpus-per-node={job.ranks}"
    if job.cpus is not None:
        yield f"--cpus-per-task={job.cpus}"
    for name in ("time", "partition", "account"):
        if (value := getattr(request, name)) is not None:
            yield f"--{name}={value}"
    yield f"--signal={_SIGNAL}"
    yield "--requeue"
    yield "--open-mode=append"
    yield f"--output={job.name}-%j.out"


def _resume_lines(job: Job, root: str | None) -> list[str]:
    """Lines that find the newest checkpoint of the job's own earlier attempts.

    Lightning goes on from ``hpc_ckpt_*`` by itself, also where ``last`` is newer, or another job has written it.
    """
    folders = " ".join(shlex.quote(folder.path) for folder in job.folders)
    foreign = [
        'if compgen -G "$root/hpc_ckpt_*.ckpt" > /dev/null; then',
        '    echo "$root has an hpc_ckpt_*.ckpt of another job, from which Lightning would go on; remove it," \\',
        f'        "or give {CHECKPOINT}" >&2',
        "    exit 2",
        "fi",
    ]
    # Of a folder that only this job has, there is nothing to fear.
    is_own = root is None or job.command.value(CHECKPOINT) is not None
    return [
        'begun="$root/.begun-$SLURM_JOB_ID"',
        "resume=()",
        'if [ -e "$begun" ]; then',
        "    # Queued again: go on from what this job has saved last, behind SLURM's signal or another one.",
        f'    newest=$(find -L "$root" {folders}'.rstrip()
        + " \\( -name 'hpc_ckpt_*.ckpt' -o -name 'last*.ckpt' \\) \\",
        "        -newer \"$begun\" -printf '%T@ %p\\n' 2> /dev/null | sort -n | tail -n 1 | cut -d ' ' -f 2- || true)",
        f'    if [ -n "$newest" ]; then resume=("{CHECKPOINT}=$newest"); fi',
        "else",
        '    mkdir -p "$root"',
        *([] if is_own else [f"    {line}" for line in foreign]),
        '    touch "$begun"',
        "fi",
    ]
