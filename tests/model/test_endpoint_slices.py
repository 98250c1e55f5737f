# SPDX-License-Identifier: Apache-2.0
"""The Service of a slice, and the warnings about its content (kube-proxy.md 1.1, 2)."""

from typing import Any

import pytest

from ebpflb import errors
from ebpflb.model import endpoint_slices
from ebpflb.model.endpoint_slices import HEADLESS_LABEL, SERVICE_LABEL
from ebpflb.model.events import Key
from tests.model import builders
from tests.model.builders import entry


@pytest.mark.parametrize(
    ("labels", "service"),
    [
        ({SERVICE_LABEL: "web"}, Key("shop", "web")),
        (
            {SERVICE_LABEL: "web", "endpointslice.kubernetes.io/managed-by": "me"},
            Key("shop", "web"),
        ),
        ({}, None),
        ({SERVICE_LABEL: ""}, None),
        ({SERVICE_LABEL: "web", HEADLESS_LABEL: ""}, None),
    ],
    ids=["labelled", "written by hand", "no label", "empty label", "headless"],
)
def test_service_of(labels: dict[str, str], service: Key | None) -> None:
    """The label names a Service of the slice's own namespace; headless slices are ignored."""
    assert endpoint_slices.service_of(builders.slice(labels=labels)) == service


def test_every_skipped_entry_is_named() -> None:
    """Every skipped entry is named with its path."""
    slice = builders.slice(
        entry("10.1.0.1"),
        entry(),
        entry("x"),
        entry("fd00::1"),
        ports=[{"port": 80}, {"name": "a"}, {"name": "b", "port": 0}, {"name": None, "port": 1}],
    )
    assert endpoint_slices.read(slice)[1] == (
        "ports[1].port: missing, so this port is not served",
        "ports[2].port: missing, so this port is not served",
        "ports[3].name: missing, so this port is not served",
        "endpoints[1].addresses: empty, so this endpoint is not served",
        'endpoints[2].addresses[0]: "x" is not an IP address',
        'endpoints[3].addresses[0]: "fd00::1" is not an IPv4 address',
    )


def test_a_slice_of_host_names_is_skipped() -> None:
    """A slice of host names is skipped completely, with one warning."""
    slice = builders.slice(entry("example.org"), family="FQDN")
    assert endpoint_slices.read(slice)[1] == ("addressType: FQDN endpoints are not served",)


@pytest.mark.parametrize(
    ("changes", "field", "reason"),
    [
        ({"family": "IP"}, "addressType", '"IP" is not one of IPv4, IPv6, FQDN'),
        ({"ports": [{"port": 65536}]}, "ports[0].port", "65536 is not in 1..65535"),
        ({"ports": [{"port": -1}]}, "ports[0].port", "-1 is not in 1..65535"),
        ({"ports": [{"port": 1, "protocol": "ICMP"}]}, "ports[0].protocol", '"ICMP" is not one of'),
    ],
)
def test_an_invalid_field_is_named(changes: dict[str, Any], field: str, reason: str) -> None:
    """A field that no API server would have accepted is named with its path."""
    with pytest.raises(errors.InvalidObject) as refusal:
        endpoint_slices.read(builders.slice(**changes))
    assert refusal.value.field == field
    assert refusal.value.reason.startswith(reason)


def test_what_stays_is_the_same_object() -> None:
    """A new version of a slice keeps the stored objects of unchanged endpoints."""
    pods = [entry(f"10.1.0.{i}", targetRef={"name": f"web-{i}"}) for i in (1, 2, 3)]
    former = builders.stored(builders.slice(*pods))
    changed = entry("10.1.0.3", targetRef={"name": "web-3"}, conditions={"ready": False})
    now = builders.stored(builders.slice(changed, *reversed(pods[:2])))
    now = endpoint_slices.reused(now, former)
    assert now.endpoints[2] is former.endpoints[0]
    assert now.endpoints[1] is former.endpoints[1]
    assert not now.endpoints[0].conditions.ready


def test_nameless_slice() -> None:
    """A slice without a name or a namespace is ignored."""
    assert endpoint_slices.service_of(builders.slice(name="")) is None
    assert endpoint_slices.service_of(builders.slice(namespace="")) is None
