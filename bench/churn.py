# SPDX-License-Identifier: Apache-2.0
"""A flow in the kernel's flowtable, beside pods that come and go: in a kernel that has it.

    python -m vagrant.kernels count 6.12 'python -m bench.churn [--rounds K]'

A client outside asks a pod through a NodePort, question by question, with ``--fast-forward``. In
turns the node is quiet for PERIOD seconds, or devices come and go like those of 20 pods a minute,
one change each 1.5 s. A counter in FORWARD tells how many packets the stack saw, and so how long
the flow was out of the flowtable.
"""

import argparse
import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from bench.report import Line, row_of
from bench.result import run_bench
from bench.temporary_lab import beside, print_step
from ebpflb.lab.agents import wait_until
from ebpflb.model.packet_path import Engine
from tests.kernel.node import nodes
from tests.kit.cluster import NODEPORT, ServingOutside, serving_outside
from tests.kit.sockets import Socket

PERIOD, CHANGE = 12.0, 1.5  # seconds
COUNTER = f"""table inet counted {{
    counter seen {{ }}
    chain c {{
        type filter hook forward priority 290
        meta l4proto tcp ct original proto-dst {NODEPORT} counter name seen
    }}
}}"""


def main() -> None:
    run_bench(__doc__, _measured, rounds=4)


def _measured(wanted: argparse.Namespace) -> list[Line]:
    with (
        tempfile.TemporaryDirectory(prefix="ebpflb-churn-") as folder,
        serving_outside(Path(folder), Engine.NETFILTER, "--fast-forward") as node,
        nodes.entered(node.node.netns),
    ):
        nodes.run("nft", COUNTER)
        return _rows(node, wanted.rounds)


def _rows(node: ServingOutside, rounds: int) -> list[Line]:
    node.serve(*node.web)
    client = node.connection()
    wait_until("the connection is in the flowtable", lambda: _stack(client, 20) == 0, seconds=60)
    took: dict[str, list[tuple[float, float]]] = {"quiet": [], "pods come and go": []}
    for turn in range(rounds):
        print_step(f"round {turn + 1} of {rounds}")
        took["quiet"].append(_window(client))
        with _pods():
            took["pods come and go"].append(_window(client))
    client.close()
    rates = {name: [rate for rate, _ in each] for name, each in took.items()}
    stack = {name: [packets for _, packets in each] for name, each in took.items()}
    return [
        "an offloaded TCP flow, question and answer",
        *(row_of(name, each, "/s") for name, each in rates.items()),
        f"its packets that passed the stack in {PERIOD:.0f} s",
        *(row_of(name, each, "packets") for name, each in stack.items()),
        f"ratio of the medians {median(rates['pods come and go']) / median(rates['quiet']):.4f}",
    ]


def _window(client: Socket) -> tuple[float, float]:
    """Exchanges a second, and packets that passed the stack."""
    before, begun, done = _seen(), time.monotonic(), 0
    while time.monotonic() - begun < PERIOD:
        _exchange(client, 50)
        done += 50
    return done / (time.monotonic() - begun), _seen() - before


def _exchange(client: Socket, times: int) -> None:
    for _ in range(times):
        client.send(b"?")
        assert client.recv(64)


def _stack(client: Socket, times: int) -> int:
    before = _seen()
    _exchange(client, times)
    return _seen() - before


def _seen() -> int:
    said = json.loads(nodes.run("nft", "-j", "list", "counter", "inet", "counted", "seen"))
    return int(said["nftables"][-1]["counter"]["packets"])


@contextmanager
def _pods() -> Iterator[None]:
    """A veth device comes and goes in this thread's namespace until the end."""

    def change(done: threading.Event) -> None:
        number = 0
        while not done.wait(CHANGE):
            name = f"pod{number // 2}"
            words = (
                ("del", name) if number % 2 else ("add", name, "type", "veth", "peer", f"{name}p")
            )
            subprocess.run(["ip", "link", *words], check=True)
            if not number % 2:
                subprocess.run(["ip", "link", "set", name, "up"], check=True)
            number += 1
        if number % 2:
            subprocess.run(["ip", "link", "del", f"pod{number // 2}"], check=True)

    with beside(change):
        yield


if __name__ == "__main__":
    main()
