# SPDX-License-Identifier: Apache-2.0
"""Least-connections beyond what the maps hold: connections are made, and counts stay what they say.

Its maps are as small as they can be chosen, and the connections are real.
"""

import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import cycle

import pytest

from ebpflb.agent import missed_ends
from ebpflb.lab import traffic
from ebpflb.lab.agents import wait_until
from ebpflb.lab.manifests import Manifest
from ebpflb.lab.sockets import Socket
from ebpflb.model.annotations import LEAST_CONNECTIONS, SCHEDULER_ANNOTATION
from ebpflb.plan.flow_entries import Hook, Tuple
from tests.kit import scheduled, two_nodes
from tests.kit.scheduled import dial, settled
from tests.kit.two_nodes import Frontends, TwoNodes

BUSY = Frontends(18)
FULL = 1024  # entries
FLOWS = "flows=66560,other-flows=66560"
SIZES = f"--map-size=connections={FULL},sockets={FULL},{FLOWS}"
PATIENT = "--conntrack-udp-timeout=10m"  # opening that many takes minutes where it is emulated
AT_ONCE, WAYS = 5000, ("external", "balancer", "nodeport")
MORE = 3  # connections that find no space
SWEPT = 8 * missed_ends.RECOUNT_INTERVAL
# Who fills the map by what: sockets, or flows of packets.
FILLED = [("hooked", "tcp"), ("hooked", "udp"), ("outside", "tcp"), ("unhooked", "udp")]

Held = list[tuple[str, Socket]]  # with the endpoint's name


@pytest.fixture(scope="module", autouse=True)
def descriptors() -> Iterator[None]:
    """As many as may be had: one process holds all sockets of a client, and 1,024 are usual."""
    former = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (former[1], former[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, former)


two = two_nodes.fixture(SIZES, PATIENT)


def web(two: TwoNodes, *pods: str) -> list[Manifest]:
    return scheduled.service(two, LEAST_CONNECTIONS, *pods)


def busy(two: TwoNodes) -> list[Manifest]:
    """Another Service with the same scheduler."""
    made = two.service("busy", 18, two.here, two.there)
    made[0]["metadata"]["annotations"] = {SCHEDULER_ANNOTATION: LEAST_CONNECTIONS}
    return made


def ask(client: Socket) -> str:
    """The endpoint that answers a datagram."""
    client.send(b"?")
    return traffic.read(client.recv(64))[0]


def uncounted(two: TwoNodes) -> int:
    return sum(each.uncounted for _, each in two.maps["backend_loads"].items())


def end(two: TwoNodes, who: str, kind: str, held: Held) -> None:
    """Closes the sockets; of datagrams that are packets their flows expire, too."""
    ports = {each.getsockname()[1] for _, each in held}
    for _, each in held:
        each.close()
    if (who, kind) == ("unhooked", "udp"):
        flows = two.maps["other_flows"]
        flows.delete([key for key, _ in flows.items() if client_port(key) in ports])


def client_port(key: Tuple) -> int:
    return key.source_port if key.hook == Hook.INGRESS else key.destination_port


@pytest.mark.parametrize(("who", "kind"), FILLED)
def test_what_finds_no_space_is_not_counted_and_is_served(
    two: TwoNodes, who: str, kind: str, opened: ExitStack
) -> None:
    """By the counts that there are; where there is space again new connections are counted."""
    two.publish(web(two, "here"))
    settled(two)
    before, most = uncounted(two), FULL * 3 // 4
    held = [dial(two, who, opened, kind) for _ in range(most)]
    two.publish(web(two, "here", "there"))
    held += [dial(two, who, opened, kind) for _ in range(FULL - most)]
    names = Counter(name for name, _ in held)
    assert names == {"here": most, "there": FULL - most}
    settled(two, most, FULL - most)
    assert uncounted(two) == before

    more = [dial(two, who, opened, kind) for _ in range(MORE)]
    assert {name for name, _ in more} == {"there"}
    assert uncounted(two) == before + MORE
    settled(two, most, FULL - most)

    end(two, who, kind, held[:MORE] + held[-MORE:])
    settled(two, most - MORE, FULL - most - MORE)
    again = [dial(two, who, opened, kind) for _ in range(MORE)]
    assert {name for name, _ in again} == {"there"}
    settled(two, most - MORE, FULL - most)
    assert uncounted(two) == before + MORE
    end(two, who, kind, more)
    settled(two, most - MORE, FULL - most)
    end(two, who, kind, held[MORE:-MORE] + again)
    settled(two)
    empty(two)


@pytest.mark.parametrize(("who", "kind"), [("outside", "tcp"), ("unhooked", "udp")])
def test_flows_that_an_lru_evicts_are_ended_by_the_agent(
    two: TwoNodes, who: str, kind: str, opened: ExitStack
) -> None:
    """Flows of another Service take their entries; then they count no more, and new ones do."""
    two.publish(web(two, "here", "there"), busy(two))
    settled(two)
    held = [dial(two, who, opened, kind) for _ in range(8)]
    settled(two, 4, 4)
    evict(two, who, kind)
    two.publish(web(two, "here", "there"))
    settled(two)
    empty(two)
    if kind == "udp":  # a TCP connection without its entries breaks (docs/limits.md)
        for number, (_, each) in enumerate(held, 1):
            ask(each)
            settled(two, number // 2, number - number // 2)
    else:
        dial(two, who, opened, kind)
        settled(two, 1)
    end(two, who, kind, held)


def empty(two: TwoNodes) -> None:
    wait_until("nothing is left", lambda: not list(two.maps["connections"].items()), SWEPT)


def evict(two: TwoNodes, who: str, kind: str) -> None:
    """Requests to another Service, each a flow of its own, until the first has no entry left."""
    flows = two.maps["tcp_flows" if kind == "tcp" else "other_flows"]
    ids = {id for id, it in two.maps["service_names"].items() if it.service == "web"}
    ways = cycle(BUSY.to(frontend, two.near, v6=v6) for frontend in WAYS for v6 in (False, True))
    while any(flow.service in ids for _, flow in flows.items()):
        two.request(getattr(two, who), kind, *next(ways), AT_ONCE)
    two.delete_flows("tcp_flows" if kind == "tcp" else "other_flows")  # theirs fill the map
