# SPDX-License-Identifier: Apache-2.0
"""What a request asks for, by its parameters; all raise BadInput that says what is wrong."""

import time
from ipaddress import ip_network

from starlette.requests import Request

from ebpflb.history import past
from ebpflb.kernel import monitoring
from ebpflb.tools.events import EventFilter
from ebpflb.tools.explain.asking import parse_question
from ebpflb_page.answering import BadInput
from ebpflb_page.readings import Asked

_LONGEST = 300  # characters of a parameter


def text(request: Request, name: str, default: str | None = None) -> str:
    """Raises BadInput if it is missing or too long."""
    found = request.query_params.get(name) or default
    if found is None:
        raise BadInput(f"{name} is missing")
    if len(found) > _LONGEST:
        raise BadInput(f"{name} is longer than {_LONGEST} characters")
    return found


def number(request: Request, name: str, default: int, most: int = 1_000_000) -> int:
    """Raises BadInput if it is no number from 1 to ``most``."""
    found = text(request, name, str(default))
    if not (found.isascii() and found.isdecimal() and 0 < int(found) <= most):
        raise BadInput(f"{name} is not a number from 1 to {most}")
    return int(found)


def service_name(name: str) -> tuple[str, str]:
    """Raises BadInput if it is not NAMESPACE/NAME."""
    namespace, _, service = name.partition("/")
    if not (namespace and service) or "/" in service:
        raise BadInput(f'"{name}" is not NAMESPACE/NAME such as default/web')
    return namespace, service


def question(request: Request) -> Asked:
    """What to explain. Raises BadInput."""
    try:
        to = parse_question(text(request, "to"))
    except ValueError as error:
        raise BadInput(str(error)) from None
    port = number(request, "from_port", 1, 65535) if "from_port" in request.query_params else None
    return Asked(to, text(request, "from", "node"), port)


def moment(words: str) -> float:
    """Seconds since the epoch. Raises BadInput."""
    try:
        return past.parse_time(words, time.time())
    except ValueError as error:
        raise BadInput(str(error)) from None


def event_filter(request: Request) -> EventFilter:
    """Which events are wanted. Raises BadInput."""
    service, client = text(request, "service", ""), text(request, "client", "")
    if service:
        service_name(service)
    try:
        return EventFilter(service or None, ip_network(client) if client else None)
    except ValueError:
        example = "10.244.1.0/24"
        raise BadInput(f'"{client}" is no address or network such as {example}') from None


def verdicts(request: Request) -> tuple[str, ...]:
    """Which are wanted; none: the usual ones. Raises BadInput."""
    words = tuple(request.query_params.getlist("verdict"))
    for word in words:
        if word not in monitoring.DECISIONS:
            raise BadInput(f'"{word}" is no verdict such as {", ".join(sorted(monitoring.USUAL))}')
    return words
