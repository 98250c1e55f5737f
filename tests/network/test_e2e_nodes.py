# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' e2e tests that take more than one node, or the same port again (kube-proxy.md 18).

The endpoint ``here`` is on the node near, ``there`` on far; "hooked" and "there" are the pods that
ask, "near" and "far" the nodes.
"""

from typing import Any

import pytest

from ebpflb.datapath.maps.layout import VERDICTS
from ebpflb.lab import manifests, traffic
from ebpflb.lab.hosts import Host
from ebpflb.lab.sockets import CALL_SECONDS
from tests.kit import requests
from tests.kit.moved_flows import wait_until_only
from tests.kit.two_nodes import ENGINES, Frontends, TwoNodes

FRONTENDS = Frontends(10)
LEAVING = {"ready": False, "terminating": True}
NEVER = {"ready": False, "serving": False}
A_MOMENT = 0.3  # seconds after which nobody is going to answer
CLIENT_PORT, OTHER_TARGET = 12345, 9090
TWELVE = range(12)  # so often one of two is missed once in 2000 times
OLD_RANGE, NEW_RANGE = ("10.96.0.0/16", "fd00:96::/64"), ("10.97.0.0/24", "fd00:97::/112")

pytestmark = pytest.mark.parametrize("two", ENGINES, indirect=True)
families = pytest.mark.parametrize("v6", [False, True], ids=["v4", "v6"])


def answer(
    two: TwoNodes,
    who: str,
    kind: str,
    node: Host,
    seconds: float = CALL_SECONDS,
    *,
    v6: bool = False,
) -> tuple[str, str]:
    """The backend that answers by TCP in so many seconds and the source it sees, or ("", "")."""
    where = FRONTENDS.to(kind, node, v6=v6)
    with requests.tcp_socket(two.sockets(getattr(two, who)), where[0]) as client:
        client.settimeout(seconds)
        try:
            client.connect(where)
            return traffic.read(client.recv(64))
        except TimeoutError:
            return "", ""


def publish(
    two: TwoNodes, *pods: Host, conditions: dict[str, bool] | None = None, **spec: Any
) -> None:
    """The service, with these endpoints in this condition."""
    service, *slices = two.service("web", 10, *pods, **spec)
    for each in slices:
        for endpoint in each["endpoints"]:
            endpoint["conditions"] |= conditions or {}
    two.publish(service, *slices)


def is_up(two: TwoNodes, kind: str, node: Host, *who: str, v6: bool = False) -> list[bool]:
    return [answer(two, each, kind, node, v6=v6)[0] == "here" for each in who]


def is_silent(two: TwoNodes, kind: str, node: Host, *who: str, v6: bool = False) -> list[bool]:
    return [answer(two, each, kind, node, A_MOMENT, v6=v6) == ("", "") for each in who]


@pytest.mark.extended
@families
def test_external_policy_changes(two: TwoNodes, v6: bool) -> None:
    """Local, Cluster and Local again: a node without endpoint does not answer clients elsewhere,
    its own processes do; an endpoint here sees its client."""
    of = {host: host.v6 if v6 else host.v4 for host in (two.near, two.far)}
    for policy in ("Local", "Cluster", "Local"):
        publish(two, two.here, externalTrafficPolicy=policy)
        assert answer(two, "far", "nodeport", two.near, v6=v6) == ("here", of[two.far])
        assert answer(two, "far", "nodeport", two.far, v6=v6) == ("here", of[two.far])
        assert answer(two, "near", "nodeport", two.near, v6=v6)[0] == "here"
        from_elsewhere = is_up if policy == "Cluster" else is_silent
        assert from_elsewhere(two, "nodeport", two.far, "near", v6=v6) == [True]


@families
@pytest.mark.parametrize("conditions", [{}, LEAVING], ids=["ready", "leaving"])
def test_internal_policy_local(two: TwoNodes, conditions: dict[str, bool], v6: bool) -> None:
    """Pods and processes of the endpoint's node are served, those of the other one are not."""
    publish(two, two.here, conditions=conditions, internalTrafficPolicy="Local")
    assert all(is_up(two, "cluster", two.near, "hooked", "near", v6=v6))
    assert all(is_silent(two, "cluster", two.near, "there", "far", v6=v6))


@families
def test_terminating_endpoint_and_policy_cluster(two: TwoNodes, v6: bool) -> None:
    """The only endpoint terminates: everybody is served on, by cluster IP and either node."""
    publish(two, two.here, conditions=LEAVING)
    for kind, node in (("cluster", two.near), ("nodeport", two.near), ("nodeport", two.far)):
        assert all(is_up(two, kind, node, "hooked", "near", "there", "far", v6=v6))


@families
def test_terminating_endpoint_and_external_policy_local(two: TwoNodes, v6: bool) -> None:
    """Its own node's port works from both nodes, the other node's from outside it does not."""
    publish(two, two.here, conditions=LEAVING, externalTrafficPolicy="Local")
    assert all(is_up(two, "nodeport", two.near, "hooked", "there", "far", v6=v6))
    assert all(is_silent(two, "nodeport", two.far, "hooked", "near", v6=v6))
    assert all(is_up(two, "nodeport", two.far, "there", "far", v6=v6))


@families
def test_load_balancer_changes(two: TwoNodes, v6: bool) -> None:
    """Scaled to nothing it is refused, scaled up it is back; as a ClusterIP it is closed."""
    publish(two, two.here)
    assert is_up(two, "balancer", two.near, "outside", "hooked", v6=v6) == [True, True]
    publish(two)
    for who in ("outside", "hooked", "near"):
        with pytest.raises(ConnectionRefusedError):
            answer(two, who, "balancer", two.near, v6=v6)
    publish(two, two.here)
    assert is_up(two, "balancer", two.near, "outside", "hooked", v6=v6) == [True, True]
    service, *slices = two.service("web", 10, two.here)
    del service["status"]
    service["spec"] |= {"type": "ClusterIP", "externalIPs": []}
    for port in service["spec"]["ports"]:
        del port["nodePort"]
    two.publish(service, *slices)
    with pytest.raises(ConnectionRefusedError):
        answer(two, "outside", "nodeport", two.near, v6=v6)
    assert is_silent(two, "balancer", two.near, "outside", v6=v6) == [True]
    assert is_up(two, "cluster", two.near, "hooked", v6=v6) == [True]


def from_one_port(
    two: TwoNodes, who: str, kind: str, seconds: float = CALL_SECONDS, *, v6: bool
) -> str:
    """The backend that answers a datagram from CLIENT_PORT in so many seconds; "" if none."""
    where = FRONTENDS.to(kind, two.near, v6=v6)
    with requests.udp_socket(two.sockets(getattr(two, who)), where[0]) as client:
        client.settimeout(seconds)
        client.bind(("::" if v6 else "0.0.0.0", CLIENT_PORT))
        try:
            said = requests.exchange(client, *where)
        except (TimeoutError, ConnectionRefusedError):
            return ""
        assert said.peer == where
        return said.name


datagrams = pytest.mark.parametrize("who", ["hooked", "unhooked", "near", "outside"])
ways = pytest.mark.parametrize("kind", ["cluster", "nodeport"])


@families
@datagrams
@ways
@pytest.mark.parametrize("policy", ["Cluster", "Local"])
def test_udp_when_the_server_pod_cycles(
    two: TwoNodes, who: str, kind: str, policy: str, v6: bool
) -> None:
    """From one and the same port: the pod goes, another comes, and the client reaches it."""
    for pod in (two.here, two.twin, two.here):
        publish(two, pod, internalTrafficPolicy=policy)
        wait_until_only(two.near, CLIENT_PORT, pod)
        assert from_one_port(two, who, kind, v6=v6) == pod.name
        publish(two, pod, conditions=LEAVING, internalTrafficPolicy=policy)
        assert from_one_port(two, who, kind, v6=v6) == pod.name


@families
@datagrams
@ways
def test_udp_when_an_unready_endpoint_gets_ready(
    two: TwoNodes, who: str, kind: str, v6: bool
) -> None:
    """A client that was refused before the service was there or ready is served afterwards."""
    two.publish()
    two.delete_flows("other_flows")  # nobody deletes those of a Service that went
    assert from_one_port(two, who, kind, A_MOMENT, v6=v6) == ""
    publish(two, two.here, conditions=NEVER)
    assert from_one_port(two, who, kind, A_MOMENT, v6=v6) == ""
    publish(two, two.here)
    wait_until_only(two.near, CLIENT_PORT, two.here)
    assert from_one_port(two, who, kind, v6=v6) == "here"


@families
@datagrams
def test_udp_when_the_target_port_changes(two: TwoNodes, who: str, v6: bool) -> None:
    """The pod stays and its port is another: the client comes to the new one."""
    server = two.start_program(two.here, "serve", "new", str(OTHER_TARGET))
    two.delete_flows("other_flows")
    publish(two, two.here)
    assert from_one_port(two, who, "nodeport", v6=v6) == "here"
    service, *slices = two.service("web", 10, two.here)
    for each in slices:
        each["ports"] = [{**port, "port": OTHER_TARGET} for port in each["ports"]]
    two.publish(service, *slices)
    wait_until_only(two.near, CLIENT_PORT)
    assert from_one_port(two, who, "nodeport", v6=v6) == "new"
    server.terminate()
    server.wait()


@families
def test_prefer_same_node(two: TwoNodes, v6: bool) -> None:
    """Each node's own endpoint serves it; when it goes the other does, and then it again."""
    for pods in ((two.here, two.there), (two.there,), (two.here, two.there)):
        service, *slices = two.service("web", 10, *pods, trafficDistribution="PreferSameNode")
        for each in slices:
            for endpoint in each["endpoints"]:
                endpoint["hints"] = {"forNodes": [{"name": endpoint["nodeName"]}]}
        two.publish(service, *slices)
        of_near = pods[0].name
        for who, kind in (("hooked", "cluster"), ("unhooked", "cluster"), ("outside", "balancer")):
            assert {answer(two, who, kind, two.near, v6=v6)[0] for _ in TWELVE} == {of_near}
        assert {answer(two, "far", "cluster", two.far, v6=v6)[0] for _ in TWELVE} == {"there"}


def unallocated(two: TwoNodes, host: str) -> bool:
    """Whether near drops what a pod sends there, as for an address that is kept and not given."""
    (number,) = (i for i, name in VERDICTS.items() if name == "unallocated")
    before = two.maps["verdicts"].get(number)[0]
    with requests.tcp_socket(two.sockets(two.unhooked), host) as client, pytest.raises(OSError):
        client.settimeout(A_MOMENT)
        client.connect((host, 80))
    return bool(two.maps["verdicts"].get(number)[0] > before)


@families
def test_different_service_cidrs(two: TwoNodes, v6: bool) -> None:
    """A new ServiceCIDR keeps its addresses at once, and a Service in it is served to all."""
    kept, new = manifests.service_cidr(*OLD_RANGE), manifests.service_cidr(*NEW_RANGE)
    new["metadata"]["name"] = "new"
    service, *slices = two.service("web", 10, two.here)
    service["spec"]["clusterIPs"] = vips = ["10.97.0.10", "fd00:97::10"]
    service["spec"]["clusterIP"] = vips[0]
    free = "fd00:97::99" if v6 else "10.97.0.99"
    for said, is_kept in (([kept], False), ([kept, new], True), ([kept], False)):
        two.publish(*said)
        assert unallocated(two, free) is is_kept
    two.publish(kept, new, service, *slices)
    for client in (two.hooked, two.unhooked, two.near, two.there, two.far):
        assert requests.tcp(two.sockets(client), vips[v6]).name == "here"
    assert unallocated(two, free)
