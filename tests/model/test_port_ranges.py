# SPDX-License-Identifier: Apache-2.0
"""Which ranges of ports a Service has (docs/port-ranges.md)."""

from typing import Any

import pytest

from ebpflb.model import endpoints, services
from ebpflb.model.annotations import (
    HEALTH_ANNOTATION,
    MOST_RANGES,
    NODE_LOCAL_ANNOTATION,
    ON_REMOVAL_ANNOTATION,
    PORTS_ANNOTATION,
    OnRemoval,
)
from ebpflb.model.services import ANY_PORT, ParsedService, Protocol
from tests.model import builders
from tests.model.builders import annotated

FIELD = f"metadata.annotations[{PORTS_ANNOTATION}]"
SPEC: dict[str, Any] = {"type": "LoadBalancer", "externalIPs": ["203.0.113.1", "fd03::1"]}


def parsed(
    text: str | None, annotations: dict[str, str] | None = None, **spec: Any
) -> ParsedService:
    given = annotated(PORTS_ANNOTATION, text) | (annotations or {})
    return services.parse(builders.dual_stack(annotations=given, **{**SPEC, **spec}))


def ranges(found: ParsedService) -> dict[str, list[Any]]:
    """By protocol; both families have the same."""
    ports = [port for port in found.ports if port.name.is_ranges]
    of = {
        version: {p.name.protocol.name: [*p.ranges] for p in ports if p.name.family == version}
        for version in (4, 6)
    }
    assert of[4] == of[6]
    return of[4]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, {}),
        ("10000-20000/udp", {"UDP": [(10000, 20000)]}),
        ("10000-20000/UDP", {"UDP": [(10000, 20000)]}),
        ("10000-20000", {"TCP": [(10000, 20000)]}),
        ("1-1/sctp", {"SCTP": [(1, 1)]}),
        (" 7-9/udp , 1-65535/tcp,3-4/udp", {"UDP": [(3, 4), (7, 9)], "TCP": [(1, 65535)]}),
    ],
)
def test_values(text: str | None, expected: dict[str, list[tuple[int, int]]]) -> None:
    """Without a protocol it is TCP, as of a Service's ports."""
    found = parsed(text)
    assert ranges(found) == expected
    assert not found.warnings
    assert len([port for port in found.ports if not port.name.is_ranges]) == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", '"" is not a range such as 10000-20000/udp'),
        ("80", '"80" is not a range such as 10000-20000/udp'),
        ("-80", '"-80" is not a range such as 10000-20000/udp'),
        ("80-", '"80-" is not a range such as 10000-20000/udp'),
        ("1-2-3", '"1-2-3" is not a range such as 10000-20000/udp'),
        ("1-2/", '"1-2/" has none of the protocols tcp, udp and sctp'),
        ("1-2/icmp", '"1-2/icmp" has none of the protocols tcp, udp and sctp'),
        ("²-3", '"²-3" is not a range such as 10000-20000/udp'),
        ("0-9", '"0-9" is not a range within 1-65535'),
        ("9-8", '"9-8" is not a range within 1-65535'),
        ("1-65536", '"1-65536" is not a range within 1-65535'),
        ("1-2/udp,", '"" is not a range such as 10000-20000/udp'),
        ("1-5/udp,5-6/udp", "1-5 and 5-6 overlap"),
        (
            ",".join(f"{n}-{n}" for n in range(1, MOST_RANGES + 2)),
            f"has more than {MOST_RANGES} ranges",
        ),
    ],
)
def test_a_wrong_value_is_a_warning(text: str, reason: str) -> None:
    """The Service is served without ranges, not with some of them."""
    found = parsed(text)
    (warning,) = found.warnings
    assert warning.startswith(FIELD) and reason in warning
    assert warning.endswith("so the Service has no ranges of ports")
    assert ranges(found) == {}


def test_without_external_addresses() -> None:
    """A load balancer's address may still come; another Service gets none."""
    found = parsed("1-2", type="ClusterIP", externalIPs=[])
    assert ranges(found) == {}
    assert found.warnings == (f"{FIELD}: has no effect: the Service has no external addresses",)
    assert not parsed("1-2", externalIPs=[]).warnings


def test_what_does_not_apply() -> None:
    """A range has neither a NodePort nor a node-local listener; passive health knows no ports."""
    others = {
        NODE_LOCAL_ANNOTATION: "169.254.20.10",
        HEALTH_ANNOTATION: "passive",
        ON_REMOVAL_ANNOTATION: "reset=3s",
    }
    found = parsed("1-2/udp,1-2", others)
    by_protocol = {it.name.protocol: it for it in found.ports if it.name.is_ranges}
    for port in by_protocol.values():
        assert (port.node_port, port.node_local, port.endpoint_health) == (0, None, "off")
        assert port.health_check_node_port == 0 and port.name.port == ANY_PORT
    assert by_protocol[Protocol.TCP].on_removal == OnRemoval(3.0)
    assert by_protocol[Protocol.UDP].on_removal == OnRemoval()


def test_a_port_with_the_name_of_ranges() -> None:
    """The API refuses it; a manifest may have it."""
    with pytest.raises(Exception, match='"\\*" is not a port name'):
        services.parse(builders.dual_stack(ports=[{"name": "*", "port": 80}]))


def test_every_endpoint_serves_ranges() -> None:
    """Whatever its slice says of ports, as long as it is of the family."""
    name = next(it.name for it in parsed("1-2/udp").ports if it.name.is_ranges)
    slice = builders.stored(builders.slice(builders.entry("10.1.0.1"), builders.entry("10.1.0.2")))
    found = endpoints.merge([slice], name, "")
    assert found and {each.port for each in found} == {0}
