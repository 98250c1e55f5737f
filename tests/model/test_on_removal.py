# SPDX-License-Identifier: Apache-2.0
"""The annotation for a Service's connections whose endpoint is removed."""

import pytest

from ebpflb.model import annotations, services
from ebpflb.model.annotations import KEPT, OnRemoval
from ebpflb.model.services import ParsedService
from tests.model import builders
from tests.model.builders import annotated


def parsed(text: str | None, protocol: str = "TCP") -> ParsedService:
    ports = [{"port": 80, "protocol": protocol}]
    given = annotated(annotations.ON_REMOVAL_ANNOTATION, text)
    return services.parse(builders.dual_stack(ports=ports, annotations=given))


@pytest.mark.parametrize(
    "text, seconds",
    [
        (None, None),
        ("keep", None),
        ("reset", annotations.DEFAULT_GRACE),
        ("reset=0s", 0.0),
        ("reset=1m30s", 90.0),
        ("reset=500ms", 0.5),
        ("reset=1h", 3600.0),
    ],
)
def test_the_annotation_says_after_how_long(text: str | None, seconds: float | None) -> None:
    found = parsed(text)
    assert [port.on_removal for port in found.ports] == [OnRemoval(seconds)] * 2
    assert not found.warnings
    assert str(OnRemoval(seconds)) in (text or "keep", "reset=10s", "reset=1h0m0s")


@pytest.mark.parametrize(
    "text, after, shown",
    [
        ("reset,terminating=5s", 25.0, "reset=10s,terminating=5s/30s"),
        ("reset=0s,terminating=0s/1m", 60.0, "reset=0s,terminating=0s/1m0s"),
        ("reset=1s,terminating=2s/2s", 0.0, "reset=1s,terminating=2s/2s"),
    ],
)
def test_connections_of_terminating_endpoints_end_before_the_kill(
    text: str, after: float, shown: str
) -> None:
    """They end before the end of the pod's grace, which is 30 s by default."""
    found = parsed(text)
    assert {port.on_removal.after_terminating for port in found.ports} == {after}
    assert {str(port.on_removal) for port in found.ports} == {shown}
    assert not found.warnings


@pytest.mark.parametrize("protocol", ["UDP", "SCTP"])
def test_connections_are_those_of_tcp(protocol: str) -> None:
    assert {port.on_removal for port in parsed("reset", protocol).ports} == {KEPT}


WHERE = "metadata.annotations[ebpflb.io/on-removal]"
VALUES = "keep, reset or reset=DURATION"


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", f'"" is not {VALUES}'),
        ("Reset", f'"Reset" is not {VALUES}'),
        ("keep=3s", f'"keep=3s" is not {VALUES}'),
        ("reset=", '"" is not a duration such as 30s or 1h30m'),
        ("reset=30", '"30" is not a duration such as 30s or 1h30m: the unit is missing'),
        ("reset=-1s", '"-1s" is not between 0s and 1h'),
        ("reset=2h", '"2h" is not between 0s and 1h'),
        ("keep,terminating=5s", f'"keep,terminating=5s" is not {VALUES}'),
        ("reset,", '"" is not terminating=DURATION'),
        ("reset,killed=5s", '"killed=5s" is not terminating=DURATION'),
        ("reset,terminating=5", '"5" is not a duration such as 30s or 1h30m: the unit is missing'),
        ("reset,terminating=2h/2h", '"2h" is not between 0s and 1h'),
        ("reset,terminating=31s", '"31s" is longer than 30s'),
        ("reset,terminating=31s/20s", '"31s" is longer than 20s'),
    ],
)
def test_a_wrong_value_is_a_warning_and_connections_are_kept(text: str, reason: str) -> None:
    found = parsed(text)
    assert {port.on_removal for port in found.ports} == {KEPT}
    assert found.warnings == (f"{WHERE}: {reason}, so connections are kept",)
