# SPDX-License-Identifier: Apache-2.0
"""What each part of the engine netfilter costs a packet of an established flow.

    sudo .venv/bin/python -m bench.node_parts [--others N] [--rounds K]

On one node of the lab of ``nodeport`` the program at ingress and the chain that drops invalid
segments are taken away and put back, also with an empty program at egress; one way to a remote
endpoint as in ``node_cost``, in turns with kube-proxy's rules, in a new order each time. So no
figure depends on where a node's memory lies. It needs tcx (Linux 6.6).
"""

import argparse
import os
import random
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.flow_frames import KINDS
from bench.node_cost import NodeCost
from bench.nodeport_lab import NETFILTER, NFTABLES, REMOTE, NodePortLab
from bench.report import Line, Lines, row_of
from bench.result import run_bench
from bench.temporary_lab import print_step, temporary_lab
from ebpflb.kernel import bpf
from ebpflb.kernel.attach import tcx
from ebpflb.kernel.node.namespaces import call_in
from ebpflb.kernel.programs.loader import SCHED_CLS
from ebpflb.lab.netns import NETNS

PREFIX = "ebpflb-parts"
RETURNS = bytes.fromhex("b7000000ffffffff9500000000000000")  # TC_ACT_UNSPEC
OURS, EMPTY, NONE = "ours", "empty", "none"
_CHAIN = """
table inet parts {
  chain invalid {
    type filter hook prerouting priority -190
    ct state invalid meta l4proto tcp tcp flags & syn == 0 drop
  }
}
"""


class Setup(NamedTuple):
    """The program at each hook, and whether the chain exists."""

    ingress: str = OURS
    egress: str = NONE
    chain: bool = True


SETUPS = {
    "everything": Setup(),
    "an empty program at egress too": Setup(egress=EMPTY),
    "an empty program at ingress": Setup(EMPTY),
    "no program": Setup(NONE),
    "no chain": Setup(chain=False),
    "no chain, no program": Setup(NONE, chain=False),
}


class Parts:
    """The parts of a node. Its agent has no such chain, and restores no program."""

    def __init__(self, lab: NodePortLab) -> None:
        lab.restart(NETFILTER, "--audit=report", "--conntrack-tcp-be-liberal")
        self._node = lab.sites[NETFILTER].node
        self._devices = set[int]()
        self._programs = {hook: {EMPTY: _empty_program()} for hook in tcx.TCX_HOOKS}
        self._links: dict[str, list[int]] = {hook: [] for hook in tcx.TCX_HOOKS}
        self._now = Setup(NONE, chain=False)
        for pin in lab.state(NETFILTER).devices_directory.iterdir():
            self._take(pin)

    def become(self, setup: Setup) -> None:
        """Change the parts that differ."""
        for hook in tcx.TCX_HOOKS:
            if getattr(setup, hook) != getattr(self._now, hook):
                self._attach(hook, getattr(setup, hook))
        if setup.chain != self._now.chain:
            self._node.nft(_CHAIN if setup.chain else "delete table inet parts")
        self._now = setup

    def _take(self, pin: Path) -> None:
        """Detach the agent's program, and keep it."""
        index, _, hook = pin.name.partition("-")
        self._devices.add(int(index))
        with bpf.opened(pin) as link:
            assert link is not None, pin
            number = int(bpf.info(link, "tcx_info").program)
            bpf.link_detach(link)
        self._programs[hook].setdefault(OURS, bpf.prog_by_id(number))

    def _attach(self, hook: str, what: str) -> None:
        for link in self._links.pop(hook):
            bpf.link_detach(link)
            os.close(link)
        program = self._programs[hook].get(what)
        self._links[hook] = (
            []
            if program is None
            else call_in(
                NETNS / self._node.netns,
                lambda: [bpf.link_create(program, at, tcx.TCX_HOOKS[hook]) for at in self._devices],
            )
        )


def _empty_program() -> int:
    return bpf.prog_load(
        name="empty", program_type=SCHED_CLS, attach_type=0, code=RETURNS, log=None
    )


def main() -> None:
    run_bench(__doc__, _measured, others=1000, rounds=60)


def _measured(wanted: argparse.Namespace) -> list[Line]:
    with temporary_lab(PREFIX) as (lab, folder, stack):
        print_step("building the lab")
        return list(_costs(NodePortLab(lab, folder, stack, wanted.others), wanted.rounds))


def _costs(lab: NodePortLab, rounds: int) -> Lines:
    cost, parts = NodeCost(lab), Parts(lab)
    took: dict[tuple[str, str], list[float]] = defaultdict(list)
    print_step("measuring packets")
    for protocol in rounds * list(KINDS):
        nothing = cost.dropped(protocol)
        for name in random.sample((NFTABLES, *SETUPS), k=1 + len(SETUPS)):
            took[name, protocol].append(_through(cost, parts, name, protocol) - nothing)
    yield f"a packet of an established flow to a remote endpoint, one way: {rounds} rounds"
    for protocol in KINDS:
        theirs = took[NFTABLES, protocol]
        yield row_of(f"{NFTABLES}, {protocol}", theirs, "ns")
        for name in SETUPS:
            pairs = list(zip(theirs, took[name, protocol], strict=True))
            more = [this - that for that, this in pairs]
            ratio = f"{median(that / this for that, this in pairs):.3f} of its rate"
            yield row_of(f"{name}, {protocol}, more than {NFTABLES}", more, "ns", note=ratio)


def _through(cost: NodeCost, parts: Parts, name: str, protocol: str) -> float:
    """Return nanoseconds per packet; its flow is opened with the program at ingress."""
    if name == NFTABLES:
        return cost.through(NFTABLES, REMOTE, protocol)
    setup = SETUPS[name]
    parts.become(setup._replace(ingress=OURS))
    return cost.through(NETFILTER, REMOTE, protocol, lambda: parts.become(setup))


if __name__ == "__main__":
    main()
