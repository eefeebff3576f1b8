"""The command ``launch``: write what starts a command on a cluster, once it is known that it can run there."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from lightning_parallel.cli.launch_options import (
    KUBERNETES,
    MODULE,
    NONE,
    SLURM,
    build_parser,
    option_violations,
    pods_of,
    request_of,
    split,
)
from lightning_parallel.cli.launched_recipe import LaunchedRecipe, read_recipe
from lightning_parallel.errors import check
from lightning_parallel.launch.command import ACCELERATOR, CHECKPOINT, ROOT, Command
from lightning_parallel.launch.job import Folder, Job, environment_of
from lightning_parallel.launch.kubernetes import manifest
from lightning_parallel.launch.slurm import slurm_script
from lightning_parallel.launch.torchrun import torchrun_script

_LAST = "last"
_LOGS = "lightning_logs"


def launch(arguments: list[str]) -> int:
    """Write a script or a manifest, to a file or the terminal, and submit it if that is asked for.

    Args:
        arguments: The options of `build_parser`, two dashes, and the command.

    Returns:
        The exit status: 0, or that of what it was submitted to. A set-up that is refused raises, and the command ends
        with 2.
    """
    own, command = split(arguments)
    options = build_parser().parse_args(own)
    nodes, devices = options.nodes, options.gpus_per_node
    of_command = command.violations(nodes, devices)
    violations = [*option_violations(options), *of_command]
    recipe = LaunchedRecipe()
    if options.check != NONE and not of_command and min(nodes, devices) > 0:
        recipe = read_recipe(command, nodes=nodes, devices=devices, builds=options.check == MODULE)
        violations += recipe.violations
    check(violations)
    job = _job(options, command, recipe)
    text = _text(options, job, recipe)
    for note in [recipe.degrees, *notes(options, job, recipe)]:
        if note:
            print(f"lightning-parallel: {note}", file=sys.stderr)
    if options.output is not None:
        options.output.write_text(text)
        print(f"lightning-parallel: written to {options.output}", file=sys.stderr)
    elif not options.submit:
        print(text, end="")
    return _submit(options.on, text) if options.submit else 0


def _job(options: argparse.Namespace, command: Command, recipe: LaunchedRecipe) -> Job:
    """The job, its command completed by what the cluster decides."""
    accelerator = command.value(ACCELERATOR)
    restarts = options.max_restarts or 0
    command = command.completed(nodes=options.nodes, devices=options.gpus_per_node)
    folders = recipe.folders
    if options.on == KUBERNETES and options.volume and recipe.root is None and command.value(ROOT) is None:
        mount = pods_of(options).mount
        command = command.with_option(ROOT, mount)
        folders = None if folders is None else [_below(folder, mount) for folder in folders]
    if restarts and command.name == "fit" and command.value(CHECKPOINT) is None:
        command = command.with_option(CHECKPOINT, _LAST)
    return Job(
        options.name,
        options.nodes,
        options.gpus_per_node,
        command,
        has_gpus=not (recipe.is_on_host if accelerator is None else accelerator == "cpu"),
        cpus=options.cpus_per_rank,
        environment=environment_of(options.env),
        max_restarts=restarts,
        folders=[Folder(_LOGS, is_lasting=False)] if folders is None else folders,
    )


def _below(folder: Folder, mount: str) -> Folder:
    """A folder in the Trainer's root, once that is the volume."""
    inside = [part for name in ("checkpoints", _LOGS) if (part := os.path.join(".", name)) == folder.path]  # noqa: PTH118
    return Folder(f"{mount}/{inside[0][2:]}", folder.is_lasting) if inside else folder


def _text(options: argparse.Namespace, job: Job, recipe: LaunchedRecipe) -> str:
    if options.on == KUBERNETES:
        return manifest(job, pods_of(options), options.kind or "jobset", runtime=options.runtime)
    setup = options.setup or ()
    if options.on == SLURM:
        root = job.command.value(ROOT) or recipe.root
        return slurm_script(job, request_of(options), root=root, setup=setup)
    return torchrun_script(job, endpoint=options.endpoint, setup=setup)


def notes(options: argparse.Namespace, job: Job, recipe: LaunchedRecipe) -> list[str]:
    """Losses of a run that is started again, as far as the recipe tells.

    Args:
        options: Those of the command.
        job: What is run.
        recipe: What is known of the recipe.
    """
    if job.command.name != "fit" or recipe.folders is None:
        return []
    if not job.folders:
        return ["the recipe saves no checkpoints, so that a run that is started again begins anew"]
    found = []
    if job.max_restarts and (given := job.command.value(CHECKPOINT)) != _LAST:
        found.append(f"a restart begins at {given} again; leave {CHECKPOINT} out, and it goes on from the last one")
    elif job.max_restarts and not any(folder.is_lasting for folder in job.folders):
        found.append(
            f"a restart begins anew: checkpoints are in {job.folders[0].path}, in a folder that is another one each "
            "time; give the logger a version (--trainer.logger.version=NAME), or ModelCheckpoint a dirpath"
        )
    if options.on == KUBERNETES:
        mount = pods_of(options).mount.rstrip("/")
        lost = [each.path for each in job.folders if not options.volume or not f"{each.path}/".startswith(f"{mount}/")]
        way = f"put them below {mount}" if options.volume else f"give --volume, and put them below {mount}"
        if lost and not all("://" in path for path in lost):
            found.append(f"checkpoints in {', '.join(lost)} are lost with their pod; {way}")
    return found


def _submit(on: str, text: str) -> int:
    """Hand the script or the manifest to the cluster; that of torchrun is run here."""
    if on == KUBERNETES:
        return subprocess.run(["kubectl", "apply", "-f", "-"], input=text, text=True, check=False).returncode
    if on == SLURM:
        return subprocess.run(["sbatch"], input=text, text=True, check=False).returncode
    return subprocess.run(["bash", "-c", text], check=False).returncode
