# SPDX-License-Identifier: Apache-2.0
"""NodePorts from outside: ebpflb beside kube-proxy's rules, for the same services.

    sudo .venv/bin/python -m bench.nodeport [--others N] [--rounds K] [--streams S]

One run, in one lab (see ``nodeport_lab``), amid N other services:

1  TCP connections and small UDP datagrams a second to a backend on the node and to one on another
   node: directly, by ebpflb (both engines, and --fast-forward), by kube-proxy's nftables and
   iptables rules and its virtual servers of IPVS; in turns, round by round in a new order each
   time, so that drift of the machine hits all alike
2  what a packet of an established flow costs the node itself (see ``node_cost``)
3  what a packet costs in ebpflb's two programs (see ``packets``)

With ebpflb a local backend sees the client's address, with kube-proxy the node's: each in its
default configuration.

A ratio is that of two rates of the same round. The median of all rounds' ratios is reported. "On
top of direct" is what the service costs: the time of a connection or a datagram less the time of a
direct one in the same round, on one CPU that is always busy. A small direct / nftables
shows how much of the time does not depend on the service at all.
Everything is removed at the end, also if it is interrupted.
"""

import argparse
import random
from collections import defaultdict
from statistics import median
from typing import NamedTuple

from bench import node_cost, packets, targets
from bench.nodeport_lab import (
    BURST,
    DIRECT,
    EBPFLB,
    FLOWTABLE,
    IPTABLES,
    IPVS,
    NETFILTER,
    NFTABLES,
    PLACES,
    TRACKED,
    Case,
    NodePortLab,
)
from bench.report import Line, Lines, Row, percentile, row_of
from bench.result import run_bench
from bench.temporary_lab import print_step, temporary_lab

PREFIX = "ebpflb-nodeport"
CONNECTIONS = 100  # a round, to each
BURSTS = 32
RATIOS = (
    (EBPFLB, NFTABLES),
    (EBPFLB, IPTABLES),
    (TRACKED, NFTABLES),
    (NETFILTER, NFTABLES),
    (NETFILTER, IPVS),
    (NETFILTER, TRACKED),
    (FLOWTABLE, NFTABLES),
    (DIRECT, NFTABLES),
)
_TARGETS = {(NETFILTER, NFTABLES, place): targets.NETFILTER_RATE for place in PLACES}
US, SECOND = 1e3, 1e9

Times = dict[Case, list[float]]  # nanoseconds for one, round by round


class Found(NamedTuple):
    """``connects``: the nanoseconds of each connect()."""

    connections: Times
    datagrams: Times
    connects: dict[Case, list[int]]


def main() -> None:
    """Measure; ``streams`` is the number of rounds of the node's cost."""
    run_bench(__doc__, _measured, others=1000, rounds=60, streams=20)


def _measured(wanted: argparse.Namespace) -> list[Line]:
    with temporary_lab(PREFIX) as (lab, folder, stack):
        print_step("building the lab")
        return _measure(NodePortLab(lab, folder, stack, wanted.others), wanted)


def _measure(lab: NodePortLab, wanted: argparse.Namespace) -> list[Line]:
    found = times_of(lab, wanted.rounds)
    print_step("measuring the nodes, then packets")
    return [
        f"amid {wanted.others:,} other services",
        f"TCP connections, a byte each way: {wanted.rounds} rounds",
        *_rates(found.connections, found.connects),
        f"UDP datagrams of a byte, half of them answers: {wanted.rounds} rounds",
        *_rates(found.datagrams, {}),
        *node_cost.costs(lab, wanted.streams),
        *packets.costs(lab),
    ]


def times_of(lab: NodePortLab, rounds: int) -> Found:
    """Measure connections and datagrams in turns."""
    found = Found(defaultdict(list), defaultdict(list), defaultdict(list))
    for number in range(rounds):
        if not number % 10:
            print_step(f"measuring rates: round {number} of {rounds}")
        for case in random.sample(lab.cases, k=len(lab.cases)):
            took, *each = lab.client.do("connect", lab.target(*case), CONNECTIONS)
            found.connections[case].append(took / CONNECTIONS)
            found.connects[case] += each
            (took,) = lab.client.do("volley", lab.target(*case), BURSTS)
            found.datagrams[case].append(took / (2 * BURST * BURSTS))
    return found


def _rates(times: Times, connects: dict[Case, list[int]]) -> Lines:
    for case, each in times.items():
        rates = [SECOND / time for time in each]
        note = _latency(connects.get(case, []))
        yield row_of(", ".join(case), rates, "/s", None, note)
    yield from _on_top(times)
    for place in PLACES:
        for one, other in RATIOS:
            if {(one, place), (other, place)} <= times.keys():
                ratios = over(times[other, place], times[one, place])
                target = _TARGETS.get((one, other, place))
                yield row_of(f"{one} / {other}, {place}", ratios, "x", target, least=True)


def _on_top(times: Times) -> Lines:
    costs = {}
    for (variant, place), each in times.items():
        if variant != DIRECT:
            pairs = zip(each, times[DIRECT, place], strict=True)
            more = [(this - that) / US for this, that in pairs]
            costs[variant, place] = median(more)
            what = f"on top of direct, {variant}, {place}"
            yield row_of(what, more, "us")
    for place in PLACES:
        ratio = costs[NFTABLES, place] / costs[EBPFLB, place]
        yield Row(f"on top of direct, {NFTABLES} / {EBPFLB}, {place}", ratio, "x")


def over(these: list[float], those: list[float]) -> list[float]:
    return [this / that for this, that in zip(these, those, strict=True)]


def _latency(connects: list[int]) -> str:
    if not connects:
        return ""
    p50, p99 = (percentile(connects, share) / US for share in (0.5, 0.99))
    return f"connect() p50 {p50:.1f} us, p99 {p99:.1f} us"


if __name__ == "__main__":
    main()
