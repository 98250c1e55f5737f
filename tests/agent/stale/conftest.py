# SPDX-License-Identifier: Apache-2.0
"""A namespace with sockets, and a worker that ends stale sockets."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.stale import world as worlds
from tests.agent.stale.world import World
from tests.kernel.attach.device_namespace import Namespace, entered

_numbers = itertools.count()


@pytest.fixture
def ns() -> Iterator[Namespace]:
    with entered(f"ebpflb-test-{os.getpid()}-stale-{next(_numbers)}") as made:
        yield made


@pytest.fixture
def world(ns: Namespace, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Return a world in which a further search follows at once."""
    monkeypatch.setattr("ebpflb.agent.stale.PASS_TIMES", (0.02, 0.1))
    with worlds.made(ns, cache) as world:
        yield world


@pytest.fixture
def net(ns: Namespace) -> Namespace:
    """Route all addresses somewhere, so that sent packets are tracked."""
    for words in (
        "link set lo up",
        "link add away type veth peer name beyond",
        "link set beyond up",
        "link set away up arp off",
        "address add 192.0.2.77/24 dev away",
        "address add fd00::1/16 dev away nodad",
        "route add default dev away",
    ):
        ns.run(f"ip {words}")
    return ns
