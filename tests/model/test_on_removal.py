# SPDX-License-Identifier: Apache-2.0
"""The annotation for connections whose endpoint is removed."""

import pytest

from ebpflb.model import annotations, services
from ebpflb.model.annotations import show_on_removal
from ebpflb.model.services import ParsedService
from tests.model import builders
from tests.model.builders import annotated

WHERE = "metadata.annotations[ebpflb.io/on-removal]"
VALUES = "keep, reset or reset=DURATION"


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
    assert [port.reset_after for port in found.ports] == [seconds] * 2
    assert not found.warnings
    assert show_on_removal(seconds) in (text or "keep", "reset=10s", "reset=1h0m0s")


def test_terminating_was_removed() -> None:
    """A warning names this former part of the value; the other parts count."""
    found = parsed("reset=3s,terminating=5s/30s")
    assert {port.reset_after for port in found.ports} == {3.0}
    (warning,) = found.warnings
    assert warning.startswith(f"{WHERE}: terminating was removed")
    assert annotations.is_about_removed(warning)


@pytest.mark.parametrize("protocol", ["UDP", "SCTP"])
def test_connections_are_those_of_tcp(protocol: str) -> None:
    assert {port.reset_after for port in parsed("reset", protocol).ports} == {None}


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
        ("reset,", f'"reset," is not {VALUES}'),
        ("reset,killed=5s", f'"reset,killed=5s" is not {VALUES}'),
    ],
)
def test_a_wrong_value_is_a_warning_and_connections_are_kept(text: str, reason: str) -> None:
    found = parsed(text)
    assert {port.reset_after for port in found.ports} == {None}
    assert found.warnings == (f"{WHERE}: {reason}, so connections are kept",)
