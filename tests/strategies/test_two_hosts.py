"""Two hosts with a slow cable between them, which is cut in the middle of a run: it ends, and goes on later."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.hosts import Cable, Host, two_hosts, why_not
from tests.jobs.killed import BATCH, FINAL, NUM_SAMPLES, history, notes, train

ROOT = Path(__file__).parents[2]
DEADLINE = 400.0
"""Seconds for each part, of which a machine with nothing else to do needs fewer than 20."""
ENDING = 120.0
"""Seconds from the cut to the end of the last process."""
HANG_TIMEOUT = 8
EPOCHS = 2
LATENCY, BANDWIDTH = 0.005, 25e6
"""Of an office's network, with a machine in another town."""


@pytest.fixture
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sequence[Host], Cable]]:
    if why := why_not(tmp_path_factory.getbasetemp()):
        pytest.skip(f"this process may not make network namespaces, or has no /dev/net/tun: {why}")
    with two_hosts(tmp_path_factory.mktemp("etc"), latency=LATENCY, bandwidth=BANDWIDTH) as made:
        yield made


SERVER = """
import socket
server = socket.create_server(("", 5000))
print("there", flush=True)
connection, _ = server.accept()
connection.sendall(connection.recv(1))
left = {size}
while left and (chunk := connection.recv(left)):
    left -= len(chunk)
connection.sendall(b".")
connection.recv(1)
"""
CLIENT = """
import socket, time
connection = socket.create_connection(("one", 5000))
began = time.monotonic()
connection.sendall(b".")
connection.recv(1)
told = time.monotonic()
connection.sendall(bytes({size}))
connection.recv(1)
print(told - began, time.monotonic() - told)
"""


def test_a_cable_is_as_slow_as_it_is_to_be(pair: tuple[Sequence[Host], Cable]) -> None:
    (one, two), cable = pair
    size = 5_000_000
    quiet: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    server = one.start(sys.executable, "-Sc", SERVER.format(size=size), **quiet)
    assert server.stdout is not None
    assert server.stdout.readline() == "there\n"
    client = subprocess.run(two.command(sys.executable, "-Sc", CLIENT.format(size=size)), timeout=60, **quiet)
    there_and_back, sending = map(float, client.stdout.split())
    server.communicate(timeout=60)
    assert there_and_back >= 2 * LATENCY
    assert sending >= size / BANDWIDTH
    assert cable.carried > size


def start(hosts: Sequence[Host], folder: Path, name: str, ranks: int, port: int) -> list[subprocess.Popen[bytes]]:
    """An agent of torchrun on each host."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={ranks}"]
    job = ["-m", "tests.jobs.killed", str(folder), name, f"--epochs={EPOCHS}", "--step-time=0.05"]
    batch = [f"--batch-size={BATCH // 2 // ranks}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    agents = []
    for number, host in enumerate(hosts):
        # Meeting in a store of torchrun (c10d) instead, the agent that is cut off tells that of its end, which takes
        # until the system gives up on the connection.
        meeting = [f"--node-rank={number}", "--master-addr=one", f"--master-port={port}"]
        with (folder / f"said-{host.name}").open("ab") as out:
            command = [*torchrun, *meeting, "--monitor-interval=0.1", *job, *batch]
            agents.append(host.start(*command, env=environment, cwd=folder, stdout=out, stderr=subprocess.STDOUT))
    return agents


def said(folder: Path, name: str = "*") -> str:
    return "".join(path.read_text()[-6000:] for path in sorted(folder.glob(f"said-{name}")))


def whole(folder: str, name: str, ranks: int, batch_size: int) -> None:
    """The same run on one host, which nobody cuts."""
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(ranks)):
        train(folder, name, EPOCHS, 1, 0.0, batch_size)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "per_host"), [("pp_custom:pipeline=2", 1), ("hsdp_custom", 2)])
def test_a_run_over_two_hosts_survives_a_cut(
    pair: tuple[Sequence[Host], Cable], ranks: Any, tmp_path: Path, name: str, per_host: int
) -> None:
    hosts, cable = pair
    watched = f"{name}{',' if ':' in name else ':'}hang_timeout={HANG_TIMEOUT}"
    agents = start(hosts, tmp_path, watched, per_host, 29500)
    end = time.monotonic() + DEADLINE
    while not any(step >= 3 for _, step, *_ in notes(tmp_path, "read")):
        assert time.monotonic() < end, said(tmp_path)
        assert all(agent.poll() is None for agent in agents), said(tmp_path)
        time.sleep(0.01)
    cable.is_cut = True
    cut = time.monotonic()
    for agent in agents:
        agent.wait(max(0.0, cut + ENDING - time.monotonic()))
    assert [agent.returncode for agent in agents] == [1, 1], said(tmp_path)
    assert [host.processes for host in hosts] == [{}, {}]
    assert "this run hangs: no rank has moved" in said(tmp_path, "one")
    assert "or its machine cannot be reached" in said(tmp_path, "one")
    assert f"rank {per_host} is cut off: the store in which ranks meet" in said(tmp_path, "two")

    cable.is_cut = False
    for agent in start(hosts, tmp_path, watched, per_host, 29600):
        assert agent.wait(DEADLINE) == 0, said(tmp_path)
    assert [host.processes for host in hosts] == [{}, {}]
    starts = {step for _, step, *_ in notes(tmp_path, "start")}
    assert len(starts) == 2  # from the beginning, and from a checkpoint
    # Stages read the same samples.
    counts = Counter(dict.fromkeys(range(NUM_SAMPLES), 2 if name.startswith("pp") else 1))
    assert history(tmp_path) == dict.fromkeys(range(EPOCHS), counts)
    (reference := tmp_path / "whole").mkdir()
    ranks(2 * per_host).run(whole, str(reference), name, 2 * per_host, BATCH // 2 // per_host)
    ours, theirs = (torch.load(folder / FINAL, weights_only=True) for folder in (tmp_path, reference))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
