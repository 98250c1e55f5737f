# SPDX-License-Identifier: Apache-2.0
"""Flows in the kernel's flowtable, beside pods that come and go: in a kernel that has it.

    python -m vagrant.kernels count 6.12 'python -m bench.churn [--rounds K]'

A client outside asks a pod through a NodePort, by TCP and by UDP, every PAUSE seconds. In each
round the node is left alone for PERIOD seconds, then for as long 20 pods a minute come and go, each
with a device at the bridge and an endpoint of the Service that is asked. A counter in FORWARD tells
how many packets were not in the flowtable. At last the same pods without ``--fast-forward``.
"""

import argparse
import json
import os
import socket
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

from bench.report import Line, Lines, row_of
from bench.result import run_bench
from bench.temporary_lab import beside, print_step
from ebpflb.kernel.netfilter import flowtable
from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.model.packet_path import Engine
from tests.kernel.node import nodes
from tests.kit.cluster import NODEPORT, ServingOutside, endpoint, serving_outside, web

PERIOD, PAUSE = 60.0, 0.01  # seconds
A_POD = 3.0  # seconds from one to the next; it is there for half of them
LATE = 1.0  # seconds after which the answer to a datagram counts as lost
REAL_TIME = os.sched_param(10)  # of client and servers
FAST, SLOW = "--fast-forward=auto", "--fast-forward=off"
LEFT_ALONE, PODS, WITHOUT = "left alone", "20 pods a minute", "20 pods a minute, without the option"
COUNTER = f"""table inet ebpflb-counted {{
    counter seen {{ }}
    chain c {{
        type filter hook forward priority 290
        meta l4proto {{ tcp, udp }} ct original proto-dst {NODEPORT} counter name seen
    }}
}}"""


class Window(NamedTuple):
    """What was seen in PERIOD: seconds until each answer; packets of both flows in FORWARD."""

    lost: int
    tcp: list[float]
    udp: list[float]
    stack: int


def main() -> None:
    run_bench(__doc__, _measured, rounds=2)


def _measured(wanted: argparse.Namespace) -> list[Line]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ebpflb-churn-")))
        node = stack.enter_context(serving_outside(folder, Engine.NETFILTER, FAST))
        node.node.nft(COUNTER)
        return list(_rows(node, wanted.rounds))


def _rows(node: ServingOutside, rounds: int) -> Lines:
    found = defaultdict[str, list[Window]](list)
    with nodes.entered(node.outside.netns):
        clients = _Clients(node.node.v4)
    with closing(clients), nodes.entered(node.node.netns):
        wait_until("both are in the flowtable", lambda: _is_forwarded(clients), seconds=60)
        _hurry(node)
        for number in range(rounds):
            print_step(f"round {number + 1} of {rounds}")
            found[LEFT_ALONE].append(_window(clients))
            with beside(_pods(node)):
                found[PODS].append(_window(clients))
        node.agent.stop()
        node.agent.options = (SLOW,)
        node.agent.start()
        wait_until("no flowtable", lambda: not flowtable.read(flowtable.TABLE), seconds=60)
        with beside(_pods(node)):
            found[WITHOUT].append(_window(clients))
    for heading, windows in found.items():
        yield f"{heading}, for {PERIOD * len(windows):.0f} s"
        yield row_of("answers lost, UDP", [it.lost for it in windows], "")
        for name in ("tcp", "udp"):
            waits = sorted(each for it in windows for each in getattr(it, name))
            yield row_of(f"an answer, {name.upper()}", [it * 1e3 for it in waits], "ms")
            yield row_of(f"the longest wait, {name.upper()}", [waits[-1] * 1e3], "ms")
        yield row_of("packets in FORWARD", [it.stack for it in windows], "")


class _Clients:
    """Sockets of the client, which has been answered by each."""

    def __init__(self, host: str) -> None:
        self.sockets = []
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            opened = socket.socket(socket.AF_INET, kind)
            opened.connect((host, NODEPORT))
            self.sockets.append(opened)
        stream, datagrams = self.sockets
        stream.recv(64)
        datagrams.settimeout(LATE)

    def close(self) -> None:
        for each in self.sockets:
            each.close()

    def ask(self, number: int) -> tuple[float, float | None]:
        """Return the seconds until both answers; None for a lost one."""
        stream, datagrams = self.sockets
        asked, begun = number.to_bytes(8), time.monotonic()
        stream.send(asked)
        missing = len(asked)
        while missing:
            missing -= len(stream.recv(missing))
        answered = time.monotonic()
        datagrams.send(asked)
        try:
            while not datagrams.recv(64).endswith(asked):
                pass  # one that came late
        except TimeoutError:
            return answered - begun, None
        return answered - begun, time.monotonic() - answered


def _is_forwarded(clients: _Clients) -> bool:
    before = _seen()
    for number in range(20):
        clients.ask(number)
    return _seen() == before


def _hurry(node: ServingOutside) -> None:
    """Let the servers, as the client, not wait for the agent's turn on the CPU."""
    for pod in node.web:
        for process in nodes.run("ip", "netns", "pids", pod.netns).split():
            for thread in os.listdir(f"/proc/{process}/task"):
                os.sched_setscheduler(int(thread), os.SCHED_FIFO, REAL_TIME)


def _window(clients: _Clients) -> Window:
    before, begun, number = _seen(), time.monotonic(), 0
    tcp, udp = list[float](), list[float | None]()
    os.sched_setscheduler(0, os.SCHED_FIFO, REAL_TIME)
    while time.monotonic() - begun < PERIOD:
        number += 1
        one, other = clients.ask(number)
        tcp.append(one)
        udp.append(other)
        time.sleep(PAUSE)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return Window(udp.count(None), tcp, [it for it in udp if it is not None], _seen() - before)


def _seen() -> int:
    said = json.loads(nodes.run("nft", "-j", "list", "counter", "inet", "ebpflb-counted", "seen"))
    return int(said["nftables"][-1]["counter"]["packets"])


def _pods(node: ServingOutside) -> Callable[[threading.Event], None]:
    """Return what lets pods come and go, until the event is set."""
    v6 = [endpoint(pod, v6=True) for pod in node.web]

    def publish(*more: manifests.Manifest) -> None:
        node.publish(web(*map(endpoint, node.web), *more, v6=v6, nodeport=NODEPORT))

    def work(ended: threading.Event) -> None:
        number = 0
        while not ended.is_set():
            name = f"pod{number}"
            node.node.ip(f"link add {name} type veth peer name {name}p")
            node.node.ip(f"link set {name} master cni0 up", f"link set {name}p up")
            publish(manifests.endpoint(f"10.244.1.{100 + number}", node="node", target=name))
            ended.wait(A_POD / 2)
            publish()
            node.node.ip(f"link delete {name}")
            ended.wait(A_POD / 2)
            number += 1

    return work


if __name__ == "__main__":
    main()
