# SPDX-License-Identifier: Apache-2.0
"""Connections to a Service with the scheduler least-connections are counted while they are open.

They go by the flow tables also where netfilter is the engine, so both count the same.
"""

import signal
from collections import Counter
from contextlib import ExitStack

import pytest

from ebpflb.agent import missed_ends
from ebpflb.lab.agents import wait_until
from ebpflb.lab.manifests import Manifest
from ebpflb.model.annotations import LEAST_CONNECTIONS
from tests.kit import scheduled
from tests.kit.parameters import both_engines, families
from tests.kit.scheduled import BY_SOCKETS, CLIENTS, clients, dial, loads, settled, slices
from tests.kit.two_nodes import TwoNodes

OFF = 7  # connections

pytestmark = both_engines


def service(two: TwoNodes, *pods: str) -> list[Manifest]:
    return scheduled.service(two, LEAST_CONNECTIONS, *(pods or ("here", "there")))


@pytest.mark.extended
@clients
@families
def test_new_connections_go_to_the_endpoint_with_fewest(
    two: TwoNodes, who: str, v6: bool, opened: ExitStack
) -> None:
    """While all stay open they alternate; where one endpoint's have ended it gets the next ones."""
    two.publish(service(two))
    settled(two)
    held = [dial(two, who, opened, v6=v6) for _ in range(8)]
    assert Counter(name for name, _ in held) == {"here": 4, "there": 4}
    assert loads(two) == [4, 4]
    for name, each in held:
        if name == "here":
            each.close()
    settled(two, 4)
    assert {dial(two, who, opened, v6=v6)[0] for _ in range(4)} == {"here"}
    opened.close()
    settled(two)


@clients
def test_open_connections_are_as_many_as_the_weights_say(
    two: TwoNodes, who: str, opened: ExitStack
) -> None:
    """Of those that are held at once; OFF more or less come once in a million times."""
    two.publish(service(two, "here"), slices(two, "there", 25))
    settled(two)
    held = Counter(dial(two, who, opened)[0] for _ in range(60))
    assert abs(held["there"] - 60 * 25 // 125) <= OFF
    opened.close()
    settled(two)


@clients
def test_balance_under_unequal_service_times(two: TwoNodes, who: str, opened: ExitStack) -> None:
    """An endpoint that keeps its connections gets no more, while another one ends its own."""
    two.publish(service(two))
    settled(two)
    found = Counter[str]()
    for _ in range(16):
        name, each = dial(two, who, opened)
        found[name] += 1
        if name == "here":
            each.close()
            settled(two, found["there"])
    assert found["there"] <= 2
    opened.close()
    settled(two)


@clients
def test_datagrams_count_as_long_as_their_socket_or_flow_lives(
    two: TwoNodes, who: str, opened: ExitStack
) -> None:
    """Sockets until they are released; flows until they are gone and the agent has swept."""
    two.publish(service(two))
    settled(two)
    held = [dial(two, who, opened, "udp", v6=v6)[0] for v6 in (False, True) for _ in range(4)]
    for family in (held[:4], held[4:]):
        assert Counter(family) == {"here": 2, "there": 2}
    settled(two, 2, 2, 2, 2)
    opened.close()
    if who in BY_SOCKETS:
        settled(two)
    else:
        two.delete_flows("other_flows")
        wait_until("swept", lambda: not loads(two), 8 * missed_ends.RECOUNT_INTERVAL)
    assert not list(two.maps["connections"].items())


def test_an_agent_that_is_killed_leaves_exact_counts(two: TwoNodes, opened: ExitStack) -> None:
    """Connections are opened and closed meanwhile, and the next agent goes on with the counts."""
    two.publish(service(two))
    settled(two)
    held = [dial(two, who, opened) for who in CLIENTS for _ in range(2)]
    agent = two.agents[0]
    agent.stop(signal.SIGKILL)
    for _, each in held[::2]:
        each.close()
    more = [dial(two, who, opened) for who in CLIENTS]
    left = Counter(name for name, _ in [*held[1::2], *more])
    settled(two, *left.values())
    agent.start()
    two.publish(service(two))
    assert loads(two) == sorted(left.values())[::-1]
    opened.close()
    settled(two)


def test_connections_of_a_deleted_service_count_for_nobody_else(
    two: TwoNodes, opened: ExitStack
) -> None:
    """Its connections live on, by flows and sockets; then it comes back."""
    two.publish(service(two))
    settled(two)
    for who in CLIENTS:
        dial(two, who, opened)
    assert sum(loads(two)) == len(CLIENTS)
    two.publish()
    settled(two)
    two.publish(service(two))
    one = dial(two, "hooked", opened)
    assert loads(two) == [1]
    one[1].close()
    opened.close()
    settled(two)
    wait_until("all have ended", lambda: not list(two.maps["connections"].items()), 60)
