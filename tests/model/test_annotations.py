# SPDX-License-Identifier: Apache-2.0
"""Annotations of Services and slices: their meaning, and the warnings about invalid ones."""

from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from ebpflb.model import annotations, endpoint_slices, services
from ebpflb.model.services import Admission, ParsedService, WholeAddresses
from ebpflb.options import UNKNOWN_PORTS, UNKNOWN_ROUTED, Options
from tests.model import builders
from tests.model.builders import annotated


def weighted(text: str | None) -> tuple[endpoint_slices.StoredSlice, tuple[str, ...]]:
    given = annotated(annotations.WEIGHT_ANNOTATION, text)
    entry = builders.entry("10.1.0.1", nodeName="node")
    found, warnings = endpoint_slices.read(builders.slice(entry, annotations=given))
    assert found
    return found, warnings


@pytest.mark.parametrize("text", ["", "-1", "1001", "ten", "1.5", "00001", "²", " 5"])
def test_what_cannot_be_read_is_a_warning_and_counts_as_100(text: str) -> None:
    found, warnings = weighted(text)
    assert found.weight == 100
    where = "metadata.annotations[ebpflb.io/weight]"
    assert warnings == (f'{where}: "{text}" is not a number from 0 to 1000, so it is 100',)


@pytest.mark.parametrize("name", ["scheduler", "on-removal", "slow-start"])
def test_a_slice_has_no_annotation_of_a_service(name: str) -> None:
    """A Service's annotation on a slice is reported too."""
    slice = builders.slice(annotations={f"ebpflb.io/{name}": "reset"})
    _, warnings = endpoint_slices.read(slice)
    where = f"metadata.annotations[ebpflb.io/{name}]"
    assert warnings == (f"{where}: has no effect on an EndpointSlice: set it on the Service",)


# A Service's scheduler: the annotation's, else the option's.


def parsed(text: str | None, default: str = "random") -> ParsedService:
    given = annotated(annotations.SCHEDULER_ANNOTATION, text)
    return services.parse(builders.dual_stack(annotations=given), Admission(scheduler=default))


@pytest.mark.parametrize("default", annotations.SCHEDULERS)
@pytest.mark.parametrize("name", annotations.SCHEDULERS)
def test_annotation_takes_precedence(name: str, default: str) -> None:
    found = parsed(name, default)
    assert [port.scheduler for port in found.ports] == [name] * 2
    assert not found.warnings


@pytest.mark.parametrize("name", ["", "rr", "Round-Robin", "fastest"])
def test_a_wrong_name_is_a_warning_and_the_default_counts(name: str) -> None:
    """The Service is served, and one warning gives the valid names."""
    found = parsed(name, "round-robin")
    assert {port.scheduler for port in found.ports} == {"round-robin"}
    known = ", ".join(annotations.SCHEDULERS)
    where = "metadata.annotations[ebpflb.io/scheduler]"
    assert found.warnings == (f'{where}: "{name}" is not one of {known}, so it is round-robin',)


LONG = "z\n" * 100_000


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (annotations.SCHEDULER_ANNOTATION, LONG),
        (annotations.ON_REMOVAL_ANNOTATION, LONG),
        (annotations.ON_REMOVAL_ANNOTATION, f"reset={LONG}"),
        (annotations.ON_REMOVAL_ANNOTATION, "reset=" + "9" * 100_000 + "s"),
        (annotations.SLOW_START_ANNOTATION, LONG),
        (annotations.SLOW_START_ANNOTATION, "9" * 100_000 + "h"),
    ],
)
def test_a_warning_is_one_short_line_whatever_the_value(annotation: str, value: str) -> None:
    """A warning goes to log, status and Event, so it is short, though an annotation may have 256
    KB.
    """
    (warning,) = services.parse(builders.service(annotations={annotation: value})).warnings
    assert annotations.is_about_one(warning)
    assert len(warning) < 300 and warning.isprintable()
    assert "is not" in warning


# Which addresses a Service stands for as a whole: for pings and unknown ports (docs/vips.md).

BALANCED = {4: "203.0.113.9", 6: "fd03::9"}
EXTERNAL = {4: "198.51.100.7", 6: "fd02::7"}
CLUSTER = {4: "172.30.0.41", 6: "fd00:30::41"}


@pytest.mark.parametrize(
    ("which", "kinds"),
    [(WholeAddresses.ALL, (EXTERNAL, BALANCED, CLUSTER)), (WholeAddresses.BALANCED, (BALANCED,))],
)
def test_the_first_port_of_each_family_stands_for_them(which: WholeAddresses, kinds: Any) -> None:
    """One port of each family suffices, however many the Service has."""
    service = builders.dual_stack(
        type="LoadBalancer",
        ports=[{"name": name, "port": port} for name, port in (("b", 81), ("a", 80))],
        externalIPs=list(EXTERNAL.values()),
        ingress=[{"ip": ip} for ip in BALANCED.values()],
    )
    ports = services.with_whole_addresses(services.parse(service).ports, which)
    found = {(it.name.port, int(it.name.family)): it.whole_addresses for it in ports}
    for family in (4, 6):
        wanted = tuple(ip_address(kind[family]) for kind in kinds)
        assert found["b", family] == wanted
        assert found["a", family] == ()


def options_with(**options: Any) -> Options:
    return Options(None, "node-1", Path(), **options)  # type: ignore[arg-type]


def test_only_the_options_ask_for_them() -> None:
    """Without the options the maps have no such frontend."""
    assert options_with().admission.whole_addresses is WholeAddresses.NONE
    for word in UNKNOWN_PORTS:
        options = options_with(unknown_ports=word)
        none = word == UNKNOWN_ROUTED
        wanted = WholeAddresses.NONE if none else WholeAddresses.BALANCED
        assert options.admission.whole_addresses is wanted
        assert ("unknown_ports" in options.map_settings.flags) is not none
        both = options_with(unknown_ports=word, answer_pings=True)
        assert both.admission.whole_addresses is WholeAddresses.ALL
        assert "answer_pings" in both.map_settings.flags
