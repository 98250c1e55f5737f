# SPDX-License-Identifier: Apache-2.0
"""Hosts made of namespaces and cgroups; whatever a Lab makes goes with it.

A node is a network namespace with a bridge and an address of its own; a pod is a namespace with
a veth to that bridge. All processes of a node and its pods are in one cgroup, to which the node's
agent attaches, as a real node's are in its root cgroup; the agents are in the lab's own.
Namespaces are entered with nsenter: ``ip netns exec`` would hide cgroup v2 and the bpffs.
"""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ebpflb.datapath.links import cgroup_root
from ebpflb.errors import NodeError

NETNS = Path("/run/netns")


def ip(*words: str) -> None:
    """Runs ip(8). Raises NodeError with its words."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NodeError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def start(
    netns: str, cgroup: Path, command: Sequence[str], **options: object
) -> "subprocess.Popen[str]":
    """A process in a namespace and a cgroup.

    The shell enters the cgroup: a signal that came in the midst of a ``preexec_fn`` would be lost.
    """
    enter = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(cgroup / "cgroup.procs")]
    words = [*enter, "nsenter", f"--net={NETNS / netns}", "--", *command]
    return subprocess.Popen(words, text=True, **options)  # type: ignore[call-overload,no-any-return]


@dataclass(frozen=True)
class Host:
    """A node, a pod or an outside host: a namespace, and the cgroup that its processes are in."""

    name: str
    netns: str
    cgroup: Path
    v4: str
    v6: str

    def start(self, command: Sequence[str], **options: object) -> "subprocess.Popen[str]":
        """A process on this host; the caller ends it, or the Lab does."""
        return start(self.netns, self.cgroup, command, **options)

    def python(self, program: Path, *words: str, **options: object) -> "subprocess.Popen[str]":
        """A program of the standard library alone, without site-packages: quick to start."""
        return self.start([sys.executable, "-IS", str(program), *words], **options)


class Lab:
    """Makes hosts and takes them all away again, also those of a lab that was killed."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.cgroup = cgroup_root() / prefix
        self.processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "Lab":
        self.sweep()
        self.cgroup.mkdir()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def node(self, name: str, number: int) -> Host:
        """A node with the pod network 10.244.<number>.0/24 and the address 192.0.2.<number>.

        Its default gateway swallows everything, as a router does with what nobody answers.
        """
        cgroup = self.cgroup / name
        cgroup.mkdir()
        host = Host(name, f"{self.prefix}-{name}", cgroup, f"192.0.2.{number}", f"fd02::{number}")
        self._namespace(host)
        self._ip(host, "link add cni0 type bridge")
        self._addresses(host, "cni0", f"10.244.{number}.1/24", f"fd00:244:{number}::1/64")
        self._ip(host, "link add eth0 type bridge")
        self._addresses(host, "eth0", f"{host.v4}/24", f"{host.v6}/64")
        for gateway in ("192.0.2.254", "fd02::fe"):
            self._ip(host, f"neigh add {gateway} lladdr 02:00:00:00:00:fe dev eth0 nud permanent")
            self._ip(host, f"route add default via {gateway} dev eth0")
        return host

    def join(self, one: Host, other: Host) -> None:
        """A cable between two nodes, and routes to each other's pods."""
        cable = f"to-{one.name}"
        self._ip(one, f"link add to-{other.name} type veth peer name {cable} netns {other.netns}")
        for here, there in ((one, other), (other, one)):
            self._ip(here, f"link set to-{there.name} master eth0 up")
            number = there.v4.rsplit(".", 1)[1]
            self._ip(here, f"route add 10.244.{number}.0/24 via {there.v4}")
            self._ip(here, f"route add fd00:244:{number}::/64 via {there.v6}")
            self._forward(here)

    def pod(self, node: Host, name: str, number: int) -> Host:
        """A pod with the address .<number> of its node's pod network."""
        subnet = node.v4.rsplit(".", 1)[1]
        v4, v6 = f"10.244.{subnet}.{number}", f"fd00:244:{subnet}::{number}"
        host = Host(name, f"{self.prefix}-{name}", node.cgroup, v4, v6)
        self._namespace(host)
        veth = f"veth{number}"
        self._ip(node, f"link add {veth} type veth peer name eth0 netns {host.netns}")
        self._ip(node, f"link set {veth} master cni0 up")
        self._addresses(host, "eth0", f"{v4}/24", f"{v6}/64")
        self._ip(host, f"route add default via 10.244.{subnet}.1")
        self._ip(host, f"-6 route add default via fd00:244:{subnet}::1")
        return host

    def keep(self, process: "subprocess.Popen[str]") -> "subprocess.Popen[str]":
        """Ends the process with the lab."""
        self.processes.append(process)
        return process

    def close(self) -> None:
        """Ends every process that was started here, then removes what they were in."""
        for process in self.processes:
            process.kill()
            process.wait()
        self.sweep()

    def sweep(self) -> None:
        """Removes what a lab of this prefix made, be it this one or one that was killed."""
        for procs in self.cgroup.rglob("cgroup.procs"):
            for pid in procs.read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for netns in NETNS.glob(f"{self.prefix}-*") if NETNS.is_dir() else ():
            with suppress(NodeError):
                ip("netns", "delete", netns.name)
        for cgroup in (*self.cgroup.glob("*/"), self.cgroup):
            _remove(cgroup)

    def _namespace(self, host: Host) -> None:
        ip("netns", "add", host.netns)
        self._ip(host, "link set lo up")

    def _addresses(self, host: Host, device: str, v4: str, v6: str) -> None:
        self._ip(host, f"link set {device} up")
        self._ip(host, f"address add {v4} dev {device}")
        self._ip(host, f"address add {v6} dev {device} nodad")

    def _forward(self, host: Host) -> None:
        for switch in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
            enter = ["nsenter", f"--net={NETNS / host.netns}", "--", "tee"]
            command = [*enter, f"/proc/sys/net/{switch}"]
            subprocess.run(command, input=b"1", stdout=subprocess.DEVNULL, check=True)

    def _ip(self, host: Host, words: str) -> None:
        ip("-n", host.netns, *words.split())


def _remove(cgroup: Path) -> None:
    """A cgroup stays busy for a moment after its last process was killed."""
    for _ in range(200):
        with suppress(FileNotFoundError):
            try:
                cgroup.rmdir()
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                time.sleep(0.01)
                continue
        return
