"""Two hosts that are namespaces of this machine, and a cable between them that is slow, and can be cut.

Nothing of them outlives the process that made them, however it ends: a host is a process that reads a pipe, with all
that was started in its namespaces, and the ends of a cable belong to whoever holds them open.
"""

from __future__ import annotations

import fcntl
import functools
import heapq
import os
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

NAMES = ("one", "two")
"""What the hosts call themselves and each other."""
ADDRESSES = ("10.77.0.1", "10.77.0.2")
FILES = {
    "hosts": "".join(f"{address} {name}\n" for address, name in zip(ADDRESSES, NAMES, strict=True))
    + "127.0.0.1 localhost\n",
    "nsswitch.conf": "hosts: files\n",
}
"""What /etc says there: there is no server that knows names, and nobody waits for one."""
_DEVICE = b"cable%d"
"""The kernel puts a free number there."""
_PACKET = 9000
_TUNSETIFF, _TUN, _NO_HEADER = 0x400454CA, 0x0001, 0x1000
_SETTLING = 10.0


class Host:
    """Namespaces of its own for the network, processes, mounts and the name.

    Args:
        name: Its name.
        folder: Has `FILES`.
    """

    def __init__(self, name: str, folder: Path) -> None:
        files = " && ".join(f"mount --bind {folder / each} /etc/{each}" for each in FILES)
        first = f"{files} && hostname {name} && ip link set lo up && echo ready && exec cat"
        spaces = ["unshare", "--net", "--pid", "--mount", "--uts", "--fork", "--kill-child", "--mount-proc"]
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self._started: list[subprocess.Popen[Any]] = []
        self.name, self._process = name, subprocess.Popen([*spaces, "sh", "-c", first], **pipes)
        if self._process.stdout.readline() != b"ready\n":
            raise OSError(f"no namespaces can be made here: {self._process.communicate()[1].decode().strip()}")
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        self._first = int(children.read_text().split()[0])

    def command(self, *words: str) -> list[str]:
        """What runs `words` there."""
        return ["nsenter", f"--target={self._first}", "--net", "--pid", "--mount", "--uts", "--", *words]

    def start(self, *words: str, **options: Any) -> subprocess.Popen[Any]:
        """Start a command there, which ends with this host at the latest."""
        self._started.append(subprocess.Popen(self.command(*words), **options))
        return self._started[-1]

    def run(self, *words: str) -> None:
        """Run a command there that ends at once."""
        subprocess.run(self.command(*words), check=True, capture_output=True)

    def plug(self, device: str, address: str) -> None:
        """Take one end of a cable."""
        subprocess.run(["ip", "link", "set", device, "netns", str(self._first)], check=True, capture_output=True)
        self.run("ip", "address", "add", f"{address}/24", "dev", device)
        self.run("ip", "link", "set", device, "mtu", str(_PACKET), "up")

    @property
    def processes(self) -> dict[int, str]:
        """Number outside of the namespaces -> command line, of all that run there but the first."""
        space, found = Path(f"/proc/{self._first}/ns/pid").readlink(), {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if (folder / "ns/pid").readlink() == space and int(folder.name) != self._first:
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ").strip()
            except OSError:  # it has just ended
                continue
        return {pid: line for pid, line in found.items() if line}  # those that ended and wait for a parent have none

    def close(self) -> None:
        """End it, with all that runs there."""
        self._process.communicate()
        for each in self._started:
            each.communicate()


class Cable:
    """Carries packets between two network devices, each after a while and no more at a time than fits in.

    Args:
        latency: Seconds from one end to the other.
        bandwidth: Bytes a second, in each direction.
    """

    def __init__(self, latency: float, bandwidth: float) -> None:
        self._latency, self._bandwidth, self.is_cut = latency, bandwidth, False
        self.carried = 0
        """Bytes so far, in both directions."""
        opened = [_open() for _ in range(2)]
        self._ends, self.devices = [end for end, _ in opened], [device for _, device in opened]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True, name="cable")
        self._thread.start()

    def _carry(self) -> None:
        free, under_way = [0.0, 0.0], []
        while not self._is_over.is_set():
            wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else 0.1
            ready, _, _ = select.select(self._ends, [], [], min(wait, 0.1))
            for source in ready:
                packet, end = _read(source), self._ends.index(source)
                free[end] = max(free[end], time.monotonic()) + len(packet) / self._bandwidth
                if not self.is_cut:
                    heapq.heappush(under_way, (free[end] + self._latency, 1 - end, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, end, packet = heapq.heappop(under_way)
                self._write(end, packet)

    def _write(self, end: int, packet: bytes) -> None:
        if packet and not self.is_cut:
            self.carried += len(packet)
            try:
                os.write(self._ends[end], packet)
            except OSError:  # the device there is not up yet
                return

    def close(self) -> None:
        """Take both ends out."""
        self._is_over.set()
        self._thread.join()
        for end in self._ends:
            os.close(end)


def _open() -> tuple[int, str]:
    """A network device: what holds it open, and its name."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        made = fcntl.ioctl(end, _TUNSETIFF, struct.pack("40s", struct.pack("16sH", _DEVICE, _TUN | _NO_HEADER)))
    except OSError:
        os.close(end)
        raise
    return end, made[:16].rstrip(b"\0").decode()


def _read(end: int) -> bytes:
    try:
        return os.read(end, 2 * _PACKET)
    except OSError:  # not up yet
        return b""


@contextmanager
def two_hosts(folder: Path, *, latency: float, bandwidth: float) -> Iterator[tuple[Sequence[Host], Cable]]:
    """Two hosts with a cable between them, which are gone in the end.

    Args:
        folder: For what they need of files.
        latency: Of the cable.
        bandwidth: Of the cable.

    Raises:
        OSError: If this process may not make them.
    """
    for name, text in FILES.items():
        (folder / name).write_text(text)
    with ExitStack() as made:
        cable = Cable(latency, bandwidth)
        made.callback(cable.close)
        found = []
        for name, address, device in zip(NAMES, ADDRESSES, cable.devices, strict=True):
            host = Host(name, folder)
            made.callback(host.close)
            found.append(host)
            host.plug(device, address)
        yield found, cable


@functools.cache
def why_not(folder: Path) -> str:
    """Why this process may not make two hosts; empty if it may."""
    try:
        with two_hosts(folder, latency=0.0, bandwidth=1e9):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{error} {getattr(error, 'stderr', b'').decode()}".strip()
