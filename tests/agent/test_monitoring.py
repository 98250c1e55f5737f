# SPDX-License-Identifier: Apache-2.0
"""The agent's side of monitoring when something fails; the kernel's part is faked."""

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest

from ebpflb import unix_socket
from ebpflb.agent import monitoring
from ebpflb.agent.loop import Call
from ebpflb.agent.monitoring import Monitoring
from ebpflb.errors import EbpflbError, KernelError, VerifierError
from ebpflb.kernel.monitoring import (
    USUAL,
    MonitorAnswer,
    MonitorQuestion,
    decision_mask,
    format_hash,
)
from ebpflb.lab.agents import wait_until
from ebpflb.options import Paths

REJECTED = VerifierError("the verifier rejected program egress: EACCES\n17: (85) call 113\nits log")
FULL = KernelError("map create events", 12, "Cannot allocate memory")


class Variant:
    """A variant of the programs without a kernel; ``error`` is the reason why it cannot be
    loaded.
    """

    error: EbpflbError | None = None
    loaded: ClassVar[list["Variant"]] = []

    def __init__(self, datapath: object, cache: Path) -> None:
        if self.error:
            raise self.error
        self.closed: list[str] = []
        self.programs = SimpleNamespace(close=lambda: self.closed.append("programs"))
        self.descriptors, self.asked = [0], list[int]()
        self.loaded.append(self)

    def ask(self, verdicts: int) -> None:
        self.asked.append(verdicts)

    def close(self) -> None:
        self.closed.append("maps")


class Node:
    """A node's loop and its programs; ``others`` are in force, as the datapath has it."""

    def __init__(self) -> None:
        self.others: object = None
        self.exchanged: list[object] = []
        self.error: EbpflbError | None = None

    def put(self, call: Call[Any]) -> None:
        call.answer()

    def require_own_programs(self) -> None:
        """Check that the agent's own programs are in force."""

    def exchange(self, others: object) -> None:
        if self.error:
            raise self.error
        self.exchanged.append(others)
        self.others = others


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A node whose agent listens for monitors."""
    monkeypatch.setattr(monitoring, "Variant", Variant)
    monkeypatch.setattr(Variant, "loaded", [])
    made: Any = Node()
    listening = Monitoring(Paths(Path("/ebpflb"), tmp_path), made, made, made.put)
    listening.start()
    yield made
    listening.stop()


@pytest.fixture
def ask(tmp_path: Path, node: Node) -> Iterator["Ask"]:
    made = Ask(Paths(Path("/ebpflb"), tmp_path).monitor_socket)
    yield made
    for each in made.connected:
        each.close()


class Ask:
    """A function that connects a monitor, and returns the answer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.connected: list[socket.socket] = []

    def __call__(self, *verdicts: str) -> str:
        self.connected.append(unix_socket.connect(self._path, 20))
        question = MonitorQuestion(format_hash(), decision_mask(verdicts or USUAL))
        self.connected[-1].sendall(msgspec.json.encode(question) + b"\n")
        with self.connected[-1].makefile("rb") as said:
            return msgspec.json.decode(said.readline(), type=MonitorAnswer).error


@pytest.mark.parametrize("error", [REJECTED, FULL], ids=["rejected", "no memory"])
def test_programs_that_cannot_be_loaded_change_nothing(
    node: Node, ask: Ask, monkeypatch: pytest.MonkeyPatch, error: EbpflbError
) -> None:
    """The monitor gets the reason in one line, and no program is exchanged; the next monitor may
    succeed.
    """
    monkeypatch.setattr(Variant, "error", error)
    assert ask() == str(error).splitlines()[0]
    assert not node.exchanged
    monkeypatch.setattr(Variant, "error", None)
    assert ask() == ""
    assert node.others is Variant.loaded[0].programs


def test_the_usual_programs_are_back_when_the_monitor_ends(node: Node, ask: Ask) -> None:
    """A second monitor is refused during the first, and may begin after it."""
    assert ask("refused") == ""
    assert ask("passed") == ("another `ebpflb monitor`, or a page that watches events, runs here")
    [variant] = Variant.loaded
    assert variant.asked == [decision_mask(["refused"])]
    for each in reversed(ask.connected):
        each.close()
    wait_until("they are back", lambda: node.exchanged == [variant.programs, None])
    assert ask() == ""


def test_a_monitor_ends_when_the_agent_loads_its_programs_again(node: Node, ask: Ask) -> None:
    """The new programs stay in force, and a monitor that asks again gets their monitoring
    variant.
    """
    assert ask() == ""
    node.others = None
    assert ask.connected[0].recv(1) == b""
    [former] = Variant.loaded
    assert node.exchanged == [former.programs]
    wait_until("its maps are closed", lambda: former.closed == ["maps"])
    assert ask() == ""
    assert node.others is Variant.loaded[1].programs
