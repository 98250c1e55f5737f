# SPDX-License-Identifier: Apache-2.0
"""What a packet of an established flow costs the node itself, in nanoseconds.

A client opens a flow through the node. Then its next packet is sent to the node's uplink over and
over, one way, as fast as one core takes it from the sender through the node to the other end, which
drops it: on the next node (remote), or in the node's pod (local). The core is always busy, and what
comes to the other end is counted. The same is sent to a device that drops it at once, before any
stack; the difference is what the node's stack takes, with the cable and bridge behind it.

All variants, both places and protocols in turns within a round, in a new order each time.
"""

import json
import random
import socket
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from bench import flow_frames, targets
from bench.flow_frames import DSCP, KINDS
from bench.nodeport_lab import (
    DIRECT,
    FLOWTABLE,
    LOCAL,
    NETFILTER,
    NFTABLES,
    VARIANTS,
    NodePortLab,
    Where,
)
from bench.report import Lines, row_of
from ebpflb.kernel.node.namespaces import call_in
from ebpflb.lab.hosts import Host, Lab
from ebpflb.lab.netns import NETNS, Namespace
from ebpflb.lab.router import NODES

PACKETS = 20_000  # a measurement
ALL = 0.99  # of the packets at least come to the other end
DROP = f"""
table netdev bench {{
  chain streams {{ type filter hook ingress device "eth0" priority 0; ip dscp {DSCP} drop; }}
}}
"""
_PIPE = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}

Key = tuple[str, str, str]  # variant, place, protocol


class Streamed(Protocol):
    """A lab whose folder has the program stream.c."""

    @property
    def lab(self) -> Lab: ...
    @property
    def folder(self) -> Path: ...


class Sender:
    """Sends frames to a host by the router's end of its cable."""

    def __init__(self, lab: Streamed, host: Host) -> None:
        self._mac = _mac(host)
        cable = f"{NODES.name}{host.v4.rpartition('.')[2]}"
        command = [*lab.lab.router.enter, str(lab.folder / "stream"), cable]
        self.process = lab.lab.keep(subprocess.Popen(command, **_PIPE))  # type: ignore[call-overload]

    def send(self, packet: bytes) -> float:
        """Return nanoseconds per packet."""
        frame = self._mac + bytes.fromhex("020000000000") + b"\x08\x00" + packet
        self.process.stdin.write(f"{PACKETS} {frame.hex()}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline()) / PACKETS


class NodeCost:
    """Streams through the nodes of a lab."""

    def __init__(self, lab: NodePortLab) -> None:
        self.lab = lab
        ends = [lab.far.node, *(site.pod for site in lab.sites.values())]
        for end in ends:
            end.nft(DROP)
        self.senders = {variant: Sender(lab, site.node) for variant, site in lab.sites.items()}
        self._nothing = Sender(lab, lab.far.node)

    def measure(self, rounds: int) -> tuple[dict[Key, list[float]], dict[str, list[float]]]:
        """Return each round's times without those of dropped packets, and the times of these."""
        took: dict[Key, list[float]] = defaultdict(list)
        nothing: dict[str, list[float]] = defaultdict(list)
        keys = [(*case, protocol) for case in self.lab.cases for protocol in KINDS]
        for _ in range(rounds):
            for protocol in KINDS:
                nothing[protocol].append(self.dropped(protocol))
            for key in random.sample(keys, k=len(keys)):
                took[key].append(self.through(*key) - nothing[key[2]][-1])
        return took, nothing

    def through(
        self, variant: str, place: str, protocol: str, prepare: Callable[[], object] = lambda: None
    ) -> float:
        """Return nanoseconds per packet; ``prepare`` is called once its flow is open."""
        end = self.lab.sites[variant].pod if place == LOCAL else self.lab.far.node
        with flow_frames.opened(*self._flow(variant, place, protocol)) as packet:
            prepare()
            before = received(end)
            took = self.senders[variant].send(packet)
            came = received(end) - before
        if came < ALL * PACKETS:
            raise SystemExit(f"{variant}, {place}, {protocol}: {came} of {PACKETS} packets came")
        return took

    def dropped(self, protocol: str) -> float:
        """Return the nanoseconds of a packet that is dropped before any stack."""
        with flow_frames.opened(*self._flow(DIRECT, LOCAL, protocol)) as packet:
            return self._nothing.send(packet)

    def _flow(self, variant: str, place: str, protocol: str) -> tuple[socket.socket, Where]:
        """Return a socket of the client, and its destination."""
        client = NETNS / self.lab.client.host.netns
        made = call_in(client, lambda: socket.socket(socket.AF_INET, KINDS[protocol]))
        return made, self.lab.target(variant, place)


def sorted_keys(took: Iterable[Key]) -> list[Key]:
    """Return keys by place and protocol; the variants in their order."""
    return sorted(took, key=lambda key: (*key[1:], VARIANTS.index(key[0])))


def costs(lab: NodePortLab, rounds: int) -> Lines:
    took, nothing = NodeCost(lab).measure(rounds)
    yield f"the node's cost of a packet, established, one way: {rounds} rounds"
    for protocol, each in nothing.items():
        yield row_of(f"dropped before any stack, {protocol}", each, "ns")
    keys = sorted_keys(took)
    for key in keys:
        yield row_of(", ".join(key), took[key], "ns")
    for variant, place, protocol in keys:
        if variant != NFTABLES:
            pairs = zip(
                took[NFTABLES, place, protocol], took[variant, place, protocol], strict=True
            )
            ratios = [those / these for those, these in pairs]
            target = targets.NETFILTER_PACKETS[place] if variant == NETFILTER else None
            what = f"{NFTABLES} / {variant}, {place}, {protocol}"
            yield row_of(what, ratios, "x", target, least=True)
    for _, place, protocol in (key for key in keys if key[0] == FLOWTABLE):
        pairs = zip(took[FLOWTABLE, place, protocol], took[DIRECT, place, protocol], strict=True)
        ratios = [fast / direct for fast, direct in pairs]
        what = f"{FLOWTABLE} / {DIRECT}, {place}, {protocol}"
        yield row_of(what, ratios, "x", targets.FAST[place])


def _mac(host: Namespace) -> bytes:
    shown = subprocess.run(
        [*host.enter, "ip", "-json", "link", "show", "eth0"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return bytes.fromhex(json.loads(shown.stdout)[0]["address"].replace(":", ""))


def received(host: Namespace) -> int:
    """Return the number of packets that came in by eth0."""
    shown = subprocess.run(
        [*host.enter, "cat", "/proc/net/dev"], check=True, capture_output=True, text=True
    )
    line = next(line for line in shown.stdout.splitlines() if line.strip().startswith("eth0:"))
    return int(line.partition(":")[2].split()[1])
