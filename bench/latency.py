# SPDX-License-Identifier: Apache-2.0
"""What the client feels: requests in turns, and the run time of each hook.

A ratio is that of two medians of the same round. The median of all rounds' ratios is reported,
because the machine's drift between rounds is larger than the differences to be measured.
"""

import argparse
import random
import statistics
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack

from bench import hooks, services, targets
from bench.connect_lab import ConnectLab
from bench.hooks import Hooks
from bench.report import Lines, Row, percentile, row_of
from ebpflb.lab.hosts import Host

TURNS = 100  # connections to each target, a round
CALLS = 160  # of each kind, a round, while the kernel takes the time
SENT = 20  # datagrams a socket
NO_HOOKS = "no hooks"
NO_SERVICE = "for no service"
US = 1e3

Samples = dict[tuple[str, str], list[list[int]]]  # who, way -> rounds
VIP = (services.ADDRESS, services.PORT)


def requests(lab: ConnectLab, agents: dict[str, Hooks], rounds: int) -> Lines:
    """Measure one target after the other within a round; change the hooks between rounds."""
    took: Samples = defaultdict(list)
    for _ in range(rounds):
        for who in random.sample([NO_HOOKS, *agents], k=1 + len(agents)):
            for way, samples in _round(lab, agents, who).items():
                took[who, way].append(samples)
    yield f"TCP connect + request: {rounds} rounds of {TURNS} each"
    for who, way in sorted(took, key=lambda each: (each[0] != NO_HOOKS, len(each[0]))):
        samples = [each for part in took[who, way] for each in part]
        middles = [statistics.median(part) / US for part in took[who, way]]
        note = f"p99 {percentile(samples, 0.99) / US:.0f} us"
        p50 = percentile(samples, 0.5) / US
        yield row_of(f"p50, {way}, {who}", middles, "us", None, note, value=p50)
    for who in agents:
        yield _ratio(
            f"ClusterIP / direct, {who}",
            took[who, "ClusterIP"],
            took[who, "direct"],
            targets.CLUSTER_IP,
        )
    for who in agents:
        yield _ratio(f"direct / {NO_HOOKS}, {who}", took[who, "direct"], took[NO_HOOKS, "direct"])


def _round(lab: ConnectLab, agents: dict[str, Hooks], who: str) -> dict[str, list[int]]:
    direct = _direct(lab.backends[0])
    with ExitStack() as stack:
        if who == NO_HOOKS:
            for each in agents.values():
                stack.enter_context(each.off())
            lab.client.move(lab.bare)
            targets = {"direct": direct, "direct again": direct}
        else:
            lab.client.move(agents[who].cgroup)
            targets = {"direct": direct, "ClusterIP": VIP}
        took = lab.client.do("take_turns", list(targets.values()), TURNS)
    return dict(zip(targets, took, strict=True))


def _direct(pod: Host) -> tuple[str, int]:
    return pod.v4, services.TARGET


def _ratio(
    what: str, these: list[list[int]], those: list[list[int]], target: float | None = None
) -> Row:
    pairs = zip(these, those, strict=True)
    ratios = [statistics.median(this) / statistics.median(that) for this, that in pairs]
    return row_of(f"p50 {what}", ratios, "", target)


def run_times(lab: ConnectLab, agents: dict[str, Hooks], wanted: argparse.Namespace) -> Lines:
    """Do the same few kinds of work for each agent, round by round.

    From packets without a service, the time of empty programs is subtracted.
    """
    took: dict[tuple[str, str], list[float]] = defaultdict(list)
    with hooks.statistics(), hooks.EmptyHooks(lab.empty) as empty:
        for _ in range(wanted.rounds):
            lab.client.move(lab.empty)
            nothing = empty.per_call(_work_for_no_service(lab))
            for who, each in agents.items():
                lab.client.move(each.cgroup)
                for (name, kind), cost in _costs(lab, each, wanted.services).items():
                    less = nothing[name] if kind == NO_SERVICE else 0
                    took[f"{name}, {kind}", who].append(cost - less)
    yield "hooks, run time a call"
    for (what, who), costs in sorted(took.items()):
        note = ""
        if who != next(iter(agents)) and (first := took.get((what, next(iter(agents))))):
            change = statistics.median(costs) / statistics.median(first) - 1
            note = f"{change:+.0%} against {next(iter(agents))}"
        yield row_of(f"{what}, {who}", costs, "ns", _target(what), note)


def _target(what: str) -> float | None:
    """Return the target; a first datagram has none."""
    if NO_SERVICE in what:
        return targets.OTHER_SOCKET
    special = {"connect4, hit, any service": targets.ANY_SERVICE, "sendmsg4, new socket": None}
    return special.get(what, targets.RELEASE if "sock_release" in what else targets.CALL)


def _work_for_no_service(lab: ConnectLab) -> Callable[[], object]:
    direct = _direct(lab.backends[0])
    return lambda: lab.client.do("send_bursts", direct, CALLS, SENT)


def _costs(lab: ConnectLab, each: Hooks, count: int) -> dict[tuple[str, str], float]:
    """Return nanoseconds per call, by program and request."""
    do, direct = lab.client.do, _direct(lab.backends[0])
    found: dict[tuple[str, str], float] = {}
    kinds = {
        "hit": (("connect4", "sock_release"), lambda: do("take_turns", [VIP], CALLS)),
        "miss": (("connect4", "sock_release"), lambda: do("take_turns", [direct], CALLS)),
        "same socket": (("sendmsg4", "recvmsg4"), lambda: do("send", VIP, CALLS // SENT, SENT)),
        "new socket": (("sendmsg4", "sock_release"), lambda: do("send", VIP, CALLS, 1)),
        "named": (("getpeername4",), lambda: do("name_peer", VIP, CALLS)),
        NO_SERVICE: (("recvmsg4", "sock_release"), _work_for_no_service(lab)),
    }
    if each.many:
        some = random.sample(range(count - 1), k=min(CALLS, count - 1))
        others = [(services.address(number), services.PORT) for number in some]
        kinds["hit, any service"] = (("connect4",), lambda: do("scatter", others))
    for kind, (names, work) in kinds.items():
        costs = each.per_call(work)
        found |= {(name, kind): costs[name] for name in names}
    return found
