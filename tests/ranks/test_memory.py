"""What the kernel and torch say about memory, and what containers make of it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from lightning_parallel.ranks import memory
from lightning_parallel.ranks.memory import (
    free_memory,
    headroom,
    host_memory,
    peak_memory,
    release_cached,
    reset_peak_memory,
    usable_memory,
)

CPU = torch.device("cpu")
GIB = 2**30
MIB = 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's files are those of Linux")


def written(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """64 GiB, 40 of them available, and no control groups."""
    written(tmp_path / "proc", meminfo=f"MemTotal:  {64 * 2**20} kB\nMemAvailable:  {40 * 2**20} kB")
    written(tmp_path / "proc" / "self", cgroup="0::/", status="Name: python\nVmHWM:\t  2048 kB\nThreads: 3")
    monkeypatch.setattr(memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path / "cgroup")
    sysconf = {"SC_PHYS_PAGES": 64 * GIB // memory._PAGE, "SC_AVPHYS_PAGES": 30 * GIB // memory._PAGE}
    names = dict.fromkeys(sysconf, 0)
    monkeypatch.setattr(memory, "os", SimpleNamespace(sysconf=sysconf.__getitem__, sysconf_names=names))
    return tmp_path


def test_a_machine_without_a_container(machine: Path) -> None:
    assert host_memory() == 64 * GIB
    assert free_memory(CPU) == 40 * GIB
    written(machine / "proc", meminfo="MemTotal:  1 kB")  # before Linux 3.14, and elsewhere
    assert free_memory(CPU) == 30 * GIB


def test_a_container_of_version_2(machine: Path) -> None:
    root = machine / "cgroup"
    written(root, memory__max="max", memory__current=str(9 * GIB))
    assert (host_memory(), free_memory(CPU)) == (64 * GIB, 40 * GIB)
    written(root, memory__max=str(16 * GIB))
    assert (host_memory(), free_memory(CPU)) == (16 * GIB, 7 * GIB)
    written(root, memory__stat=f"anon 5\ninactive_file {2 * GIB}\nactive_file 7")  # files that the kernel drops first
    assert free_memory(CPU) == 9 * GIB
    written(root, memory__current=str(20 * GIB))
    assert free_memory(CPU) == 0


def test_a_container_of_version_1(machine: Path) -> None:
    root = machine / "cgroup" / "memory"
    written(machine / "proc" / "self", cgroup="5:cpu,cpuacct:/jobs\n4:memory:/jobs/7\n0::/")
    limit, used = "memory__limit_in_bytes", "memory__usage_in_bytes"
    written(root, **{limit: str(2**63 - 4096), used: str(3 * GIB)})  # its way to say that there is none
    assert (host_memory(), free_memory(CPU)) == (64 * GIB, 40 * GIB)
    written(root / "jobs" / "7", **{limit: str(8 * GIB), used: str(3 * GIB), "memory__stat": "cache 3"})
    assert (host_memory(), free_memory(CPU)) == (8 * GIB, 5 * GIB)


def test_groups_on_the_way_have_a_say(machine: Path) -> None:
    """A batch system limits the job, and the process lives in a step of it."""
    written(machine / "proc" / "self", cgroup="0::/slurm/job/step")
    root = machine / "cgroup" / "slurm"
    written(root / "job" / "step", memory__max="max", memory__current=str(GIB))
    written(root / "job", memory__max=str(12 * GIB), memory__current=str(2 * GIB))
    written(root, memory__max=str(32 * GIB), memory__current=str(31 * GIB))
    assert (host_memory(), free_memory(CPU)) == (12 * GIB, GIB)


def test_the_peak_of_the_kernels_table(machine: Path) -> None:
    assert peak_memory(CPU) == 2 * MIB
    assert reset_peak_memory(CPU)
    assert (machine / "proc" / "self" / "clear_refs").read_text() == "5"


def test_without_the_kernels_table(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_PROC", machine / "nowhere")
    assert not reset_peak_memory(CPU)
    monkeypatch.setattr(memory, "resource", SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda _: USAGE))
    for platform, unit in (("linux", 1024), ("darwin", 1)):
        monkeypatch.setattr(memory, "sys", SimpleNamespace(platform=platform))
        assert peak_memory(CPU) == 3000 * unit


USAGE = SimpleNamespace(ru_maxrss=3000)


@linux
def test_this_machine() -> None:
    assert GIB // 8 < host_memory() <= 2**46
    assert 0 < free_memory(CPU) <= host_memory()


@linux
def test_the_peak_of_this_process() -> None:
    if not reset_peak_memory(CPU):
        pytest.skip("this sandbox does not let the high-water mark be reset")
    before = peak_memory(CPU)
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    assert peak_memory(CPU) >= before + 60 * MIB
    del block
    assert peak_memory(CPU) >= before + 60 * MIB
    assert reset_peak_memory(CPU)
    assert peak_memory(CPU) < before + 30 * MIB


def test_accelerators_are_asked_for_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not run on a device: which of torch's numbers make up ours, on CUDA and elsewhere."""
    answers = {
        "get_memory_info": (5 * GIB, 80 * GIB),
        "memory_reserved": 3 * GIB,
        "memory_allocated": GIB,
        "max_memory_allocated": 2 * GIB,
        "memory_stats": {"allocated_bytes.all.current": GIB},
        "reset_peak_memory_stats": None,
    }
    asked: list[tuple[str, torch.device]] = []
    for name, answer in answers.items():
        monkeypatch.setattr(torch.accelerator, name, lambda d, n=name, a=answer: (asked.append((n, d)), a)[1])
    for device in (torch.device("cuda", 1), torch.device("xpu", 1)):
        asked.clear()
        assert free_memory(device) == 7 * GIB
        assert peak_memory(device) == 2 * GIB
        assert headroom(device) == 6 * GIB
        assert reset_peak_memory(device)
        assert {name for name, _ in asked} == set(answers)
        assert {given for _, given in asked} == {device}
    fractions = [("cuda", 0.05, 4 * GIB), ("cuda", 1.0, 8 * GIB), ("mtia", None, 8 * GIB)]  # the last knows of none
    for kind, fraction, expected in fractions:
        if fraction is not None:
            module = torch.get_device_module(kind)
            monkeypatch.setattr(module, "get_per_process_memory_fraction", lambda d, f=fraction: f)
        assert usable_memory(torch.device(kind, 0), num_processes=4) == expected


def test_what_was_never_used_has_no_peak_to_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 and 2.13 make an error of it."""
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device: {})
    assert reset_peak_memory(torch.device("cuda", 0))


def test_a_process_may_use_its_share_of_the_host(machine: Path) -> None:
    assert usable_memory(CPU, num_processes=4) == 16 * GIB
    assert usable_memory(torch.device("mps"), num_processes=0) == 64 * GIB


def test_memory_is_released_where_there_is_any() -> None:
    with mock.patch("torch.get_device_module", return_value=mock.Mock(spec=["empty_cache"])) as of:
        release_cached(torch.device("cpu"))
        of.assert_not_called()
        release_cached(torch.device("cuda"))
        of.return_value.empty_cache.assert_called_once_with()
    with mock.patch("torch.get_device_module", return_value=mock.Mock(spec=[])):
        release_cached(torch.device("xpu"))
