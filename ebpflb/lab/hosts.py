# SPDX-License-Identifier: Apache-2.0
"""Hosts made of namespaces and cgroups; a Lab removes all that it has created.

A node is a network namespace with an uplink to the lab's router (see ``router``) and a pod network
(see ``cni``); a pod is a namespace in it; an outside host is a host beyond the router. All
processes of a node and its pods are in one cgroup, to which the node's agent attaches its programs;
on a real node that is the root cgroup. The agents, and pods that are not ``hooked``, are in the
lab's cgroup. Namespaces are entered with nsenter: ``ip netns exec`` would hide cgroup v2 and the
bpffs.
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
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ebpflb.errors import NodeError
from ebpflb.kernel.attach.cgroup_links import cgroup_root
from ebpflb.lab import cni
from ebpflb.lab.netns import NETNS, Namespace, ip, within
from ebpflb.lab.router import NODES, OUTSIDE, Router


class Process(Protocol):
    """The part of ``subprocess.Popen`` that every process of a lab must have."""

    pid: int
    returncode: int | Any

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, number: int, /) -> None: ...

    def kill(self) -> None: ...


Kept = TypeVar("Kept", bound=Process)


def start(
    netns: str, cgroup: Path, command: Sequence[str], **options: object
) -> "subprocess.Popen[str]":
    """Start a process in a namespace and a cgroup."""
    words = [*within(cgroup), "nsenter", f"--net={NETNS / netns}", "--", *command]
    options = {"cwd": "/", **options}
    return subprocess.Popen(words, text=True, **options)  # type: ignore[call-overload,no-any-return]


@dataclass(frozen=True)
class Host(Namespace):
    """A node, a pod or an outside host: a namespace, and the cgroup that its processes are in."""

    name: str
    cgroup: Path
    v4: str
    v6: str

    def start(self, command: Sequence[str], **options: object) -> "subprocess.Popen[str]":
        """Start a process on this host; the caller or, at the latest, the Lab ends it."""
        return start(self.netns, self.cgroup, command, **options)

    def python(self, program: Path, *words: str, **options: object) -> "subprocess.Popen[str]":
        """Start a Python program without site-packages, which is faster."""
        return self.start([sys.executable, "-IS", str(program), *words], **options)


@dataclass(frozen=True)
class _Node:
    number: int
    cni: cni.Cni


class Lab:
    """Creates hosts and removes all of them, also the hosts of a lab that was killed."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.cgroup = cgroup_root() / prefix
        self.processes: list[Process] = []
        self._nodes: dict[Host, _Node] = {}

    def __enter__(self) -> "Lab":
        self.sweep()
        self.cgroup.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def router(self) -> Router:
        """The router that connects all nodes and outside hosts."""
        router = Router(f"{self.prefix}-router")
        router.build(self.cgroup)
        return router

    def node(self, name: str, number: int, network: cni.Cni | None = None) -> Host:
        """Create a node with the address 192.0.2.<number> and a pod network, by default with a
        bridge.
        """
        cgroup = self.cgroup / name
        cgroup.mkdir()
        host = self._host(name, cgroup, NODES.addresses(number))
        self.router.plug(host, NODES, number)
        host.sysctl("net.ipv4.ip_forward", 1)
        host.sysctl("net.ipv6.conf.all.forwarding", 1)
        node = self._nodes[host] = _Node(number, network or cni.Bridge())
        node.cni.prepare(host, number)
        return host

    def join(self, one: Host, other: Host) -> None:
        """Add routes between the pods of two nodes."""
        for here, there in ((one, other), (other, one)):
            node = self._nodes[here]
            node.cni.reach(here, node.number, self._nodes[there].number)

    def pod(self, node: Host, name: str, number: int, *, hooked: bool = True) -> Host:
        """Create a pod with the address .<number> of its node's pod network.

        Unless it is ``hooked``, the node's socket hooks do not see its sockets, as with a pod in a
        virtual machine.
        """
        place = self._nodes[node]
        cgroup = node.cgroup if hooked else self.cgroup
        host = self._host(name, cgroup, cni.addresses(place.number, number))
        place.cni.plug(node, place.number, host, number)
        return host

    def outside(self, name: str, number: int) -> Host:
        """Create a host beyond the router, with the address 198.51.100.<number>."""
        host = self._host(name, self.cgroup, OUTSIDE.addresses(number))
        self.router.plug(host, OUTSIDE, number)
        return host

    def keep(self, process: Kept) -> Kept:
        """Register a process, which ``close`` will end."""
        self.processes.append(process)
        return process

    def keep_ready(self, process: "subprocess.Popen[str]") -> "subprocess.Popen[str]":
        """Register a process; return when it has printed a line to its stdout, a pipe."""
        assert process.stdout is not None
        self.keep(process)
        process.stdout.readline()
        return process

    def close(self) -> None:
        """End all processes of the lab, then remove their namespaces and cgroups."""
        for process in self.processes:
            process.kill()
            process.wait()
        self.sweep()

    def sweep(self) -> None:
        """Remove everything of a lab with this prefix, also of a lab that was killed.

        The cgroups go first. A process that an interruption has left starting, unknown to this one,
        cannot enter them any more, and ends without having made anything.
        """
        for _ in range(200):  # a cgroup stays busy for a moment after its last process was killed
            _end(self.cgroup)
            if not self.cgroup.exists():
                break
            time.sleep(0.01)
        for netns in NETNS.glob(f"{self.prefix}-*") if NETNS.is_dir() else ():
            with suppress(NodeError):
                ip("netns", "delete", netns.name)

    def _host(self, name: str, cgroup: Path, addresses: tuple[str, str]) -> Host:
        host = Host(f"{self.prefix}-{name}", name, cgroup, *addresses)
        host.create(self.cgroup)
        return host


def _end(cgroup: Path) -> None:
    """Kill the processes in a cgroup and in those below it, and remove what is not busy."""
    for procs in cgroup.rglob("cgroup.procs"):
        for pid in procs.read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    try:
        for each in (*cgroup.glob("*/"), cgroup):
            each.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
