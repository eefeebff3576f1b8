"""Says which newest torch and Lightning pip would take today, if the whole suite has not been run with them yet.

Prints requirements such as ``torch==2.15.0 lightning==2.6.6``, or nothing if `tests/constraints/seen.json` lists them;
says on the other stream what it found. It also prints nothing where no package index can be reached. It runs in an
environment in which the package is installed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
SEEN = ROOT / "tests" / "constraints" / "seen.json"
NAMES = ("torch", "lightning")


def window(name: str) -> Requirement:
    """The versions of `name` that `pyproject.toml` allows."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (found,) = (each for each in map(Requirement, dependencies) if each.name == name)
    return found


def available(name: str) -> list[str]:
    """The releases of `name` for this Python, of which pip knows; empty where it can ask nobody."""
    command = [sys.executable, "-m", "pip", "index", "versions", name]
    environment = {key: value for key, value in os.environ.items() if key not in ("PIP_QUIET", "PIP_CONSTRAINT")}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    listed = re.search(r"^Available versions: (.*)$", answer.stdout, flags=re.MULTILINE)
    return listed[1].split(", ") if listed and answer.returncode == 0 else []


def newest(versions: Iterable[str], allowed: Requirement) -> str | None:
    """The last of `versions` that are `allowed`, without what builds for CUDA or the CPU add to it."""
    releases = [version for version in map(Version, versions) if allowed.specifier.contains(version, prereleases=False)]
    return max(releases).public if releases else None


def seen_on(versions: Mapping[str, str], runs: Sequence[Mapping[str, Any]]) -> str | None:
    """The last day on which the whole suite passed with `versions`."""
    days = [run["day"] for run in runs if all(run[name] == version for name, version in versions.items())]
    return max(days, default=None)


def main() -> None:
    """Print what is to be installed and run, if anything."""
    versions = {name: newest(available(name), window(name)) for name in NAMES}
    if None in versions.values():
        print("no package index answers, so nothing newer is looked for", file=sys.stderr)
        return
    wanted = " ".join(f"{name}=={version}" for name, version in versions.items())
    day = seen_on({name: str(version) for name, version in versions.items()}, json.loads(SEEN.read_text())["runs"])
    if day is None:
        print(wanted)
    else:
        print(f"the newest are {wanted}, with which the whole suite passed on {day}", file=sys.stderr)


if __name__ == "__main__":
    main()
