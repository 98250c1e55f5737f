# SPDX-License-Identifier: Apache-2.0
"""How connections are spread, by the scheduler: of sockets and of packets, as a client sees it."""

import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from errno import ECONNREFUSED
from math import gcd
from pathlib import Path

import pytest

from ebpflb.agent import missed_ends
from ebpflb.lab import cni
from ebpflb.lab.agents import wait_until
from ebpflb.lab.manifests import Manifest
from ebpflb.model.annotations import (
    LEAST_CONNECTIONS,
    ROUND_ROBIN,
    SCHEDULERS,
    SLOW_START_ANNOTATION,
)
from tests.kit import chances, requests
from tests.kit.parameters import both_engines, families
from tests.kit.requests import Send
from tests.kit.scheduled import (
    BY_SOCKETS,
    CLIENTS,
    ENDPOINTS,
    KINDS,
    SENDS,
    WEB,
    clients,
    dial,
    from_port,
    frontend,
    kinds,
    loads,
    met,
    protocols,
    service,
    settled,
    slices,
    weighted,
)
from tests.kit.two_nodes import TwoNodes

pytestmark = both_engines

PAIR = ("here", "there")
HERE = ("hooked", "unhooked")  # clients of the near node: by sockets, and by packets
OFF = 7  # connections
CONFIG = f"""\
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clusterCIDR: {",".join(cni.NETWORKS)}
mode: ipvs
ipvs: {{scheduler: wlc}}
"""

SETS = ENDPOINTS, ENDPOINTS, ("here", "there"), ENDPOINTS  # one goes, and comes back
DRAWN = [
    ("random", chances.EVEN),
    ("random", chances.UNEVEN),
    ("maglev", chances.UNEVEN),
    ("least-connections", chances.UNEVEN),
]


@pytest.mark.extended
@kinds
@pytest.mark.parametrize("drawn", DRAWN, ids=[f"{n}-{'-'.join(map(str, its))}" for n, its in DRAWN])
def test_connections_are_drawn_by_weight(
    two: TwoNodes, who: str, protocol: str, v6: bool, drawn: tuple[str, tuple[int, ...]]
) -> None:
    """The chi-square of a thousand, each from a port of its own."""
    name, its = drawn
    two.publish(weighted(two, name, its))
    two.delete_flows("tcp_flows" if protocol == "tcp" else "other_flows")
    where = frontend(two, who, v6=v6)
    found = two.request(getattr(two, who), protocol, *where, chances.DRAWS)
    assert not found["errors"]
    chances.assert_drawn(found["names"], dict(zip(ENDPOINTS, its, strict=True)))


def test_round_robin_counts_connections_of_all_cpus(two: TwoNodes) -> None:
    """Connections at the same time take different turns: each endpoint gets as many as the next."""
    two.publish(service(two, "round-robin"))
    with ThreadPoolExecutor(len(CLIENTS)) as threads:
        found = [
            name for names in threads.map(lambda who: met(two, who, 15), CLIENTS) for name in names
        ]
    assert Counter(found) == dict.fromkeys(ENDPOINTS, len(found) // 3)


@kinds
def test_a_round_of_round_robin_has_each_endpoint_as_often_as_its_weight(
    two: TwoNodes, who: str, protocol: str, v6: bool
) -> None:
    """Exactly, in any connections that follow each other, and in the same order in every round."""
    its = dict(zip(ENDPOINTS, chances.UNEVEN, strict=True))
    two.publish(weighted(two, "round-robin", its.values()))
    part = gcd(*its.values())
    size = sum(its.values()) // part
    found = met(two, who, 3 * size, SENDS[protocol], v6=v6)
    assert Counter(found[:size]) == {name: weight // part for name, weight in its.items()}
    assert found == found[:size] * 3


def test_weight_0_drains(two: TwoNodes, opened: ExitStack) -> None:
    """No new connections; one that is open goes on."""
    two.publish(service(two, "random", "there"))
    _, client = dial(two, "hooked", opened)
    two.publish(service(two, "random", "here"), slices(two, "there", 0))
    assert set(met(two, "hooked", 20) + met(two, "unhooked", 20)) == {"here"}
    assert client.getpeername()[:2] == (WEB.cluster[0], 80)
    assert requests.lives(client)


@pytest.mark.parametrize(
    ("who", "protocol", "v6"),
    [("unhooked", "tcp", False), ("outside", "tcp", True), ("unhooked", "udp", True)],
)
def test_maglev_keeps_what_a_packet_meets_when_an_endpoint_goes_or_comes(
    two: TwoNodes, who: str, protocol: str, v6: bool
) -> None:
    """From the same port a client of a node without its flow comes to the endpoint that it had:
    new flows of it, as they are when another node gets its packets.
    """

    def found(*pods: str) -> list[str]:
        two.publish(service(two, "maglev", *pods))
        names = [from_port(two, who, protocol, port, v6=v6) for port in range(12_000, 12_032)]
        two.delete_flows("tcp_flows" if protocol == "tcp" else "other_flows")
        return names

    before, again, without, back = (found(*pods) for pods in SETS)
    assert before == again == back
    stay = [(one, other) for one, other in zip(before, without, strict=True) if one != "twin"]
    assert 0 < len(stay) < len(before)
    # a change moves one in twelve of the others at most (tests/plan/test_tables.py)
    assert sum(one != other for one, other in stay) <= len(stay) // 12 + 1


def test_a_new_endpoint_starts_slowly(two: TwoNodes) -> None:
    """A tenth of the weight: one connection of eleven; later as many as the other has."""

    def published(seconds: str, *pods: str) -> None:
        found = service(two, "round-robin", *pods)
        found[0]["metadata"]["annotations"][SLOW_START_ANNOTATION] = seconds
        two.publish(found)

    published("1h", "here")
    assert set(met(two, "hooked", 5)) == {"here"}
    published("1h", "here", "there")
    for who, protocol, v6 in KINDS:
        found = met(two, who, 22, SENDS[protocol], v6=v6)
        assert Counter(found) == {"here": 20, "there": 2}
    published("1s", "here", "there")
    wait_until("the weight is whole", lambda: Counter(met(two, "hooked", 2))["there"] == 1)
    for who, protocol, v6 in KINDS:

        def half(who: str = who, send: Send = SENDS[protocol], v6: bool = v6) -> bool:
            return Counter(met(two, who, 20, send, v6=v6))["there"] == 10

        wait_until("each gets half", half)


@clients
@protocols
def test_source_hash_sends_a_client_to_one_endpoint(two: TwoNodes, who: str, send: Send) -> None:
    """In either family; an endpoint that goes or comes moves only clients that met it."""
    two.publish(service(two, "source-hash"))
    for v6 in (False, True):
        (name,) = set(met(two, who, 10, send, v6=v6))
        gone = next(each for each in ENDPOINTS if each != name)
        two.publish(service(two, "source-hash", *(each for each in ENDPOINTS if each != gone)))
        kept = set(met(two, who, 5, send, v6=v6))
        two.publish(service(two, "source-hash"))
        assert set(met(two, who, 5, send, v6=v6)) == {name}
        assert len(kept) == 1


def test_explain_and_services_say_the_scheduler_and_the_shares(two: TwoNodes) -> None:
    """Of what the maps hold, so of what programs do."""
    two.publish(service(two, "round-robin", "here"), slices(two, "there", 25))
    said = two.ebpflb("explain", f"{WEB.cluster[0]}:80").stdout
    assert "in turn (round-robin)" in said
    assert "80.0%" in said and "20.0%" in said
    said = two.ebpflb("services", "get", "default/web", "-o", "wide").stdout
    assert "round-robin" in said
    assert "80%" in said and "20%" in said


@pytest.mark.extended
def test_open_connections_live_on_and_those_that_were_counted_end_once(
    two: TwoNodes, opened: ExitStack
) -> None:
    """From each scheduler to the next, and back to the one that counts."""
    two.publish(service(two, LEAST_CONNECTIONS))
    settled(two)
    held = [dial(two, who, opened)[1] for who in CLIENTS]
    for name in (*SCHEDULERS, LEAST_CONNECTIONS):
        counted = sum(loads(two))
        two.publish(service(two, name))
        held += [dial(two, who, opened)[1] for who in CLIENTS]
        more = len(CLIENTS) if name == LEAST_CONNECTIONS else 0
        assert sum(loads(two)) == counted + more, name
        assert all(map(requests.lives, held)), name
    opened.close()
    settled(two)


def is_refused(two: TwoNodes, who: str) -> bool:
    where = frontend(two, who)
    with requests.tcp_socket(two.sockets(getattr(two, who)), where[0]) as client:
        return bool(client.connect_ex(where) == ECONNREFUSED)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_where_every_weight_is_0_new_connections_are_refused_and_open_ones_live(
    two: TwoNodes, name: str, opened: ExitStack
) -> None:
    """Until one has a weight again."""
    two.publish(service(two, name))
    held = [dial(two, who, opened)[1] for who in CLIENTS]
    two.publish(weighted(two, name, (0, 0, 0)))
    assert all(is_refused(two, who) for who in CLIENTS)
    assert all(map(requests.lives, held))
    two.publish(weighted(two, name, (1, 1, 1)))
    held += [dial(two, who, opened)[1] for who in CLIENTS]
    assert all(map(requests.lives, held))


def counted(two: TwoNodes, *pods: str) -> list[Manifest]:
    return service(two, LEAST_CONNECTIONS, *(pods or PAIR))


@pytest.mark.extended
@clients
@families
def test_new_connections_go_to_the_endpoint_with_fewest(
    two: TwoNodes, who: str, v6: bool, opened: ExitStack
) -> None:
    """While all stay open they alternate; where one endpoint's have ended it gets the next ones."""
    two.publish(counted(two))
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
    two.publish(counted(two, "here"), slices(two, "there", 25))
    settled(two)
    held = Counter(dial(two, who, opened)[0] for _ in range(60))
    assert abs(held["there"] - 60 * 25 // 125) <= OFF
    opened.close()
    settled(two)


@clients
def test_datagrams_count_as_long_as_their_socket_or_flow_lives(
    two: TwoNodes, who: str, opened: ExitStack
) -> None:
    """Sockets until they are released; flows until they are gone and the agent has swept."""
    two.publish(counted(two))
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
    two.publish(counted(two))
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
    two.publish(counted(two))
    assert loads(two) == sorted(left.values())[::-1]
    opened.close()
    settled(two)


@pytest.fixture
def configured(two: TwoNodes, tmp_path: Path) -> Iterator[None]:
    """The near node's agent runs with this configuration beside its own options."""
    (config := tmp_path / "config.yaml").write_text(CONFIG)
    usual = two.agents[0].options
    two.restart(*usual, "--config", str(config))
    yield
    two.restart(*usual)


@pytest.mark.usefixtures("configured")
def test_a_configuration_of_mode_ipvs_has_a_default(two: TwoNodes, opened: ExitStack) -> None:
    """Connections are counted, as by wlc; a Service's annotation goes before that."""
    two.publish(service(two, None, *PAIR))
    for number, who in enumerate(HERE, 1):
        assert {dial(two, who, opened)[0] for _ in PAIR} == {*PAIR}
        assert loads(two) == [number] * 2
    opened.close()
    settled(two)
    two.publish(service(two, ROUND_ROBIN, *PAIR))
    for who in HERE:
        names = met(two, who, 6)
        assert names == names[:2] * 3 and {*names} == {*PAIR}
    assert not loads(two)
