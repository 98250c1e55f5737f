# SPDX-License-Identifier: Apache-2.0
"""Services that answer on ranges of ports at their external addresses, and keep the port."""

import json
from functools import partial
from itertools import product
from typing import Any

import pytest

from ebpflb.lab import traffic
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from ebpflb.model.annotations import ON_REMOVAL_ANNOTATION, PORTS_ANNOTATION
from tests.kit import forked, requests, two_nodes
from tests.kit.parameters import families
from tests.kit.requests import Send
from tests.kit.two_nodes import Frontends, TwoNodes

WEB, OTHER = Frontends(10), Frontends(11)
FIRST, MIDDLE, LAST, BEYOND = PORTS = (10000, 10007, 10100, 10101)
BOTH = f"{FIRST}-{LAST}/udp,{FIRST}-{LAST}"
A_MOMENT = 0.5  # seconds without an answer
NO_HOST = "198.51.100.77"  # outside, and not an address of a namespace here
sends = pytest.mark.parametrize("send", [requests.tcp, requests.udp, requests.connected_udp])
clients = pytest.mark.parametrize("who", ["outside", "hooked", "unhooked", "near"])


def _serve(two: TwoNodes) -> None:
    for pod in (two.here, two.there):
        for port in PORTS:
            two.start_program(pod, "serve", pod.name, str(port))


two = two_nodes.fixture(prepare=_serve)


def service(two: TwoNodes, *pods: Host, annotated: str = BOTH, **spec: Any) -> list[Manifest]:
    """The Service web with ranges of ports; `spec` may have other annotations."""
    found = two.service("web", 10, *pods, **spec)
    found[0]["metadata"]["annotations"] = {PORTS_ANNOTATION: annotated}
    return found


def answer(
    two: TwoNodes, who: str, send: Send, where: tuple[str, int], seconds: float = 10.0
) -> str:
    """Who answers; "refused", or "" if there is no answer."""
    with requests.socket_of(send, two.sockets(getattr(two, who)), where[0]) as client:
        client.settimeout(seconds)
        try:
            if send is requests.udp:
                return requests.exchange(client, *where).name
            client.connect(where)
            if send is requests.connected_udp:
                client.send(b"?")
            return traffic.read(client.recv(64))[0]
        except ConnectionRefusedError:
            return "refused"
        except OSError:
            return ""


def at(kind: str, port: int, *, v6: bool) -> tuple[str, int]:
    addresses: list[str] = getattr(WEB, kind)
    return addresses[v6], port


@families
@clients
@sends
def test_an_endpoint_gets_the_port(two: TwoNodes, who: str, send: Send, v6: bool) -> None:
    """The client sees the address and port that it asked for; its endpoint may be on any node."""
    for pod in (two.here, two.there):
        two.publish(service(two, pod))
        for kind, port in product(("balancer", "external"), (FIRST, MIDDLE, LAST)):
            where = at(kind, port, v6=v6)
            found = send(two.sockets(getattr(two, who)), *where)
            assert (found.name, found.peer) == (pod.name, where)


@families
@pytest.mark.parametrize("who", ["outside", "hooked"])
def test_nothing_else_is_served(two: TwoNodes, who: str, v6: bool) -> None:
    """A port beyond the range, another protocol, the cluster IP, and the node's address are not."""
    two.publish(service(two, two.here, annotated=f"{FIRST}-{LAST}/udp"))
    assert answer(two, who, requests.udp, at("balancer", LAST, v6=v6)) == "here"
    served = partial(answer, two, who, seconds=A_MOMENT)
    assert served(requests.udp, at("balancer", BEYOND, v6=v6)) != "here"
    assert served(requests.tcp, at("balancer", LAST, v6=v6)) != "here"
    assert served(requests.udp, at("cluster", LAST, v6=v6)) != "here"
    assert served(requests.udp, (two.near.v6 if v6 else two.near.v4, LAST)) != "here"
    two.publish(two.service("web", 10, two.here))
    assert served(requests.udp, at("balancer", LAST, v6=v6)) != "here"


@families
@clients
@sends
def test_without_an_endpoint_it_is_refused(two: TwoNodes, who: str, send: Send, v6: bool) -> None:
    """And dropped for clients outside if there is one, but not on this node, with policy Local."""
    where = at("balancer", MIDDLE, v6=v6)
    two.publish(service(two))
    if send is not requests.udp:  # an unconnected socket is not told
        assert answer(two, who, send, where) == "refused"
    two.publish(service(two, two.there, externalTrafficPolicy="Local"))
    if who == "outside":
        assert not answer(two, who, send, where, A_MOMENT)
    else:
        assert answer(two, who, send, where) == "there"
    two.publish(service(two, two.here, two.there, externalTrafficPolicy="Local"))
    if who == "outside":
        found = send(two.sockets(two.outside), *where)
        assert (found.name, found.source) == ("here", two.outside.v6 if v6 else two.outside.v4)


@families
@sends
def test_source_ranges_hold(two: TwoNodes, send: Send, v6: bool) -> None:
    outside = two.outside.v6 if v6 else two.outside.v4
    for network, name in (("198.51.100.77/32", ""), (outside, "here")):
        networks = ["fd00:77::1/128" if v6 else "198.51.100.77/32"]
        if name:
            networks = [f"{network}/{128 if v6 else 32}"]
        two.publish(service(two, two.here, loadBalancerSourceRanges=networks))
        asked = two, "outside", send, at("balancer", MIDDLE, v6=v6)
        assert answer(*asked, 10.0 if name else A_MOMENT) == name
        assert answer(two, "outside", send, at("external", MIDDLE, v6=v6)) == "here"


@families
@pytest.mark.parametrize("who", ["outside", "hooked", "near"])
@sends
def test_session_affinity_is_for_all_ports(two: TwoNodes, who: str, send: Send, v6: bool) -> None:
    """As media streams and their control streams need it, which use two ports."""
    two.publish(service(two, two.here, two.there, sessionAffinity="ClientIP"))
    found = {answer(two, who, send, at("balancer", port, v6=v6)) for port in PORTS[:3] * 5}
    assert found in ({"here"}, {"there"})


@families
@clients
@sends
def test_a_port_of_its_own_takes_precedence(two: TwoNodes, who: str, send: Send, v6: bool) -> None:
    """Of any Service, also of a younger one."""
    other = two.service("other", 11, two.there, ingress=WEB.balancer)
    for port in other[0]["spec"]["ports"]:
        port["port"] = MIDDLE
    two.publish(service(two, two.here), other)
    assert answer(two, who, send, at("balancer", MIDDLE, v6=v6)) == "there"
    assert answer(two, who, send, at("balancer", LAST, v6=v6)) == "here"
    assert answer(two, who, send, at("balancer", FIRST, v6=v6)) == "here"


@families
@clients
def test_a_udp_flow_moves(two: TwoNodes, who: str, v6: bool) -> None:
    """Its next datagrams go to the endpoint that is left; an unconnected socket's, too."""
    where = at("balancer", MIDDLE, v6=v6)
    two.publish(service(two, two.here))
    with requests.udp_socket(two.sockets(getattr(two, who)), where[0]) as client:
        client.settimeout(A_MOMENT)
        for pod in (two.here, two.there, two.here):
            two.publish(service(two, pod))
            wait_until(
                f"{pod.name} answers", partial(requests.is_answered_by, client, where, pod.name)
            )


@families
@pytest.mark.parametrize("who", ["hooked", "near"])
def test_a_connected_udp_socket_is_ended(two: TwoNodes, who: str, v6: bool) -> None:
    """When its endpoint is gone and another one serves."""
    where = at("balancer", MIDDLE, v6=v6)
    two.publish(service(two, two.here))
    with requests.udp_socket(two.sockets(getattr(two, who)), where[0]) as client:
        client.settimeout(A_MOMENT)
        client.connect(where)
        client.send(b"?")
        assert requests.receive(client).name == "here"
        two.publish(service(two, two.there))

        def is_ended() -> bool:
            try:
                client.send(b"?")
                requests.receive(client)
            except TimeoutError:
                return False
            except OSError:
                return True
            return False

        wait_until("the socket is ended", is_ended)
    assert answer(two, who, requests.connected_udp, where) == "there"


@families
@clients
def test_connections_last(two: TwoNodes, who: str, v6: bool) -> None:
    """Over a change of the range, of the endpoints, and a restart of the agents."""
    where = at("balancer", MIDDLE, v6=v6)
    two.publish(service(two, two.here))
    client, name = requests.connected(two.sockets(getattr(two, who)), *where)
    with client:
        assert name == "here"
        for annotated in (f"{FIRST}-{MIDDLE}", f"{FIRST}-{LAST}", BOTH):
            two.publish(service(two, two.here, two.there, annotated=annotated))
            assert requests.lives(client)
        two.restart(*two_nodes.CLUSTER_CIDR)
        assert requests.lives(client)
        assert answer(two, who, requests.udp, at("balancer", LAST, v6=v6)) in ("here", "there")


@families
@clients
def test_connections_are_reset_on_removal(two: TwoNodes, who: str, v6: bool) -> None:
    """With on-removal: reset."""
    where = at("balancer", MIDDLE, v6=v6)

    def published(*pods: Host) -> None:
        found = service(two, *pods)
        found[0]["metadata"]["annotations"] |= {ON_REMOVAL_ANNOTATION: "reset=0s"}
        two.publish(found)

    published(two.here, two.there)
    client, name = requests.connected(two.sockets(getattr(two, who)), *where)
    with client:
        client.settimeout(10)
        published(two.there if name == "here" else two.here)
        with pytest.raises(ConnectionError):
            assert client.recv(1)


@families
def test_the_older_service_has_a_range(two: TwoNodes, v6: bool) -> None:
    """Of two that overlap; when it is gone, the other one answers on the whole range."""
    younger = two.service("younger", 11, two.there, ingress=WEB.balancer)
    younger[0]["metadata"]["annotations"] = {PORTS_ANNOTATION: f"{MIDDLE}-{LAST + 9}/udp"}
    older = service(two, two.here)
    older[0]["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    younger[0]["metadata"]["creationTimestamp"] = "2026-02-01T00:00:00Z"
    two.publish(older, younger)
    asked = partial(answer, two, "outside", requests.udp)
    assert asked(at("balancer", MIDDLE, v6=v6)) == "here"
    assert asked(at("balancer", BEYOND, v6=v6), A_MOMENT) != "there"
    status = json.loads(two.ebpflb("status", "-o", "json").stdout)
    contested = {at: said for at, said in status["contested"].items() if WEB.balancer[v6] in at}
    assert "default/web has ports of it, not default/younger" in contested.values()
    two.publish(younger)
    assert asked(at("balancer", BEYOND, v6=v6)) == asked(at("balancer", MIDDLE, v6=v6)) == "there"


def test_it_is_shown(two: TwoNodes) -> None:
    """By `explain`, `services get`, `maps dump` and `flows list`."""
    two.publish(service(two, two.here))
    address = WEB.balancer[0]
    where, in_range = (address, MIDDLE), f"{address}:{FIRST}-{LAST}"
    explained = two.ebpflb("explain", f"{address}:{MIDDLE}/udp", "--from", NO_HOST).stdout
    assert f"range of ports of default/web:*/UDP: the endpoint gets port {MIDDLE}" in explained
    assert f"destination {two.here.v4}:{MIDDLE}" in explained
    page = json.loads(two.ebpflb("services", "get", "default/web", "-o", "json").stdout)
    rows = [
        row
        for port in page["ports"]
        if port["port"] == "default/web:*/UDP"
        for row in port["frontends"]
    ]
    assert in_range in {row["frontend"] for row in rows}
    dumped = json.loads(two.ebpflb("maps", "dump", "services", "-o", "json").stdout)
    services = dumped["maps"]["services"]
    frontends = [row["frontend"] for row in services if row["service"].endswith(":*/UDP")]
    assert frontends.count(in_range) == 1
    client, _ = requests.connected(two.sockets(two.outside), *where)
    with client:
        agent = two.agents[0]
        state = agent.where[:2]
        listed = forked.run("flows", "list", "-o", "json", *state, netns=agent.node.netns)
        said = listed.stdout
        assert f"{address}:{MIDDLE}" in said and "default/web:*" in said, listed.stderr
        port = str(client.getsockname()[1])
        said = two.ebpflb(
            "explain", f"{address}:{MIDDLE}", "--from", two.outside.v4, "--from-port", port
        ).stdout
        assert f"{two.here.v4}:{MIDDLE}" in said
