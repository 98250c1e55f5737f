# SPDX-License-Identifier: Apache-2.0
"""The clients that NodePorts admit, by the annotation or else by the option."""

from ipaddress import ip_network

import pytest

from ebpflb.errors import InvalidObject
from ebpflb.model import annotations, services
from ebpflb.model.services import Admission
from tests.model import builders
from tests.model.builders import annotated

DEFAULT = Admission(nodeport_source_ranges=annotations.parse_networks("192.0.2.0/24"))


def ranges(text: str | None) -> list[str]:
    """Return the ranges that a Service with this annotation admits, by port."""
    given = {"a": "b"} | annotated(annotations.NODEPORT_RANGES_ANNOTATION, text)
    service = builders.dual_stack(ports=[{"port": 80, "nodePort": 30080}], annotations=given)
    ports = services.parse(service, DEFAULT).ports
    return [annotations.show_networks(port.nodeport_source_ranges) for port in ports]


@pytest.mark.parametrize(
    ("text", "admitted"),
    [
        (None, ["192.0.2.0/24", ""]),
        ("", ["", ""]),
        ("10.0.0.0/8, 2001:db8::/32", ["10.0.0.0/8", "2001:db8::/32"]),
        ("10.0.0.0/8,0.0.0.0/0,2001:db8::/32", ["", "2001:db8::/32"]),
    ],
)
def test_annotation_takes_precedence(text: str | None, admitted: list[str]) -> None:
    """The annotation takes precedence in each family.

    Without a range, or with /0, all clients are admitted.
    """
    assert ranges(text) == admitted


def test_unreadable_annotation_admits_nobody_new() -> None:
    """An unreadable annotation makes the Service invalid, because an annotation that restricts must
    not open anything.
    """
    with pytest.raises(InvalidObject, match="nodeport-source-ranges"):
        ranges("10.0.0.0/8,everybody")
    assert annotations.parse_networks("10.0.0.0/8") == (ip_network("10.0.0.0/8"),)
