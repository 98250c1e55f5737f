# SPDX-License-Identifier: Apache-2.0
"""What --endpoint-health=nodes costs an agent, and how soon all notice a node that is cut off.

    sudo .venv/bin/python -m bench.node_health [--agents N] [--nodes N] [--seconds S] [--deaths N]

The cost is the processor time of the thread's own code with real sockets, for ``seconds`` of its
clock. The other nodes are addresses of loopback, so it includes the kernel's answers to probes, as
it does on a node. For the time until all notice, and the bytes sent, ``agents`` agents are
simulated in virtual time (tests/kit/node_network.py); one after the other is cut off.
"""

import argparse
import time
from collections.abc import Iterator
from ipaddress import IPv4Address

from bench import targets
from bench.report import Line, Row, row_of
from bench.result import run_bench
from ebpflb.agent.node_watch import NodeWatch, Wanted
from ebpflb.model.node_health import ROUND_SECONDS, TURN_SECONDS
from tests.kit.node_network import Network

KEY, PORT = bytes(range(32)), 10246
LOOPBACK = 0x7F000001
NOTICED_SECONDS, KNOWN_SECONDS = 6.0, ROUND_SECONDS + 3.0


def main() -> None:
    """``nodes`` of the one agent that is measured; ``agents`` that are simulated."""
    run_bench(__doc__, _measured, nodes=5000, agents=1000, seconds=60, deaths=5)


def _measured(wanted: argparse.Namespace) -> Iterator[Line]:
    yield f"an agent that probes {wanted.nodes} nodes"
    cost = 1000 * _cost(wanted.nodes, wanted.seconds)
    yield _only("processor time", "ms/s", cost, targets.PROBES)
    yield f"simulated agents: {wanted.agents}"
    yield from _simulated(wanted.agents, wanted.seconds, wanted.deaths)


def _only(name: str, unit: str, value: float, target: float | None = None) -> Row:
    return row_of(name, [value], unit, target)


class _Clock:
    now = 0.0


def _cost(nodes: int, seconds: int) -> float:
    """Return the processor time of a second of an agent's clock, in seconds."""
    clock = _Clock()
    watch = NodeWatch("node-0", KEY, lambda silent: None, clock=lambda: clock.now)
    watch.thread.start = lambda: None  # type: ignore[method-assign]
    nodes_at = {f"node-{n}": IPv4Address(LOOPBACK + n) for n in range(nodes)}
    watch.set(Wanted(nodes_at, PORT))
    _turn(watch, clock, KNOWN_SECONDS)
    assert watch.health.counts == {"answering": nodes - 1, "silent": 0, "unknown": 0}
    begun = time.process_time()
    _turn(watch, clock, seconds)
    used = time.process_time() - begun
    watch.stop()
    return used / seconds


def _turn(watch: NodeWatch, clock: _Clock, seconds: float) -> None:
    for _ in range(round(seconds / TURN_SECONDS)):
        clock.now += TURN_SECONDS
        watch.turn()


def _simulated(agents: int, seconds: int, deaths: int) -> Iterator[Row]:
    network = Network(agents)
    network.run(KNOWN_SECONDS)
    before = _sent(network)
    network.run(seconds)
    packets, octets = (after - it for after, it in zip(_sent(network), before, strict=True))
    yield _only("packets that an agent's node sends", "/s", packets / agents / seconds)
    yield _only("bytes that an agent's node sends", "B/s", octets / agents / seconds)
    yield _only("nodes held for silent without reason", "", len(network.alarms), 0)
    yield from _deaths(network, deaths)


def _deaths(network: Network, deaths: int) -> Iterator[Row]:
    last, most, told = [], [], []
    for dead in network.nodes[:deaths]:
        begun, sent = network.now, [each.bytes for each in network.nodes]
        network.alarms.clear()
        dead.side = 1
        network.run(NOTICED_SECONDS)
        assert {each.about for each in network.alarms} == {dead.name}
        assert len(network.alarms) == len(network.nodes) - 1
        last.append(max(each.at for each in network.alarms) - begun)
        more = [
            it.bytes - was for it, was in zip(network.nodes, sent, strict=True) if it is not dead
        ]
        most.append(max(more))
        told.append(sum(bool(each.health.silent.noticed) for each in network.nodes))
        dead.side = 0
        network.run(NOTICED_SECONDS)
    yield row_of("the last node notices a death", last, "s", targets.NOTICED)
    yield row_of("nodes that tell all others", told, "")
    yield row_of("bytes that one of them sends meanwhile", most, "B")


def _sent(network: Network) -> tuple[int, int]:
    """Return all packets and bytes so far."""
    packets = sum(sum(each.sent.values()) for each in network.nodes)
    return packets, sum(each.bytes for each in network.nodes)


if __name__ == "__main__":
    main()
