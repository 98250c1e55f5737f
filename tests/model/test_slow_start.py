# SPDX-License-Identifier: Apache-2.0
"""The annotation for the time in which the weights of a Service's new endpoints grow."""

import pytest

from ebpflb.model import annotations, services
from ebpflb.model.services import ParsedService
from tests.model import builders
from tests.model.builders import annotated

WHERE = f"metadata.annotations[{annotations.SLOW_START_ANNOTATION}]"


def parsed(text: str | None) -> ParsedService:
    given = annotated(annotations.SLOW_START_ANNOTATION, text)
    return services.parse(builders.service(annotations=given))


@pytest.mark.parametrize(
    "text, seconds", [(None, 0.0), ("0s", 0.0), ("30s", 30.0), ("1m30s", 90.0), ("1h", 3600.0)]
)
def test_the_annotation_says_in_which_time(text: str | None, seconds: float) -> None:
    found = parsed(text)
    assert [port.slow_start for port in found.ports] == [seconds]
    assert not found.warnings


@pytest.mark.parametrize("text", ["", "30", "fast", "-1s", "2h"])
def test_what_cannot_be_read_is_named_and_the_service_is_served(text: str) -> None:
    """If the value cannot be read, new endpoints get their whole weight at once."""
    (port,), (warning,) = parsed(text)
    assert port.slow_start == 0.0
    assert warning.startswith(f'{WHERE}: "{text}"')
    assert warning.endswith("so new endpoints get their whole weight at once")
