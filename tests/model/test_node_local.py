# SPDX-License-Identifier: Apache-2.0
"""Which listener on the node a Service names for its sockets, and which ones are asked."""

from dataclasses import replace
from ipaddress import ip_address
from typing import Any

import msgspec
import pytest

from ebpflb.lab import manifests
from ebpflb.model import objects, services
from ebpflb.model.annotations import (
    NODE_LOCAL_ANNOTATION,
    NODE_LOCAL_DNS,
    parse_addresses,
    show_addresses,
)
from ebpflb.model.events import Key
from ebpflb.model.nodes import MOST, Listener, NodeLocalPorts, listener
from ebpflb.model.services import Admission, ParsedService, Protocol

V4, V6 = ip_address("169.254.20.10"), ip_address("fd00:20::10")
ALLOWED = Admission(node_local_addresses=(V4, V6))


def parsed(
    value: str | None, name: str = "dns", created: str = "", admission: Admission = ALLOWED
) -> ParsedService:
    """A Service with one port of each protocol and family."""
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
    """Ports of TCP and UDP have it; sockets of SCTP are never translated."""
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


@pytest.mark.parametrize("text", ["none", "169.254.20.10", "169.254.20.10,fd00:20::10"])
def test_the_option_is_shown_as_it_is_read(text: str) -> None:
    assert show_addresses(parse_addresses(text)) == text
    assert show_addresses(NODE_LOCAL_DNS) == "169.254.20.10"


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
    """So that a tenant with many Services cannot take the place of the cluster's DNS."""
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
