# SPDX-License-Identifier: Apache-2.0
"""Scheduler and weights change while connections are open, of sockets and of packets."""

from collections.abc import Iterator
from contextlib import ExitStack
from errno import ECONNREFUSED
from itertools import pairwise

import pytest

from ebpflb.lab import traffic
from ebpflb.lab.agents import wait_until
from ebpflb.lab.manifests import Manifest
from ebpflb.lab.sockets import Socket
from ebpflb.model.scheduler import (
    LEAST_CONNECTIONS,
    SCHEDULER_ANNOTATION,
    SCHEDULERS,
)
from ebpflb.model.weights import WEIGHT_ANNOTATION
from tests.kit import requests
from tests.kit.two_nodes import ENGINES, Frontends, TwoNodes

NUMBER = 14
WEB = Frontends(NUMBER)
ENDPOINTS = ("here", "twin", "there")
CLIENTS = ("hooked", "near", "unhooked", "outside")  # by sockets, and by packets

pytestmark = pytest.mark.parametrize("two", ENGINES, indirect=True)


def service(two: TwoNodes, name: str, weight: int = 100) -> list[Manifest]:
    found = two.service("web", NUMBER, *(getattr(two, pod) for pod in ENDPOINTS))
    found[0]["metadata"]["annotations"] = {SCHEDULER_ANNOTATION: name}
    for each in found[1:]:
        each["metadata"]["annotations"] = {WEIGHT_ANNOTATION: str(weight)}
    return found


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def where(two: TwoNodes, who: str) -> tuple[str, int]:
    return WEB.to("nodeport" if who == "outside" else "cluster", two.near)


def dial(two: TwoNodes, who: str, opened: ExitStack) -> Socket:
    """An open connection whose endpoint has said its name."""
    to = where(two, who)
    made = opened.enter_context(requests.tcp_socket(two.sockets(getattr(two, who)), to[0]))
    made.connect(to)
    assert traffic.read(made.recv(64))[0] in ENDPOINTS
    return made


def is_refused(two: TwoNodes, who: str) -> bool:
    to = where(two, who)
    with requests.tcp_socket(two.sockets(getattr(two, who)), to[0]) as client:
        return client.connect_ex(to) == ECONNREFUSED


def answers(client: Socket) -> bool:
    client.send(b"still there")
    return bool(client.recv(64) == b"still there")


def open_counts(two: TwoNodes) -> int:
    loads = two.maps_of(two.agents[0])["backend_loads"]
    return sum(each.open for _, each in loads.items())


@pytest.mark.extended
def test_open_connections_live_on_and_those_that_were_counted_end_once(
    two: TwoNodes, opened: ExitStack
) -> None:
    """From each scheduler to the next, and back to the one that counts."""
    two.publish(service(two, LEAST_CONNECTIONS))
    wait_until("none is left of other tests", lambda: open_counts(two) == 0, 60)
    held = [dial(two, who, opened) for who in CLIENTS]
    for _, name in pairwise((LEAST_CONNECTIONS, *SCHEDULERS, LEAST_CONNECTIONS)):
        counted = open_counts(two)
        two.publish(service(two, name))
        held += [dial(two, who, opened) for who in CLIENTS]
        more = len(CLIENTS) if name == LEAST_CONNECTIONS else 0
        assert open_counts(two) == counted + more, name
        assert all(map(answers, held)), name
    opened.close()
    wait_until("all have ended", lambda: open_counts(two) == 0, 60)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_where_every_weight_is_0_new_connections_are_refused_and_open_ones_live(
    two: TwoNodes, name: str, opened: ExitStack
) -> None:
    """Until one has a weight again."""
    two.publish(service(two, name))
    held = [dial(two, who, opened) for who in CLIENTS]
    two.publish(service(two, name, 0))
    assert all(is_refused(two, who) for who in CLIENTS)
    assert all(map(answers, held))
    two.publish(service(two, name, 1))
    held += [dial(two, who, opened) for who in CLIENTS]
    assert all(map(answers, held))
