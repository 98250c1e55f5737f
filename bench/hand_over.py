# SPDX-License-Identifier: Apache-2.0
"""What it costs to hand requests to another node by MAC address, beside masquerading them.

    sudo .venv/bin/python -m bench.hand_over [--rounds N] [--streams N]

A client beyond a router, which leads everything to node `entry`; the only endpoint is on node
`far`. First what a packet of an established connection costs `entry`, one way (see ``node_cost``):
routed to the pod's own address, handed over, and masqueraded. Then the rates of whole exchanges
through both Services, in random order; a ratio compares two rates of the same round. And what the
program costs a packet for others.
"""

import argparse
import random
import socket
import subprocess
from collections import defaultdict
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path
from struct import pack
from typing import NamedTuple

from bench import flow_frames, hooks, node_cost, packets, targets
from bench.nodeport_lab import BURST, Client, Where, build
from bench.report import Lines, row_of
from bench.result import run_bench
from bench.temporary_lab import print_step, temporary_lab
from ebpflb.kernel.attach import uplink_program
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.node.namespaces import call_in
from ebpflb.lab import cni, manifests
from ebpflb.lab.agents import LabAgent, wait_until
from ebpflb.lab.hosts import Host, Lab
from ebpflb.lab.netns import NETNS
from ebpflb.model.annotations import FORWARDING_ANNOTATION

DIRECT, HANDED, MASQUERADED = WAYS = ("routed", "handed over", "masqueraded")
VIPS = {HANDED: "203.0.113.10", MASQUERADED: "203.0.113.20"}
PORT, TARGET, FAR = 80, 8080, 10
CONNECTIONS, REQUESTS, BURSTS = 60, 200, 24  # a round, of each Service
TURNS = 201  # of test runs, of both programs
COMMANDS = {
    "connections": ("connect", CONNECTIONS, 1),
    "requests of an open connection": ("converse", REQUESTS, 1),
    "datagrams": ("volley", BURSTS, 2 * BURST),
}
SECOND = 1e9
_OTHER = ip_address("2001:db8::c000:209")


class HandOverLab(NamedTuple):
    """``entry`` has no endpoint; the endpoint ``pod`` is on node ``far``."""

    lab: Lab
    folder: Path
    entry: Host
    far: Host
    pod: Host
    client: Client
    state: Path  # of the entry's agent

    def target(self, way: str) -> Where:
        return (self.pod.v4, TARGET) if way == DIRECT else (VIPS[way], PORT)


def main() -> None:
    run_bench(__doc__, _measured, rounds=40, streams=20)


def _measured(wanted: argparse.Namespace) -> Lines:
    with temporary_lab("bench-hand-over") as (lab, folder, stack):
        made = _lab(lab, folder, stack)
        print_step("measuring the node's cost")
        yield from _costs(made, wanted.streams)
        print_step("measuring the whole way")
        yield from _rates(made, wanted.rounds)
        yield from _for_others(StateDir(made.state))


def _lab(lab: Lab, folder: Path, stack: ExitStack) -> HandOverLab:
    build(folder)
    entry, far = lab.node("entry", 1), lab.node("far", FAR)
    lab.join(entry, far)
    for device in ("all", "eth0"):  # the router would follow them
        entry.sysctl(f"net.ipv4.conf.{device}.send_redirects", 0)
    pod = lab.pod(far, "web", 11)
    server = pod.start(
        [str(folder / "server"), str(TARGET)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    lab.keep_ready(server)
    for network in ("203.0.113.0/24", f"{pod.v4}/32"):
        lab.router.lead(network, entry.v4)
    client = Client(lab, lab.outside("client", 1), folder)
    agents = [LabAgent(lab, node, folder) for node in (entry, far)]
    made = HandOverLab(lab, folder, entry, far, pod, client, agents[0].paths.state)
    for agent in agents:
        words = "--packet-path=netfilter", "--hand-over=auto"
        agent.defaults = *words, "--cluster-cidr", ",".join(cni.NETWORKS)
        manifests.write(agent.manifests / "all.yaml", _objects(made))
        stack.callback(agent.close)
        agent.start()
    wait_until("requests are handed over", lambda: not _tracked(made), 300)
    return made


def _objects(made: HandOverLab) -> list[manifests.Manifest]:
    named = [{"name": p, "port": PORT, "protocol": p.upper()} for p in ("tcp", "udp")]
    endpoint = manifests.endpoint(made.pod.v4, node=made.far.name, target=made.pod.name)
    found = [manifests.node(it.name, it.v4) for it in (made.entry, made.far)]
    for number, (way, address) in enumerate(VIPS.items(), 1):
        name = f"web-{number}"
        kept = {FORWARDING_ANNOTATION: "keep-client"} if way == HANDED else None
        found += [
            manifests.service(
                name,
                [f"10.96.0.{number}"],
                named,
                annotations=kept,
                ingress=[address],
                type="LoadBalancer",
            ),
            manifests.endpoint_slice(
                name, "IPv4", [endpoint], [{**it, "port": TARGET} for it in named]
            ),
        ]
    return found


def _tracked(made: HandOverLab) -> bool:
    """Open a connection by the Service that is handed over; return whether `entry` tracks it."""
    made.client.do("connect", made.target(HANDED), 1)
    words = [*made.entry.enter, "conntrack", "-L", "--orig-dst", VIPS[HANDED]]
    said = subprocess.run(words, capture_output=True, text=True).stdout
    subprocess.run([*made.entry.enter, "conntrack", "-F"], capture_output=True)
    return VIPS[HANDED] in said


def _costs(made: HandOverLab, rounds: int) -> Lines:
    made.far.nft(node_cost.DROP)
    sender, nothing = (node_cost.Sender(made, it) for it in (made.entry, made.far))
    took: dict[tuple[str, str], list[float]] = defaultdict(list)
    keys = [(way, protocol) for way in WAYS for protocol in flow_frames.KINDS]
    for _ in range(rounds):
        for protocol in flow_frames.KINDS:
            with flow_frames.opened(_socket(made, protocol), made.target(DIRECT)) as packet:
                base = nothing.send(packet)
            for key in random.sample([it for it in keys if it[1] == protocol], k=len(WAYS)):
                took[key].append(_through(made, sender, *key) - base)
    made.far.nft("delete table netdev bench")
    yield f"the entry node's cost of a packet, established, one way: {rounds} rounds"
    for way, protocol in keys:
        yield row_of(f"{way}, {protocol}", took[way, protocol], "ns")
    for way in (HANDED, MASQUERADED):
        for protocol in flow_frames.KINDS:
            pairs = zip(took[way, protocol], took[DIRECT, protocol], strict=True)
            target = targets.HANDED_PACKET if way == HANDED else None
            ratios = [one / direct for one, direct in pairs]
            yield row_of(f"{way} / {DIRECT}, {protocol}", ratios, "x", target)


def _for_others(state: StateDir) -> Lines:
    """Yield the cost of a packet for an address that is not handed over, by test runs in turns."""
    (index,) = uplink_program.HAND_OVER.recorded(state)
    pin = state.devices_directory / uplink_program.HAND_OVER.name / str(index)
    program = hooks.at_device("ingress", pin)
    sizes = "!HHIIBBHHH", "!BBHHHBBH4s4s", "!IHBB16s16s"
    yield "the program that hands over, a packet for others; less what an empty program shows"
    with hooks.Counted([packets.empty_program(), program]) as both:
        for flags, name in ((2, "a SYN"), (16, "an ACK")):
            tcp = pack(sizes[0], 40000, 80, 1, 1, 5 << 4, flags, 512, 0, 0)
            v4 = pack(sizes[1], 69, 0, 40, 1, 0, 64, 6, 0, *(_OTHER.packed[12:],) * 2)
            v6 = pack(sizes[2], 6 << 28, len(tcp), 6, 64, *(_OTHER.packed,) * 2)
            for kind, head in (("IPv4", b"\x08\0" + v4), ("IPv6", b"\x86\xdd" + v6)):
                frame = bytes(12) + head + tcp
                pairs = [
                    [packets.test_run(it, frame, 1) for it in both.programs] for _ in range(TURNS)
                ]
                more = [took - nothing for nothing, took in pairs]
                yield row_of(f"{name}, {kind}", more, "ns", targets.NOT_HANDED)


def _socket(made: HandOverLab, protocol: str) -> socket.socket:
    client = NETNS / made.client.host.netns
    return call_in(client, lambda: socket.socket(socket.AF_INET, flow_frames.KINDS[protocol]))


def _through(made: HandOverLab, sender: node_cost.Sender, way: str, protocol: str) -> float:
    with flow_frames.opened(_socket(made, protocol), made.target(way)) as packet:
        before = node_cost.received(made.far)
        took = sender.send(packet)
        came = node_cost.received(made.far) - before
    if came < node_cost.ALL * node_cost.PACKETS:
        raise SystemExit(f"{way}, {protocol}: {came} of {node_cost.PACKETS} packets came")
    return took


def _rates(made: HandOverLab, rounds: int) -> Lines:
    took: dict[tuple[str, str], list[float]] = defaultdict(list)
    keys = [(way, what) for way in VIPS for what in COMMANDS]
    for _ in range(rounds):
        for way, what in random.sample(keys, k=len(keys)):
            command, count, packets = COMMANDS[what]
            took[way, what].append(
                made.client.do(command, made.target(way), count)[0] / count / packets
            )
    yield f"the whole way, a byte each way: {rounds} rounds"
    for way, what in keys:
        yield row_of(f"{way}, {what}", [SECOND / it for it in took[way, what]], "/s")
    for what in COMMANDS:
        pairs = zip(took[MASQUERADED, what], took[HANDED, what], strict=True)
        ratios = [those / these for those, these in pairs]
        target = None if what == "datagrams" else targets.HANDED_RATE
        yield row_of(f"{HANDED} / {MASQUERADED}, {what}", ratios, "x", target, least=True)


if __name__ == "__main__":
    main()
