"""The command ``lightning-parallel``: what it can answer before anything is imported."""

from __future__ import annotations

import sys
from importlib import metadata

_USAGE = """\
usage: lightning-parallel COMMAND [options]

  fit | validate | test | predict   run a recipe: --config recipe.yaml --strategy=NAME:option=value,...
  verify                            a recipe under its strategy against one process, on the CPU
  bench                             a recipe under several strategies and on several numbers of devices, timed
  doctor                            some steps of a recipe, and a report of where their time goes
  report RUN_DIR ...                one page of HTML from the logs of runs, compared
  explain                           what a recipe's strategy would do to each layer; the options of fit
  inspect CKPT                      what a checkpoint holds, and whether it is intact
  export CKPT --to FORMAT --out P   its weights as safetensors | huggingface | lightning | torch
  launch --on CLUSTER ... -- fit    a script or manifest for torchrun, slurm or kubernetes
  strategies [NAME]                 the names that --strategy takes, and the options of each, or of one
  devices                           the accelerators of this machine
  completion bash | zsh             a script by which that shell completes all of this

lightning-parallel fit --help lists the options of a command, lightning-parallel --version the versions.
"""
_PACKAGES = ("lightning_parallel", "torch", "lightning", "torchmetrics", "jsonargparse")


def main() -> None:
    """Run the command line; a set-up that is refused prints its reasons once and exits with status 2."""
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command in ("", "-h", "--help"):
        print(_USAGE, end="")
    elif command == "--version":
        print("\n".join(f"{name} {metadata.version(name)}" for name in _PACKAGES))
    elif command == "bench" and {"-h", "--help"} & set(sys.argv[2:]):
        from lightning_parallel.cli.bench_options import build_parser

        build_parser().print_help()
    elif command == "launch" and {"-h", "--help"} & set(" ".join(sys.argv[2:]).partition(" -- ")[0].split()):
        from lightning_parallel.cli.launch_options import build_parser as build_launch_parser

        build_launch_parser().print_help()
    else:
        from lightning_parallel.cli.commands import run

        run(command)
