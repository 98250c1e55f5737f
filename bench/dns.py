# SPDX-License-Identifier: Apache-2.0
"""What a DNS Service's endpoint that dies costs, amid many entries of conntrack.

    sudo .venv/bin/python -m bench.dns [--entries N] [--rounds K]

Conntrack has N entries of other clients of the Service, half of them with the endpoint that is
replaced in the next slice. The same moment this endpoint dies, and another Service's endpoint is
replaced. 100 clients ask on, each from its own port, 1,000 times a second together. In other rounds
the proxy restarts while they ask.

kube-proxy's side are its rules for nftables and its clean-up since 1.32: after the rules, and
before the next sync, it lists conntrack and deletes stale entries one at a time, each with its
answer. Only the kernel's part of that is measured: the list is not decoded, the requests are made
before. Its own time for both, nft's, and the second in which it gathers changes, come on top.
"""

import argparse
import multiprocessing
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import ip_address
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from subprocess import PIPE
from typing import NamedTuple, Protocol

from bench import kubeproxy
from bench.connect_lab import PROGRAM, Client, cpu_seconds
from bench.conntrack_filler import Served, empty, entered, fill, room_for
from bench.report import Lines, row_of
from bench.result import run_bench
from bench.services import CIDR, PORT, TARGET, NodePort
from bench.temporary_lab import print_step, temporary_lab
from ebpflb.kernel.netfilter import conntrack
from ebpflb.kernel.netlink import ACK, REQUEST
from ebpflb.lab import cni, manifests
from ebpflb.lab.agents import LabAgent, wait_until
from ebpflb.lab.hosts import Host, Lab
from ebpflb.model import services

PREFIX = "ebpflb-dns"
DNS, OTHER = "10.96.0.10", "10.96.0.11"
CLIENTS, PERIOD = 100, 0.001  # seconds between two queries
BEFORE, AFTER = 1.0, 4.0  # seconds of queries
LATE = 1.0  # seconds after which an answer counts as lost
QUERY = struct.Struct("!I")
PODS = cni.NETWORKS[0]

FORK = multiprocessing.get_context("fork")


def main() -> None:
    run_bench(__doc__, _measured, entries=200_000, rounds=5)


def _measured(wanted: argparse.Namespace) -> Lines:
    with room_for(wanted.entries):
        for name, made in (("ebpflb", Ebpflb), ("kube-proxy's rules", KubeProxy)):
            with temporary_lab(PREFIX) as (lab, folder, stack):
                it = DnsLab(lab, stack)
                proxy = made(lab, it, folder, stack)
                for what, act in (
                    ("an endpoint dies", proxy.change),
                    ("the proxy restarts", proxy.restart),
                ):
                    print_step(f"{name}: {what}")
                    found = [it.round(proxy, act, wanted.entries) for _ in range(wanted.rounds)]
                    yield from _rows(f"{name}, {wanted.entries:,} entries: {what}", found)


class Round(NamedTuple):
    """``stalled``: milliseconds until the other Service's new endpoint answers; ``cleaned``: until
    the stale entries are gone; both 0 in a restart. ``cpu``: the proxy's milliseconds of processor
    time.
    """

    lost: float  # answers
    stalled: float
    cleaned: float
    cpu: float


def _rows(heading: str, rounds: list[Round]) -> Lines:
    lost, stalled, cleaned, cpu = zip(*rounds, strict=True)
    yield heading
    yield row_of("answers lost", lost, "", note=f"at most {max(lost):.0f}")
    if any(stalled):
        note = f"at most {max(stalled):.0f} ms"
        yield row_of("another Service's new endpoint answers", stalled, "ms", note=note)
        yield row_of("the stale entries are gone", cleaned, "ms")
    yield row_of("processor time", cpu, "ms")


class Proxy(Protocol):
    """What serves ``DnsLab.services``; ``change`` and ``restart`` return at once."""

    def prepare(self, removed: str) -> None: ...
    def change(self) -> None: ...
    def restart(self) -> None: ...
    def cpu(self) -> float: ...


class DnsLab:
    """A node, its pods, and who asks them."""

    def __init__(self, lab: Lab, stack: ExitStack) -> None:
        self.node = lab.node("node", 1)
        self._asking = lab.pod(self.node, "asking", 2, hooked=False)
        self._other = Client(lab, lab.pod(self.node, "client", 3))
        self._stays, *self._turns = (lab.pod(self.node, f"dns-{i}", 10 + i) for i in range(3))
        self._others = [lab.pod(self.node, f"web-{i}", 20 + i, hooked=False) for i in range(2)]
        for pod in self._others:
            lab.keep_ready(pod.python(PROGRAM, "serve", pod.name, str(TARGET), stdout=PIPE))
        servers = [_server(pod) for pod in (self._stays, *self._turns)]
        self._dead = FORK.Value("i", -1)
        stack.enter_context(_forked(_answer, servers, self._dead))

    @property
    def services(self) -> tuple[NodePort, NodePort]:
        """The DNS Service and the other one."""
        dns = tuple((each.v4, self.node.name) for each in (self._stays, self._turns[0]))
        other = ((self._others[0].v4, self.node.name),)
        return NodePort("dns", DNS, 30053, ("udp",), dns), NodePort(
            "web", OTHER, 30080, ("tcp",), other
        )

    def round(self, proxy: Proxy, act: Callable[[], None], entries: int) -> Round:
        """Fill conntrack, ask, and let the proxy act."""
        self._fill(entries)
        with entered(self._asking):
            sockets = [_client() for _ in range(CLIENTS)]
        ended, (result, sending) = FORK.Event(), FORK.Pipe(duplex=False)
        with _forked(_ask, sockets, ended, sending):
            time.sleep(BEFORE)
            proxy.prepare(self._turns[0].v4)
            used = proxy.cpu()
            stalled = cleaned = 0.0
            if act == proxy.change:
                stalled, cleaned = self._replace(act, entries)
            else:
                act()
            time.sleep(AFTER)
            ended.set()
            lost = result.recv()
        for each in sockets:
            each.close()
        self._dead.value = -1
        return Round(lost, stalled, cleaned, 1e3 * (proxy.cpu() - used))

    def _replace(self, act: Callable[[], None], entries: int) -> tuple[float, float]:
        """Let the second DNS endpoint die, and replace it and the other Service's one.

        Return the milliseconds until the other Service's new endpoint answers, and until the stale
        entries are gone.
        """
        self._others.reverse()
        self._other.begin("wait_for", (OTHER, PORT), self._others[0].name)
        self._other.answer()
        self._dead.value = int(self._turns[0].name[-1])
        self._turns.reverse()
        begun = time.monotonic_ns()
        act()
        stalled = self._other.answer() - begun
        with entered(self.node):
            wait_until("stale entries are gone", lambda: conntrack.count() < 0.6 * entries)
        return stalled / 1e6, (time.monotonic_ns() - begun) / 1e6

    def _fill(self, entries: int) -> None:
        half = entries // 2
        with entered(self.node):
            empty()
            for first, pod in ((0, self._stays), (half, self._turns[0])):
                there = ip_address(pod.v4), TARGET
                fill(range(first, first + half), Served((ip_address(DNS), PORT), there))


def _server(pod: Host) -> socket.socket:
    with entered(pod):
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind(("0.0.0.0", TARGET))
    return made


def _client() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.connect((DNS, PORT))
    made.setblocking(False)
    return made


@contextmanager
def _forked(work: Callable[..., None], *arguments: object) -> Iterator[None]:
    process = FORK.Process(target=work, args=arguments, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _answer(servers: list[socket.socket], dead: "Synchronized[int]") -> None:
    """Send each query back, but nothing from the server that is dead."""
    with selectors.DefaultSelector() as waiting:
        for number, each in enumerate(servers):
            waiting.register(each, selectors.EVENT_READ, number)
        while True:
            for key, _ in waiting.select():
                query, client = servers[key.data].recvfrom(QUERY.size)
                if key.data != dead.value:
                    servers[key.data].sendto(query, client)


def _ask(clients: list[socket.socket], ended: Event, result: Connection) -> None:
    """Send a query every PERIOD; then send the number of those without an answer."""
    sent = answered = 0
    begun = time.monotonic()
    while not ended.is_set():
        if time.monotonic() - begun < sent * PERIOD:
            time.sleep(PERIOD / 2)
            continue
        client = clients[sent % CLIENTS]
        answered += _answers(client)
        client.send(QUERY.pack(sent))
        sent += 1
    time.sleep(LATE)
    result.send(sent - answered - sum(map(_answers, clients)))


def _answers(client: socket.socket) -> int:
    """Return the number of answers since the last call."""
    found = 0
    with suppress(BlockingIOError):
        while client.recv(QUERY.size):
            found += 1
    return found


class Ebpflb:
    """The agent, with the Services as manifests."""

    def __init__(self, lab: Lab, it: DnsLab, folder: Path, stack: ExitStack) -> None:
        self._it, self._ended = it, 0.0
        self._agent = LabAgent(lab, it.node, folder, "--cluster-cidr", PODS)
        stack.callback(self._agent.close)
        items = [manifests.service_cidr(CIDR), manifests.node(it.node.name, it.node.v4)]
        manifests.write(self._agent.manifests / "node.yaml", items)
        self.change()
        self._agent.start()

    def prepare(self, removed: str) -> None:
        """Nothing is made before."""

    def change(self) -> None:
        for each in self._it.services:
            manifests.write(self._agent.manifests / f"{each.name}.yaml", each.manifests())

    def restart(self) -> None:
        self._ended += self._used()
        self._agent.stop()
        self.change()
        self._agent.begin()

    def cpu(self) -> float:
        return self._ended + self._used()

    def _used(self) -> float:
        assert self._agent.process is not None
        return cpu_seconds(self._agent.process.pid)


class KubeProxy:
    """kube-proxy's rules and clean-up, in its order, by a thread."""

    def __init__(self, _: Lab, it: DnsLab, __: Path, stack: ExitStack) -> None:
        self._it, self._used = it, 0.0
        self._stale = list[bytes]()
        self._write_all()
        self._sync = threading.Thread()
        self._sync.start()
        stack.callback(lambda: self._sync.join())

    def prepare(self, removed: str) -> None:
        """Make the requests to delete the entries of an endpoint that is removed next."""
        address = ip_address(removed)
        with entered(self._it.node):
            found = conntrack.connections(
                lambda *_: True, services.Protocol.UDP, endpoint=(address, TARGET)
            )
            self._stale = [
                conntrack.request(conntrack.DELETE, REQUEST | ACK, each.identity, socket.AF_INET)
                for each in found
            ]

    def change(self) -> None:
        self._begin(self._write_changes)

    def restart(self) -> None:
        self._stale = []  # the endpoints serve on
        self._begin(self._write_all)

    def cpu(self) -> float:
        self._sync.join()
        return self._used

    def _begin(self, work: Callable[[], None]) -> None:
        self._sync.join()
        self._sync = threading.Thread(target=work)
        self._sync.start()

    def _write_changes(self) -> None:
        node, (dns, other) = self._it.node, self._it.services
        node.nft(kubeproxy.nft_change(dns, "udp"))
        self._clean()
        node.nft(kubeproxy.nft_change(other, "tcp"))

    def _write_all(self) -> None:
        node = self._it.node
        rules = kubeproxy.nft(list(self._it.services), node.name, node.v4, PODS)
        node.nft(f"add table ip kube-proxy\ndelete table ip kube-proxy\n{rules}")
        self._clean()

    def _clean(self) -> None:
        with entered(self._it.node):
            begun = time.thread_time()
            for _ in conntrack.dump(b"", socket.AF_INET):
                pass
            with conntrack.open_ctnetlink() as kernel:
                for each in self._stale:
                    conntrack.asked(kernel, [each])
            self._used += time.thread_time() - begun


if __name__ == "__main__":
    main()
