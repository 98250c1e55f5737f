# SPDX-License-Identifier: Apache-2.0
"""NodePorts in instructions, beside kube-proxy's IPVS too: in a kernel of the lab that has it.

    python -m vagrant.kernels count 6.12 'python -m bench.counted [--others N] [--rounds K]'

It uses the lab and the client of ``nodeport``. On a machine that QEMU emulates, times say nothing.
But QEMU's clock advances by one nanosecond for each instruction, so a time is a number of
instructions: those of the one CPU for a connection, and those of the node for a packet of an
established flow. A packet that is dropped before any stack is subtracted from the latter.
"""

import argparse

from bench import targets
from bench.node_cost import NodeCost, sorted_keys
from bench.nodeport import Times, over, times_of
from bench.nodeport_lab import FLOWTABLE, NETFILTER, PLACES, NodePortLab
from bench.report import Line, Lines, row_of
from bench.result import run_bench
from bench.temporary_lab import print_step, temporary_lab

PREFIX = "ebpflb-counted"
UNIT = "instructions"


def main() -> None:
    run_bench(__doc__, _measured, others=100, rounds=5)


def _measured(wanted: argparse.Namespace) -> list[Line]:
    with temporary_lab(PREFIX) as (made, folder, stack):
        print_step("building the lab")
        lab = NodePortLab(made, folder, stack, wanted.others)
        connections = times_of(lab, wanted.rounds).connections
        print_step("measuring the nodes")
        took, _ = NodeCost(lab).measure(wanted.rounds)
    return [
        f"a TCP connection, a byte each way, amid {wanted.others} other services",
        *(row_of(", ".join(case), each, UNIT) for case, each in connections.items()),
        *_short(connections),
        "the node's cost of a packet, established, one way",
        *(row_of(", ".join(key), took[key], UNIT) for key in sorted_keys(took)),
    ]


def _short(connections: Times) -> Lines:
    for place in PLACES:
        ratios = over(connections[FLOWTABLE, place], connections[NETFILTER, place])
        yield row_of(f"{FLOWTABLE} / {NETFILTER}, {place}", ratios, "x", targets.FAST_SHORT)


if __name__ == "__main__":
    main()
