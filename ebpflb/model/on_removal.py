# SPDX-License-Identifier: Apache-2.0
"""What becomes of established connections when their endpoint goes: a Service's annotation.

An endpoint has gone when no EndpointSlice of the Service lists it any more. One that terminates, or
is not ready, is still listed: it may go on answering the connections that it has.
"""

from ebpflb.model import durations, objects
from ebpflb.model.annotations import annotation_field

ON_REMOVAL_ANNOTATION = objects.ON_REMOVAL
KEEP, RESET = "keep", "reset"
DEFAULT_GRACE = 10.0  # seconds: a controller may move an endpoint from one slice to another
LONGEST_GRACE = 3600.0
BY_SOCKETS, BY_FLOWS, BY_CONNTRACK = RESET_KINDS = (
    "sockets",
    "flows",
    "conntrack",
)  # of connections
_EXPECTED = "keep, reset or reset=DURATION"


def of(service: objects.Service, warnings: list[str]) -> float | None:
    """After how many seconds its connections are reset; None: they are kept.

    A value that says neither is a warning, and they are kept.
    """
    text = service.metadata.annotation(ON_REMOVAL_ANNOTATION)
    if text is None or text == KEEP:
        return None
    try:
        return _grace(text)
    except ValueError as error:
        warnings.append(
            f"{annotation_field(ON_REMOVAL_ANNOTATION)}: {error}, so connections are kept"
        )
        return None


def in_words(reset_after: float | None) -> str:
    """As the annotation says it, with the grace."""
    if reset_after is None:
        return KEEP
    return f"{RESET}={durations.Duration(reset_after * 10**9)}"


def _grace(text: str) -> float:
    kind, is_given, grace = text.partition("=")
    if kind != RESET:
        raise ValueError(f'"{text}" is not {_EXPECTED}')
    if not is_given:
        return DEFAULT_GRACE
    seconds = durations.parse(grace).seconds
    if not 0 <= seconds <= LONGEST_GRACE:
        raise ValueError(f'"{grace}" is not between 0s and 1h')
    return seconds
