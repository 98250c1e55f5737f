# SPDX-License-Identifier: Apache-2.0
"""A Service's scheduler: the annotation's, else the option's."""

import pytest

from ebpflb.model import annotations, services
from ebpflb.model.services import Admission, ParsedService
from tests.model import builders
from tests.model.builders import annotated


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
    """The Service is served, and its author is told once what would be right."""
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
    """It goes to the log, to status and to an Event, and an annotation may have 256 KB."""
    (warning,) = services.parse(builders.service(annotations={annotation: value})).warnings
    assert annotations.is_about_one(warning)
    assert len(warning) < 300 and warning.isprintable()
    assert "is not" in warning
