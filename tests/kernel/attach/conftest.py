# SPDX-License-Identifier: Apache-2.0
"""Devices in a namespace of the test's own, programs for these devices, and an agent that attaches
them.
"""

import itertools
import os
from collections.abc import Iterator

import pytest

from ebpflb.kernel.attach import tcx
from ebpflb.kernel.attach.device_programs import DevicePrograms, unpin_all
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.programs.loader import Program
from tests.kernel.attach.device_namespace import (
    Agent,
    At,
    Namespace,
    close,
    entered,
    has_tcx,
    pair,
    program,
)

_numbers = itertools.count()


@pytest.fixture
def ns() -> Iterator[Namespace]:
    with entered(f"ebpflb-test-{os.getpid()}-devices-{next(_numbers)}") as made:
        yield made


@pytest.fixture(params=["tcx", "clsact"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the kind of attachment that the test uses."""
    if request.param == "tcx" and not has_tcx():
        pytest.skip("this kernel has no tcx")
    monkeypatch.setattr(tcx, "works", lambda: request.param == "tcx")
    return str(request.param)


@pytest.fixture
def at(ns: Namespace, by: str) -> At:
    """Return the programs at a device, as the kernel reports them."""
    return ns.tcx if by == "tcx" else ns.filters


@pytest.fixture
def packets() -> Iterator[list[Program]]:
    yield (found := pair())
    close(found)


@pytest.fixture
def newer() -> Iterator[list[Program]]:
    """Return the programs of a new agent."""
    yield (found := pair())
    close(found)


@pytest.fixture
def agent(home: StateDir, packets: list[Program], ns: Namespace, by: str) -> Iterator[Agent]:
    """Start new agents; their programs are removed after the test."""

    def start(programs: list[Program] = packets) -> DevicePrograms:
        return DevicePrograms(home, lambda link_header: programs)

    yield start
    unpin_all(home)


@pytest.fixture
def other_program() -> Iterator[Program]:
    """Return another agent's program."""
    yield (one := program("other_program"))
    close([one])


@pytest.fixture
def by_clsact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attach as on a kernel without tcx."""
    monkeypatch.setattr(tcx, "works", lambda: False)
