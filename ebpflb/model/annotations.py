# SPDX-License-Identifier: Apache-2.0
"""ebpflb's annotations of Services and EndpointSlices: what each chooses, and its warnings.

A person or a controller writes an annotation by hand. So an error in one becomes an Event too; a
message about an annotation is known by its beginning (``is_about_one``).
"""

from collections.abc import Iterator
from typing import NamedTuple

from ebpflb.model import addresses, durations, field_checks, objects
from ebpflb.model.addresses import Network

_PREFIX = "metadata.annotations["


def annotation_field(annotation: str) -> str:
    return f"{_PREFIX}{annotation}]"


def misplaced(annotation: str, kind: str, owner: str) -> str:
    """The warning about one that an object has and another kind of object should have."""
    return f"{annotation_field(annotation)}: has no effect on {kind}: set it on {owner}"


def unknown(annotation: str, known: list[str]) -> str:
    """The warning about one that begins as ours do, and is none."""
    return f"{annotation_field(annotation)}: has no effect: it is not one of {', '.join(known)}"


def is_about_one(message: str) -> bool:
    return message.startswith(_PREFIX)


# How a new connection gets its endpoint: by a Service's annotation, else by --scheduler.
#
# kube-proxy has a choice only in mode ipvs, and there one for the whole node: ``BY_IPVS`` maps the
# names of the kernel's schedulers to ours, "" being its default, rr.

SCHEDULER_ANNOTATION = objects.SCHEDULER
SCHEDULERS = (RANDOM, ROUND_ROBIN, LEAST_CONNECTIONS, MAGLEV, SOURCE_HASH) = (
    "random",
    "round-robin",
    "least-connections",
    "maglev",
    "source-hash",
)
HASHING = frozenset({MAGLEV, SOURCE_HASH})
BY_IPVS = {
    "": ROUND_ROBIN,
    "rr": ROUND_ROBIN,
    "wrr": ROUND_ROBIN,
    **dict.fromkeys(("lc", "wlc", "sed", "nq"), LEAST_CONNECTIONS),
    "sh": SOURCE_HASH,
    "mh": SOURCE_HASH,
}


def read_scheduler(service: objects.Service, default: str, warnings: list[str]) -> str:
    """One of SCHEDULERS. A name that is none is a warning, and the default counts."""
    name = service.metadata.annotation(SCHEDULER_ANNOTATION)
    if name is None or name in SCHEDULERS:
        return name or default
    known = ", ".join(SCHEDULERS)
    reason = f'"{name}" is not one of {known}, so it is {default}'
    warnings.append(f"{annotation_field(SCHEDULER_ANNOTATION)}: {reason}")
    return default


# How many connections endpoints get, against those of other slices: by a slice's annotation.
#
# A slice that a person or a canary's controller adds gets a part of the traffic so. 0: no new
# connections; those that there are go on.

WEIGHT_ANNOTATION = objects.WEIGHT
DEFAULT_WEIGHT, HIGHEST_WEIGHT = 100, 1000


def read_weight(slice: objects.EndpointSlice) -> int:
    """Of each of its endpoints; what cannot be read counts as DEFAULT_WEIGHT."""
    weight = _parse_weight(_weight_text(slice))
    return DEFAULT_WEIGHT if weight is None else weight


def weight_warnings(slice: objects.EndpointSlice) -> Iterator[str]:
    """One, if the annotation cannot be read."""
    text = _weight_text(slice)
    if _parse_weight(text) is None:
        field = annotation_field(WEIGHT_ANNOTATION)
        expected = f"a number from 0 to {HIGHEST_WEIGHT}"
        yield f'{field}: "{text}" is not {expected}, so it is {DEFAULT_WEIGHT}'


def _weight_text(slice: objects.EndpointSlice) -> str:
    text = slice.metadata.annotation(WEIGHT_ANNOTATION)
    return str(DEFAULT_WEIGHT) if text is None else text


def _parse_weight(text: str) -> int | None:
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(HIGHEST_WEIGHT))
    return int(text) if is_number and int(text) <= HIGHEST_WEIGHT else None


# In which time the weight of a new endpoint grows to its whole: a Service's annotation.
#
# A process that has just started is slow: its caches are empty, its code is not compiled. It gets
# few connections at first.

SLOW_START_ANNOTATION = objects.SLOW_START
LONGEST_SLOW_START = 3600.0  # seconds


def read_slow_start(service: objects.Service, warnings: list[str]) -> float:
    """In seconds; 0: its weight is whole at once. What cannot be read is a warning, and 0."""
    text = service.metadata.annotation(SLOW_START_ANNOTATION)
    if text is None:
        return 0.0
    try:
        return _parse_slow_start(text)
    except ValueError as error:
        where = annotation_field(SLOW_START_ANNOTATION)
        warnings.append(f"{where}: {error}, so new endpoints get their whole weight at once")
        return 0.0


def _parse_slow_start(text: str) -> float:
    seconds = durations.parse(text).seconds
    if not 0 <= seconds <= LONGEST_SLOW_START:
        raise ValueError(f'"{text}" is not between 0s and 1h')
    return seconds


# What becomes of established connections when their endpoint goes: a Service's annotation.
#
# An endpoint has gone when no EndpointSlice of the Service lists it any more. One that terminates,
# or is not ready, is still listed: it may go on answering the connections that it has.

ON_REMOVAL_ANNOTATION = objects.ON_REMOVAL
KEEP, RESET = "keep", "reset"
DEFAULT_GRACE = 10.0  # seconds: a controller may move an endpoint from one slice to another
LONGEST_GRACE = 3600.0
BY_SOCKETS, BY_FLOWS, BY_CONNTRACK = RESET_KINDS = (
    "sockets",
    "flows",
    "conntrack",
)  # of connections
_ON_REMOVAL_VALUES = "keep, reset or reset=DURATION"


def read_grace(service: objects.Service, warnings: list[str]) -> float | None:
    """After how many seconds its connections are reset; None: they are kept.

    A value that says neither is a warning, and they are kept.
    """
    text = service.metadata.annotation(ON_REMOVAL_ANNOTATION)
    if text is None or text == KEEP:
        return None
    try:
        return _parse_grace(text)
    except ValueError as error:
        warnings.append(
            f"{annotation_field(ON_REMOVAL_ANNOTATION)}: {error}, so connections are kept"
        )
        return None


def show_grace(reset_after: float | None) -> str:
    """As the annotation says it, with the grace."""
    if reset_after is None:
        return KEEP
    return f"{RESET}={durations.Duration(reset_after * 10**9)}"


def _parse_grace(text: str) -> float:
    kind, is_given, grace = text.partition("=")
    if kind != RESET:
        raise ValueError(f'"{text}" is not {_ON_REMOVAL_VALUES}')
    if not is_given:
        return DEFAULT_GRACE
    seconds = durations.parse(grace).seconds
    if not 0 <= seconds <= LONGEST_GRACE:
        raise ValueError(f'"{grace}" is not between 0s and 1h')
    return seconds


# Whose requests a Service's NodePorts admit: by its annotation, else by --nodeport-source-ranges.
#
# kube-proxy has neither; it leaves NodePorts to firewalls in PREROUTING, which do not see a
# NodePort that is translated before them.

NODEPORT_RANGES_ANNOTATION = objects.NODEPORT_SOURCE_RANGES


def read_nodeport_ranges(
    service: objects.Service, default: tuple[Network, ...]
) -> tuple[Network, ...]:
    """The networks; a family without any admits everybody, as with loadBalancerSourceRanges.

    Raises InvalidObject: an annotation that cannot be read must not open what it was to close.
    """
    text = service.metadata.annotation(NODEPORT_RANGES_ANNOTATION)
    if text is None:
        return default
    return field_checks.parsed(annotation_field(NODEPORT_RANGES_ANNOTATION), parse_networks, text)


def parse_networks(text: str) -> tuple[Network, ...]:
    """CIDRs of both families, separated by commas; "" admits everybody. Raises ValueError."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    return tuple(addresses.parse_network(part) for part in parts)


def show_networks(ranges: tuple[Network, ...]) -> str:
    """As ``parse`` takes it."""
    return ",".join(map(str, ranges))


# What a Service's annotations choose; each has a module of its own, which says what it means.

OF_SERVICES = frozenset(
    {objects.NODEPORT_SOURCE_RANGES, objects.SCHEDULER, objects.ON_REMOVAL, objects.SLOW_START}
)
OF_SLICES = frozenset({objects.WEIGHT})


class ServiceChoices(NamedTuple):
    """As in ServicePort."""

    scheduler: str
    reset_after: float | None
    slow_start: float


def read_choices(
    service: objects.Service, default_scheduler: str, warnings: list[str]
) -> ServiceChoices:
    """What cannot be read is a warning, and the default counts."""
    warnings += _without_effect(service.metadata, OF_SERVICES, "a Service", "its EndpointSlices")
    return ServiceChoices(
        read_scheduler(service, default_scheduler, warnings),
        read_grace(service, warnings),
        read_slow_start(service, warnings),
    )


def slice_warnings(slice: objects.EndpointSlice) -> Iterator[str]:
    """One for each annotation of a slice that only a Service can have, and for unknown ones."""
    yield from _without_effect(slice.metadata, OF_SLICES, "an EndpointSlice", "the Service")


def _without_effect(
    metadata: objects.Annotated, its: frozenset[str], kind: str, owner: str
) -> Iterator[str]:
    """Of ours that are not ``its`` each; of those that nobody has, as misspelt ones, the first."""
    others = sorted((metadata.annotations or {}).keys() - its - {objects.TRIGGER_TIME})
    ours = OF_SERVICES | OF_SLICES
    yield from (misplaced(name, kind, owner) for name in others if name in ours)
    yield from [unknown(name, sorted(its)) for name in others if name not in ours][:1]
