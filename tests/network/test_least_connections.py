# SPDX-License-Identifier: Apache-2.0
"""Connections to a Service with the scheduler least-connections are counted while they are open.

They go by the flow tables also where netfilter is the engine, so both count the same.
"""

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from ebpflb.agent import ended_connections
from ebpflb.datapath.maps.bpf_map import Map
from ebpflb.lab import traffic
from ebpflb.lab.agents import wait_until
from ebpflb.lab.manifests import Manifest
from ebpflb.lab.sockets import Socket
from ebpflb.model import scheduler, weights
from tests.kit import requests
from tests.kit.two_nodes import ENGINES, Frontends, TwoNodes

NUMBER = 12
WEB = Frontends(NUMBER)
CLIENTS = ("hooked", "near", "unhooked", "outside")  # by sockets, and by packets
BY_SOCKETS = ("hooked", "near")
OFF = 7  # connections

pytestmark = pytest.mark.parametrize("two", ENGINES, indirect=True)
clients = pytest.mark.parametrize("who", CLIENTS)


def service(two: TwoNodes, *pods: str) -> list[Manifest]:
    found = two.service("web", NUMBER, *(getattr(two, pod) for pod in pods or ("here", "there")))
    found[0]["metadata"]["annotations"] = {scheduler.SCHEDULER_ANNOTATION: "least-connections"}
    return found


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def dial(two: TwoNodes, who: str, opened: ExitStack, kind: str, *, v6: bool) -> tuple[str, Socket]:
    """An open connection, or connected UDP socket, and the endpoint that it has."""
    client = getattr(two, who)
    outside = client is two.outside
    where = WEB.to("nodeport" if outside else "cluster", two.near, v6=v6)
    make = requests.tcp_socket if kind == "tcp" else requests.udp_socket
    made = opened.enter_context(make(two.sockets(client), where[0]))
    made.connect(where)
    if kind == "udp":
        made.send(b"?")
    return traffic.read(made.recv(64))[0], made


def maps(two: TwoNodes) -> dict[str, Map]:
    return two.maps_of(two.agents[0])


def loads(two: TwoNodes) -> list[int]:
    """The counts of the near node that are not 0, the largest first."""
    return sorted((each.open for _, each in maps(two)["backend_loads"].items() if each.open))[::-1]


def settled(two: TwoNodes, *wanted: int) -> None:
    """A FIN that was sent last is still on its way."""
    expected = sorted(filter(None, wanted))[::-1]
    wait_until(f"the counts are {expected}", lambda: loads(two) == expected, 60)


@pytest.mark.extended
@clients
@pytest.mark.parametrize("v6", [False, True], ids=["v4", "v6"])
def test_new_connections_go_to_the_endpoint_with_fewest(
    two: TwoNodes, who: str, v6: bool, opened: ExitStack
) -> None:
    """While all stay open they alternate; where one endpoint's have ended it gets the next ones."""
    two.publish(service(two))
    settled(two)
    held = [dial(two, who, opened, "tcp", v6=v6) for _ in range(8)]
    assert Counter(name for name, _ in held) == {"here": 4, "there": 4}
    assert loads(two) == [4, 4]
    for name, each in held:
        if name == "here":
            each.close()
    settled(two, 4)
    assert {dial(two, who, opened, "tcp", v6=v6)[0] for _ in range(4)} == {"here"}
    opened.close()
    settled(two)


@clients
def test_open_connections_are_as_many_as_the_weights_say(
    two: TwoNodes, who: str, opened: ExitStack
) -> None:
    """Of those that are held at once; OFF more or less come once in a million times."""
    main, canary = service(two, "here"), service(two, "there")
    for slice in canary[1:]:
        slice["metadata"]["name"] += "-canary"
        slice["metadata"]["annotations"] = {weights.WEIGHT_ANNOTATION: "25"}
    two.publish(main, canary[1:])
    settled(two)
    held = Counter(dial(two, who, opened, "tcp", v6=False)[0] for _ in range(60))
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
        name, each = dial(two, who, opened, "tcp", v6=False)
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
        wait_until("swept", lambda: not loads(two), 8 * ended_connections.RECOUNT_INTERVAL)
    assert not list(maps(two)["connections"].items())


def test_an_agent_that_is_killed_leaves_exact_counts(two: TwoNodes, opened: ExitStack) -> None:
    """Connections are opened and closed meanwhile, and the next agent goes on with the counts."""
    two.publish(service(two))
    settled(two)
    held = [dial(two, who, opened, "tcp", v6=False) for who in CLIENTS for _ in range(2)]
    agent = two.agents[0]
    agent.stop(signal.SIGKILL)
    for _, each in held[::2]:
        each.close()
    more = [dial(two, who, opened, "tcp", v6=False) for who in CLIENTS]
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
        dial(two, who, opened, "tcp", v6=False)
    assert sum(loads(two)) == len(CLIENTS)
    two.publish()
    settled(two)
    two.publish(service(two))
    one = dial(two, "hooked", opened, "tcp", v6=False)
    assert loads(two) == [1]
    one[1].close()
    opened.close()
    settled(two)
    wait_until("all have ended", lambda: not list(maps(two)["connections"].items()), 60)
