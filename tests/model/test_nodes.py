# SPDX-License-Identifier: Apache-2.0
"""The facts in a Node object (kube-proxy.md 3.1, 17)."""

from dataclasses import replace
from ipaddress import ip_address
from typing import Any

import msgspec
import pytest

from ebpflb.lab import manifests
from ebpflb.model import nodes, objects, services
from ebpflb.model.addresses import Family
from ebpflb.model.annotations import NODE_LOCAL_ANNOTATION
from ebpflb.model.events import Key
from ebpflb.model.nodes import MOST, Listener, NodeLocalPorts, listener
from ebpflb.model.services import Admission, ParsedService, Protocol
from tests.model import builders


def test_internal_addresses_first() -> None:
    """InternalIPs come before ExternalIPs; names and unreadable addresses are left out."""
    node = builders.node(
        ("Hostname", "192.0.2.99"),
        ("ExternalIP", "192.0.2.1"),
        ("InternalIP", "x"),
        ("InternalIP", "10.0.0.7"),
        ("InternalIP", "fd00::7"),
    )
    assert [str(each) for each in nodes.addresses(node)] == ["10.0.0.7", "fd00::7", "192.0.2.1"]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"podCIDRs": ["10.1.0.0/24", "fd00:1::/64"]}, ["10.1.0.0/24", "fd00:1::/64"]),
        (
            {"podCIDRs": ["fd00:1::/64", "10.1.0.0/24", "10.2.0.0/24"]},
            ["fd00:1::/64", "10.1.0.0/24"],
        ),
        ({"podCIDRs": ["10.1.0.0/24"], "podCIDR": "10.9.0.0/24"}, ["10.1.0.0/24"]),
        ({"podCIDR": "10.9.0.0/24"}, ["10.9.0.0/24"]),
        ({"podCIDRs": [], "podCIDR": "10.9.0.0/24"}, ["10.9.0.0/24"]),
        ({"podCIDRs": ["x", "10.1.0.7/24"]}, ["10.1.0.0/24"]),
        ({"podCIDRs": None}, []),
        ({}, []),
    ],
)
def test_pod_cidrs(spec: dict[str, Any], expected: list[str]) -> None:
    """The first readable CIDR of each family counts; podCIDR replaces missing podCIDRs."""
    assert [str(each) for each in nodes.pod_cidrs(builders.node(**spec))] == expected


def test_the_first_address_of_each_family_counts() -> None:
    """The first address of each family counts, and the first family is the node's own."""
    listed = [ip_address(text) for text in ("fd00::7", "10.0.0.7", "fd00::8", "10.0.0.8")]
    assert list(nodes.primary_addresses(listed).items()) == [
        (Family.IPV6, listed[0]),
        (Family.IPV4, listed[1]),
    ]


# The nodes that load balancers should use, and the reasons (kube-proxy.md 13.1, 16.4).


def node(spec: dict[str, Any] | None = None, **metadata: Any) -> objects.Node:
    manifest = manifests.node("here")
    manifest["metadata"] |= metadata
    manifest["spec"] = spec
    return msgspec.convert(manifest, objects.Node)


def test_node_that_is_being_deleted_is_not_eligible() -> None:
    """A Node that is being deleted has metadata.deletionTimestamp."""
    assert nodes.eligible(node())
    assert not nodes.eligible(node(deletionTimestamp="2026-01-01T00:00:00Z"))


@pytest.mark.parametrize("effect", ["NoSchedule", "NoExecute", "PreferNoSchedule", ""])
@pytest.mark.parametrize("value", [{}, {"value": ""}, {"value": "1700000000"}])
def test_autoscalers_taint_makes_it_ineligible(effect: str, value: dict[str, str]) -> None:
    """A taint counts by its key only, with any effect and value."""
    other = {"key": "other", "effect": effect}
    doomed = {"key": "ToBeDeletedByClusterAutoscaler", "effect": effect} | value
    assert not nodes.eligible(builders.node(taints=[other, doomed]))


@pytest.mark.parametrize(
    "spec",
    [
        None,
        {"taints": None},
        {"taints": []},
        {"unschedulable": True, "taints": [{"key": "node.kubernetes.io/unschedulable"}]},
        {"taints": [{"key": "node.kubernetes.io/not-ready"}, {"key": "tobedeleted"}]},
        {"taints": [{"key": "DeletionCandidateOfClusterAutoscaler"}]},
    ],
)
def test_other_taints_and_unschedulable_do_not_matter(spec: dict[str, Any] | None) -> None:
    """A cordoned node still gets traffic."""
    assert nodes.eligible(node(spec))


# Which listener on the node a Service names for its sockets, and which ones are asked.

V4, V6 = ip_address("169.254.20.10"), ip_address("fd00:20::10")
ALLOWED = Admission(node_local_addresses=(V4, V6))


def parsed(
    value: str | None, name: str = "dns", created: str = "", admission: Admission = ALLOWED
) -> ParsedService:
    """Return a Service with one port of each protocol and family."""
    ports = [{"name": p.lower(), "port": 53, "protocol": p} for p in ("TCP", "UDP", "SCTP")]
    made: dict[str, Any] = manifests.service(name, ["10.96.0.10", "fd00:96::10"], ports)
    made["metadata"]["creationTimestamp"] = created or None
    if value is not None:
        made["metadata"]["annotations"] = {NODE_LOCAL_ANNOTATION: value}
    return services.parse(msgspec.convert(made, objects.Service), admission)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (None, []),
        ("169.254.20.10", [V4]),
        (" fd00:20::10 , 169.254.20.10 ", [V4, V6]),
        ("fd00:20:0::10", [V6]),
    ],
)
def test_each_family_has_its_address(value: str | None, named: list[Any]) -> None:
    """TCP and UDP have an address in each family; sockets of SCTP are never translated."""
    ports, warnings = parsed(value)
    assert not warnings
    found = {(port.node_local, port.name.protocol) for port in ports if port.node_local}
    assert found == {(it, protocol) for it in named for protocol in (Protocol.TCP, Protocol.UDP)}
    assert all(it.node_local is None or it.node_local.version == it.name.family for it in ports)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("169.254.169.254", "--node-local-addresses does not allow 169.254.169.254"),
        ("127.0.0.1", "--node-local-addresses does not allow 127.0.0.1"),
        ("169.254.20.10,169.254.20.10", "has two addresses of one family"),
        ("169.254.20.10:53", "169.254.20.10:53"),
        ("", ""),
        ("yes", "yes"),
    ],
)
def test_a_wrong_value_is_a_warning_and_endpoints_serve(value: str, reason: str) -> None:
    ports, (warning,) = parsed(value)
    assert warning.startswith(f"metadata.annotations[{NODE_LOCAL_ANNOTATION}]: ")
    assert reason in warning
    assert warning.endswith(", so sockets get endpoints")
    assert all(port.node_local is None for port in ports)


def test_only_the_usual_address_is_allowed_by_default() -> None:
    assert not parsed("169.254.20.10", admission=Admission()).warnings
    assert parsed("fd00:20::10", admission=Admission()).warnings
    assert parsed("169.254.20.10", admission=Admission(node_local_addresses=())).warnings


def test_services_are_found_by_the_listener_that_they_name() -> None:
    ports, key = NodeLocalPorts(), Key("default", "dns")
    tcp, *_ = found = parsed("169.254.20.10").ports
    ports.name(key, found)
    ports.name(Key("default", "other"), parsed(None, "other").ports)
    here = Listener(V4, 53, Protocol.TCP)
    assert ports.take_wanted() == {here, here._replace(protocol=Protocol.UDP)}
    assert listener(tcp) == here
    assert ports.naming(frozenset({here})) == {key}
    assert ports.naming(frozenset({Listener(V6, 1, Protocol.TCP)})) == set()
    ports.name(key, ())
    assert ports.changed
    assert (ports.take_wanted(), ports.changed) == (frozenset(), False)


def test_the_oldest_services_are_asked() -> None:
    """The oldest Services are asked, so a tenant with many Services cannot displace the cluster's
    DNS.
    """
    ports = NodeLocalPorts()
    for number in range(MOST):
        name, created = f"a-{number}", f"2026-01-01T00:00:{number % 60:02}Z"
        made = parsed("169.254.20.10", name, created).ports[0]
        ports.name(Key("default", name), [replace(made, port=1000 + number)])
    old = parsed("169.254.20.10", "zzz", "2020-01-01T00:00:00Z").ports
    ports.name(Key("kube-system", "zzz"), old)
    wanted = ports.take_wanted()
    assert len(wanted) == MOST
    assert {it for it in map(listener, old) if it} <= wanted


# When established flows bypass the stack.
