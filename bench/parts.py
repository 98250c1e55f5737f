# SPDX-License-Identifier: Apache-2.0
"""What `make bench` runs, and what is drawn of it.

``whole`` and ``quick`` are a benchmark's options; a ``Panel`` draws the rows of a unit below a
heading that begins so. A part that is not ``usual`` runs only if it is named.
"""

from typing import NamedTuple


class Panel(NamedTuple):
    """A part of a plot."""

    heading: str
    unit: str


class Part(NamedTuple):
    """One benchmark with its options."""

    name: str
    module: str
    title: str
    whole: str
    quick: str
    panels: tuple[Panel, ...]
    usual: bool = True


_AGENT = Panel("agent", "ms")
_MILLION = "--services 50000 --endpoints 1000000 --map-size backends=2097152,slots=4194304"

PARTS = {
    part.name: part
    for part in (
        Part(
            "connect", "bench.connect", "Connections by ClusterIP, and each hook's run time",
            "--rounds 60", "--rounds 5", (Panel("TCP connect", "us"), Panel("hooks", "ns")),
        ),
        Part(
            "agent", "bench.agent_load", "The agent's processor time a change, by changes a second",
            "--seconds 10", "--seconds 2", (_AGENT,),
        ),
        Part(
            "nodeport", "bench.nodeport", "NodePorts by ebpflb and by kube-proxy's rules",
            "--rounds 60 --streams 20", "--rounds 6 --streams 4",
            (
                Panel("TCP connections", "/s"),
                Panel("UDP datagrams", "/s"),
                Panel("the node's cost", "ns"),
            ),
        ),
        Part(
            "growth", "bench.growth", "Costs by the number of Services, endpoints and connections",
            "--rounds 20 --changes 40", "--rounds 5 --changes 8",
            (
                Panel("amid more", "ns"), Panel("amid more", "ms"),
                Panel("with more", "ns"), Panel("with more", "ms"),
                Panel("a packet", "ns"),
            ),
        ),
        Part(
            "schedulers", "bench.schedulers", "Milliseconds from connect to answer, by scheduler",
            "--rounds 5 --seconds 5", "--rounds 2 --seconds 2", (Panel("connect to", "ms"),),
        ),
        Part(
            "draws", "bench.draws", "What a draw costs more than at random, by scheduler",
            "--rounds 20 --calls 500", "--rounds 5 --calls 200", (Panel("connect4", "ns"),),
        ),
        Part(
            "established", "bench.established", "A packet in the programs at a device",
            "--rounds 3", "--rounds 1", (Panel("programs", "ns"),),
        ),
        Part(
            "addresses", "bench.addresses", "A load balancer address whose owner's cable is pulled",
            "--rounds 20", "--rounds 3", (Panel("a load", "s"), Panel("the program", "ns")),
        ),
        Part(
            "hand-over", "bench.hand_over", "Requests handed to another node by MAC address",
            "--rounds 40 --streams 20", "--rounds 5 --streams 4",
            (Panel("the entry", "ns"), Panel("the whole", "/s")),
        ),
        Part(
            "moved", "bench.moved_datagrams",
            "How long a removed endpoint gets datagrams, by entries of conntrack",
            "--rounds 10", "--entries 200000 --rounds 2",
            (Panel("amid entries of others", "ms"), Panel("amid entries of the same", "ms")),
        ),
        Part(
            "ended", "bench.ended_sockets",
            "How long a connected UDP socket keeps a removed endpoint, by pods",
            "--rounds 100", "--pods 20 --rounds 5", (Panel("from the new slice", "ms"),),
        ),
        Part(
            "dns", "bench.dns",
            "A DNS Service's endpoint dies, amid 200,000 entries of conntrack",
            "--rounds 5", "--entries 20000 --rounds 1",
            (Panel("ebpflb", "ms"), Panel("kube-proxy", "ms")),
        ),
        Part(
            "programming", "bench.programming",
            "Network programming latency, as ClusterLoader2 reads it and exact",
            "--seconds 30", "--seconds 5", (Panel("10 pods", "ms"), Panel("100 pods", "ms")),
        ),
        Part(
            "profile", "bench.profile", "Where the time of packets and connections goes",
            "--rounds 5", "--rounds 1", (Panel("a packet", "ns"), Panel("a TCP", "ns")),
            usual=False,
        ),
        Part(
            "memory", "bench.memory", "Memory of an agent, by Services",
            "", "--services 1000",
            tuple(Panel(f"{engine}, {each}", "MB") for engine in ("netfilter", "flows")
                  for each in ("one", "10")),
            usual=False,
        ),
        Part(
            "million", "bench.agent_load", "The agent with a million endpoints",
            f"{_MILLION} --seconds 5", f"{_MILLION} --seconds 1", (_AGENT,), usual=False,
        ),
        Part(
            "shares", "bench.shares",
            "The share of an endpoint whose connections last three times as long",
            "", "--nodes 3 --connections 90", (Panel("the slow", ""),), usual=False,
        ),
        Part(
            "agents", "bench.agents", "Many agents at one API server",
            "--agents 100 --seconds 30", "--agents 20 --seconds 5",
            (
                Panel("start", "s"), Panel("start", "MB"), Panel("a pod", "ms"),
                Panel("a pod", "kB"),
            ),
            usual=False,
        ),
    )
}  # fmt: skip
