# SPDX-License-Identifier: Apache-2.0
"""For how long a removed endpoint still gets datagrams, amid many entries of conntrack.

    sudo .venv/bin/python -m bench.moved_datagrams [--entries N] [--rounds K]

A client outside sends a datagram each millisecond to a NodePort of the engine netfilter. Its
endpoint is replaced by another pod, and the last datagram that came to the removed one tells the
time since the new EndpointSlice was written. Conntrack has 1, 100,000 and N more entries: of other
connections, or of clients of the same Service whose endpoint stays. At last the flow is one that
the programs do not know, as one that a kube-proxy opened.
"""

import argparse
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address
from pathlib import Path

from bench import targets
from bench.conntrack_filler import Served, amid, entered, forge, room_for
from bench.report import Lines, row_of
from bench.result import run_bench
from bench.temporary_lab import beside, print_step, temporary_lab
from ebpflb.entries.flows import Ends
from ebpflb.kernel.netfilter import conntrack
from ebpflb.lab import manifests
from ebpflb.lab.agents import LabAgent, wait_until
from ebpflb.lab.hosts import Host, Lab
from ebpflb.model.services import Protocol

PREFIX = "ebpflb-moved"
NODEPORT, PORT, TARGET = 30080, 80, 8080
MS = 1e6
PERIOD = 0.001  # seconds between datagrams
AFTERWARDS = 0.1  # seconds in which the removed endpoint may get more
SO_RCVBUFFORCE, RECEIVE_BUFFER = 33, 1 << 23
STAMP = struct.Struct("Q")  # CLOCK_MONOTONIC, in nanoseconds


def main() -> None:
    run_bench(__doc__, _measured, entries=1_000_000, rounds=20)


def _measured(wanted: argparse.Namespace) -> Lines:
    with temporary_lab(PREFIX) as (lab, folder, stack), room_for(wanted.entries):
        cluster = MovedLab(lab, folder, stack)
        for same, known in ((False, True), (True, True), (False, False)):
            of_whom = "of the same Service" if same else "of others"
            flow = "" if known else ", of a flow that the programs do not know"
            yield f"amid entries {of_whom}: the last datagram to a removed endpoint{flow}"
            for v6 in (False, True):
                for size in sorted({1, 100_000, wanted.entries}):
                    print_step(f"{size} entries {of_whom}, {'IPv6' if v6 else 'IPv4'}{flow}")
                    served = cluster.staying(v6=v6) if same else None
                    with amid(cluster.node, size, served):
                        took = [cluster.move(v6=v6, known=known) for _ in range(wanted.rounds)]
                    target = targets.LAST_DATAGRAM if known and size == 100_000 else None
                    what = "IPv6" if v6 else "IPv4"
                    note = f"at most {max(took):.0f} ms"
                    yield row_of(what, took, "ms", target, note, at=size, axis="entries")


class MovedLab:
    """A node with three pods: one stays an endpoint, the others are in turns the second one."""

    def __init__(self, lab: Lab, folder: Path, stack: ExitStack) -> None:
        self.node, self.outside = lab.node("node", 1), lab.outside("outside", 1)
        self.stays, *self.turns = (lab.pod(self.node, f"pod-{i}", 10 + i) for i in range(3))
        self.servers = {
            (pod, v6): stack.enter_context(self._server(pod, v6=v6))
            for pod in (self.stays, *self.turns)
            for v6 in (False, True)
        }
        self.agent = LabAgent(lab, self.node, folder, "--packet-path=netfilter")
        stack.callback(self.agent.close)
        self._write()
        self.agent.start()

    def _server(self, pod: Host, *, v6: bool) -> socket.socket:
        made = _open(pod, v6=v6)
        made.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER)
        if v6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(("::" if v6 else "0.0.0.0", TARGET))
        made.setblocking(False)
        return made

    def _write(self) -> None:
        """Write the Service with its current endpoints."""
        port = {"name": "udp", "protocol": "UDP", "port": TARGET}
        frontend = {**port, "port": PORT, "nodePort": NODEPORT}
        ips = ["10.96.0.10", "fd00:96::10"]
        objects = [manifests.service("web", ips, [frontend], type="NodePort")]
        for family in ("IPv4", "IPv6"):
            endpoints = [
                manifests.endpoint(
                    pod.v6 if family == "IPv6" else pod.v4, node=self.node.name, target=pod.name
                )
                for pod in (self.stays, self.turns[0])
            ]
            objects.append(manifests.endpoint_slice("web", family, endpoints, [port]))
        node = manifests.node(self.node.name, self.node.v4, self.node.v6)
        manifests.replace(self.agent.manifests / "all.yaml", manifests.text([node, *objects]))

    def staying(self, *, v6: bool) -> Served:
        """Add flows to the NodePort that no move ends."""
        node, pod = (self.node.v6, self.stays.v6) if v6 else (self.node.v4, self.stays.v4)
        return Served((ip_address(node), NODEPORT), (ip_address(pod), TARGET))

    def move(self, *, v6: bool, known: bool) -> float:
        """Return the milliseconds from the new slice to the removed endpoint's last datagram."""
        removed = self.servers[self.turns[0], v6]
        opened = self._client_of(removed, v6=v6) if known else self._unknown_client(v6=v6)
        with opened as client, _sending(client):
            self.turns.reverse()
            begun = time.monotonic_ns()
            self._write()
            others = [self.servers[pod, v6] for pod in (self.stays, self.turns[0])]
            wait_until("the client is moved", lambda: any(map(_newest, others)))
            last = begun
            while newest := _newest(removed):  # until none has come for a while
                last = max(last, newest)
                time.sleep(AFTERWARDS)
        for server in self.servers.values():
            _newest(server)
        return (last - begun) / MS

    def _unknown_client(self, *, v6: bool) -> socket.socket:
        """Return a socket whose flow conntrack leads to the removed endpoint."""
        client = self._client_of(self.servers[self.stays, v6], v6=v6)
        source, destination = client.getsockname(), client.getpeername()
        addresses = ip_address(source[0]), ip_address(destination[0])
        flow = Ends(*addresses, source[1], destination[1])
        pod = ip_address(self.turns[0].v6 if v6 else self.turns[0].v4)
        with entered(self.node):
            conntrack.delete(conntrack.find([(Protocol.UDP, flow)]))
            forge(Protocol.UDP, flow, (pod, TARGET))
        return client

    def _client_of(self, server: socket.socket, *, v6: bool) -> socket.socket:
        """Return a socket whose flow has this endpoint."""
        while True:
            client = _open(self.outside, v6=v6)
            client.connect((self.node.v6 if v6 else self.node.v4, NODEPORT))
            client.send(STAMP.pack(time.monotonic_ns()))
            time.sleep(AFTERWARDS)
            reached = [each for each in self.servers.values() if _newest(each)]
            if reached == [server]:
                return client
            client.close()


def _open(host: Host, *, v6: bool) -> socket.socket:
    with entered(host):
        return socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, socket.SOCK_DGRAM)


@contextmanager
def _sending(client: socket.socket) -> Iterator[None]:
    """Let a thread send a datagram with its time every PERIOD."""

    def send(ended: threading.Event) -> None:
        while not ended.wait(PERIOD):
            client.send(STAMP.pack(time.monotonic_ns()))

    with beside(send):
        yield


def _newest(server: socket.socket) -> int:
    """Return when the last datagram received since the last call was sent; 0 if none."""
    newest = 0
    while True:
        try:
            newest = STAMP.unpack(server.recv(STAMP.size))[0]
        except BlockingIOError:
            return newest


if __name__ == "__main__":
    main()
