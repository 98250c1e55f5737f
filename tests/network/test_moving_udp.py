# SPDX-License-Identifier: Apache-2.0
"""UDP clients and their endpoint: they keep it as long as it serves, and follow every change.

Where flows are to move tests wait for conntrack (tests.kit.moved_flows); the flow tables have moved
them with the change itself. test_datagrams has the same of sockets, and test_stale_udp what becomes
of connected ones.
"""

import pytest

from ebpflb.kernel.node import sock_diag
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from tests.kit import requests
from tests.kit.lab_cluster import PORT
from tests.kit.moved_flows import wait_until_only
from tests.kit.parameters import both_engines, families
from tests.kit.sockets import CALL_SECONDS, Socket
from tests.kit.two_nodes import Frontends, TwoNodes

pytestmark = both_engines

FRONTENDS = Frontends(10)
LEAVING = {"ready": False, "terminating": True}
NEVER = {"ready": False, "serving": False}
A_MOMENT = 0.3  # seconds after which no one is going to answer
CLIENT_PORT = 12345  # as `nc -u -p 12345`

everybody = pytest.mark.parametrize("who", ["hooked", "unhooked", "near", "outside"])
ways = pytest.mark.parametrize("kind", ["cluster", "nodeport"])


@pytest.fixture(autouse=True)
def afresh(two: TwoNodes) -> None:
    two.delete_flows("other_flows")


def answers(client: Socket, times: int = 10) -> set[str]:
    """The backends that answer the datagrams of a connected socket."""
    found = set()
    for _ in range(times):
        client.send(b"?")
        found.add(requests.receive(client).name)
    return found


def leaving(two: TwoNodes, name: str, other: str, **conditions: bool) -> list[Manifest]:
    """The service with one endpoint that is leaving."""
    service, *slices = two.service("web", 10, getattr(two, other))
    for each, v6 in zip(slices, (False, True), strict=True):
        each["endpoints"] += two.endpoints(getattr(two, name), v6=v6, **LEAVING | conditions)
    return [service, *slices]


def from_one_port(
    two: TwoNodes, who: str, kind: str, seconds: float = CALL_SECONDS, *, v6: bool
) -> str:
    """The backend that answers a datagram from CLIENT_PORT in so many seconds; "" if none does from
    the Service's address: an answer that is on its way while conntrack's entry is deleted keeps the
    endpoint's, as with kube-proxy.
    """
    where = FRONTENDS.to(kind, two.near, v6=v6)
    with requests.udp_socket(two.sockets(getattr(two, who)), where[0]) as client:
        client.settimeout(seconds)
        client.bind(("::" if v6 else "0.0.0.0", CLIENT_PORT))
        try:
            said = requests.exchange(client, *where)
        except (TimeoutError, ConnectionRefusedError):
            return ""
        return said.name if said.peer == where else ""


@families
@everybody
@ways
@pytest.mark.parametrize("policy", ["Cluster", "Local"])
def test_udp_when_the_server_pod_cycles(
    two: TwoNodes, who: str, kind: str, policy: str, v6: bool
) -> None:
    """From one and the same port: the pod goes, another comes, at once or after a while without
    endpoints, and the client reaches it.
    """
    for pod in (two.here, two.twin, two.here):
        two.publish(two.service("web", 10, pod, internalTrafficPolicy=policy))
        wait_until_only(two.near, CLIENT_PORT, pod)
        assert from_one_port(two, who, kind, v6=v6) == pod.name
        two.publish(two.service("web", 10, pod, conditions=LEAVING, internalTrafficPolicy=policy))
        assert from_one_port(two, who, kind, v6=v6) == pod.name
    two.publish(two.service("web", 10, internalTrafficPolicy=policy))
    two.publish(two.service("web", 10, two.twin, internalTrafficPolicy=policy))
    wait_until_only(two.near, CLIENT_PORT, two.twin)
    assert from_one_port(two, who, kind, v6=v6) == "twin"


@families
@everybody
@ways
def test_udp_when_an_unready_endpoint_gets_ready(
    two: TwoNodes, who: str, kind: str, v6: bool
) -> None:
    """A client that was refused before the service was there or ready is served afterwards."""
    two.publish()
    two.delete_flows("other_flows")  # no one deletes those of a Service that went
    assert from_one_port(two, who, kind, A_MOMENT, v6=v6) == ""
    two.publish(two.service("web", 10, two.here, conditions=NEVER))
    assert from_one_port(two, who, kind, A_MOMENT, v6=v6) == ""
    two.publish(two.service("web", 10, two.here))
    wait_until_only(two.near, CLIENT_PORT, two.here)
    assert from_one_port(two, who, kind, v6=v6) == "here"


def with_port(published: list[Manifest], port: int) -> list[Manifest]:
    """The same, with the endpoints on this port."""
    for each in published:
        if each["kind"] == "EndpointSlice":
            each["ports"] = [{**named, "port": port} for named in each["ports"]]
    return published


@families
def test_changes_in_a_row(two: TwoNodes, v6: bool) -> None:
    """Each before the searches for sockets that follow the one before it are over."""
    for pod in (two.here, two.twin, two.there) * 3:
        two.write(two.service("web", 10, pod))

        def follows(pod: Host = pod) -> bool:
            return from_one_port(two, "outside", "nodeport", A_MOMENT, v6=v6) == pod.name

        wait_until(f"{pod.name} answers", follows)


@families
def test_a_terminating_endpoint_whose_process_has_ended(two: TwoNodes, v6: bool) -> None:
    """It keeps its flow while it serves; when it does not any more, the client reaches another,
    though it is still listed.
    """
    programs = [
        two.start_program(pod, "serve", pod.name, str(PORT)) for pod in (two.here, two.there)
    ]

    def asked() -> str:
        return from_one_port(two, "outside", "nodeport", A_MOMENT, v6=v6)

    two.publish(with_port(two.service("web", 10, two.here), PORT))
    wait_until("it answers", lambda: asked() == "here")
    two.publish(with_port(leaving(two, "here", "there"), PORT))
    assert asked() == "here"
    programs[0].kill()
    programs[0].wait()
    assert asked() == ""
    two.publish(with_port(leaving(two, "here", "there", serving=False), PORT))
    wait_until("the other answers", lambda: asked() == "there")
    programs[1].kill()
    programs[1].wait()


def swap(two: TwoNodes, *, swapped: bool) -> None:
    """The Service of "here" has the first frontends and that of "twin" the second, or reversed."""
    first, second = (20, 10) if swapped else (10, 20)
    two.publish(two.service("a", first, two.here), two.service("b", second, two.twin))


SWAPS = [(False, "here"), (True, "twin"), (False, "here")]
kinds = pytest.mark.parametrize("kind", ["cluster", "nodeport", "external"])


@families
@pytest.mark.parametrize(("who", "kind"), [("outside", "nodeport"), ("outside", "external")])
def test_packets_follow_a_frontend_to_another_service(
    two: TwoNodes, who: str, kind: str, v6: bool
) -> None:
    """Flows of a client outside go to the Service that has the NodePort or external IP now
    (kube-proxy.md 11.1).
    """
    where = FRONTENDS.to(kind, two.near, v6=v6)
    with requests.udp_socket(two.sockets(getattr(two, who)), where[0]) as client:
        client.connect(where)
        for swapped, name in SWAPS:
            swap(two, swapped=swapped)
            wait_until_only(two.near, client.getsockname()[1], getattr(two, name))
            assert answers(client, 3) == {name}


@families
@kinds
def test_an_unconnected_socket_follows_a_frontend_to_another_service(
    two: TwoNodes, kind: str, v6: bool
) -> None:
    """A socket of a pod that names the address with each datagram."""
    where = FRONTENDS.to(kind, two.near, v6=v6)
    with requests.udp_socket(two.sockets(two.hooked), where[0]) as client:
        for swapped, name in SWAPS:
            swap(two, swapped=swapped)
            assert {requests.exchange(client, *where).name for _ in range(3)} == {name}


@families
@kinds
@pytest.mark.skipif(not sock_diag.can_destroy(), reason="this kernel ends no sockets")
def test_a_connected_socket_is_ended_when_its_frontend_goes_to_another_service(
    two: TwoNodes, kind: str, v6: bool
) -> None:
    """As when its backend is removed; it connects again."""
    where = FRONTENDS.to(kind, two.near, v6=v6)
    swap(two, swapped=False)
    with requests.udp_socket(two.sockets(two.hooked), where[0]) as client:
        client.connect(where)
        assert answers(client, 1) == {"here"}
        swap(two, swapped=True)

        def is_ended() -> bool:
            try:
                return answers(client, 1) != {"here"}
            except OSError:
                return True

        wait_until("the socket is ended", is_ended)
    with requests.udp_socket(two.sockets(two.hooked), where[0]) as client:
        client.connect(where)
        assert answers(client, 1) == {"twin"}
