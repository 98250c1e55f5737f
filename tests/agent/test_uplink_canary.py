# SPDX-License-Identifier: Apache-2.0
"""The worker that probes uplinks: when it probes, and which results it accepts."""

import os
import socket
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from ebpflb.agent import canary_sync
from ebpflb.agent.canary_sync import CanaryRefused, UplinkCanary, Uplinks
from ebpflb.agent.loop import Turn
from ebpflb.errors import NodeError
from ebpflb.kernel.netfilter.probe import Arrival
from ebpflb.lab.agents import wait_until
from ebpflb.lab.netns import Namespace
from ebpflb.model.devices import Device
from tests.kernel.node import nodes

ADDRESS = ip_address("192.0.2.1")
ETH = Device(2, "eth0", False, True, 0, (ADDRESS,), (ADDRESS,))
UPLINKS: Uplinks = {ETH: ETH.sources}


class Canary:
    """The loop's part: the frontends for frames, which can be withdrawn during a probe."""

    def __init__(self) -> None:
        self.uplinks, self.is_there, self.is_withdrawn = UPLINKS, False, False

    def begin_frames(self) -> Uplinks:
        self.is_there = True
        return self.uplinks

    def end_frames(self) -> bool:
        self.is_there = False
        return not self.is_withdrawn


class Kernel:
    """The results of a probe."""

    def __init__(self) -> None:
        self.probes = 0
        self.found: dict[str, Arrival] = {}
        self.error: Exception | None = None

    def probe(self, uplinks: Uplinks) -> dict[str, Arrival]:
        self.probes += 1
        if self.error:
            raise self.error
        return self.found


def worker_of(canary: Canary, kernel: Kernel) -> UplinkCanary:
    """Return a worker that watches this network namespace, and whose calls are answered at once."""
    of_loop: Any = canary
    inbox: Any = Mock(ask=lambda do: do())
    return UplinkCanary(inbox, of_loop, of_loop, kernel.probe)


def look_at(worker: UplinkCanary, canary: Canary, uplinks: Uplinks) -> None:
    """Take a turn of the loop after which these are the devices."""
    canary.uplinks = uplinks
    worker.observe(Turn(node=True))


Made = tuple[UplinkCanary, Canary, Kernel]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Return the worker, not started."""
    monkeypatch.setattr(canary_sync, "AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(canary_sync, "SETTLE_SECONDS", 0.01)
    canary, kernel = Canary(), Kernel()
    worker = worker_of(canary, kernel)
    yield worker, canary, kernel
    worker.stop()


def test_only_losses_are_conditions(made: Made) -> None:
    """Losses are conditions; unknown results are reported only to doctor."""
    worker, canary, kernel = made
    kernel.found = {"eth0": Arrival.LOST, "eth1": Arrival.DROPPED, "eth2": Arrival.OK}
    assert worker.report() == kernel.found
    assert worker.lost == {"eth0": Arrival.LOST} and not canary.is_there


@pytest.mark.parametrize("why", ["withdrawn", "error"])
def test_what_is_not_known_changes_nothing(made: Made, why: str) -> None:
    """A probe that failed, or whose frontends were withdrawn, changes nothing."""
    worker, canary, kernel = made
    worker.lost = {"eth0": "lost"}
    kernel.error = NodeError("no nf_tables") if why == "error" else None
    canary.is_withdrawn = why == "withdrawn"
    with pytest.raises(NodeError if why == "error" else CanaryRefused):
        worker.report()
    assert worker.lost == {"eth0": "lost"} and not canary.is_there


def test_it_probes_again_while_something_is_wrong(made: Made) -> None:
    """The worker notices changes that no message reports: the end of a fault, and probes that work
    again.
    """
    worker, canary, kernel = made
    kernel.found = {"eth0": Arrival.LOST}
    worker.start()
    look_at(worker, canary, UPLINKS)
    wait_until("it probes again", lambda: kernel.probes > 2)
    kernel.error, kernel.found = NodeError("busy"), {}
    failed = kernel.probes
    wait_until("it goes on after an error", lambda: kernel.probes > failed + 1)
    kernel.error = None
    wait_until("it is over", lambda: worker.lost == {})


@pytest.mark.kernel
def test_a_change_of_its_filters(made: Made) -> None:
    """A new qdisc at an uplink causes a probe, a new qdisc at another device does not."""
    _, canary, kernel = made
    name = f"ebpflb-test-{os.getpid()}-uplinks"
    with nodes.fresh(name):
        Namespace(name).ip("link add eth0 type veth peer name x")
        uplink = replace(ETH, index=socket.if_nametoindex("eth0"))
        worker = worker_of(canary, kernel)
        worker.start()
        try:
            look_at(worker, canary, {uplink: ETH.sources})
            wait_until("it probes", lambda: kernel.probes == 1)
            nodes.run("tc", "qdisc", "add", "dev", "x", "clsact")
            nodes.run("tc", "qdisc", "add", "dev", "eth0", "clsact")
            wait_until("it probes again", lambda: kernel.probes == 2)
        finally:
            worker.stop()
    assert kernel.probes == 2
