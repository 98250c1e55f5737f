# SPDX-License-Identifier: Apache-2.0
"""The order in which an agent's parts are made."""

from pathlib import Path

import pytest

from ebpflb.agent import Inbox, build, build_agent, engine
from ebpflb.errors import KernelError
from ebpflb.kernel.maps.state_dir import StateLock
from ebpflb.options import Options, Paths
from ebpflb.serve import status
from tests.agent.fakes import FakeSource


class _Source(FakeSource):
    def prepare(self) -> None:
        self.state = "checked"


def test_objects_are_listed_while_the_agent_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lists are requested before maps are opened, and stop if opening fails."""
    source, states = _Source(), list[str]()

    def open_none(*_: object, **__: object) -> None:
        states.append(source.state)
        raise KernelError("opening maps", 1, "no")

    monkeypatch.setattr(build, "make_source", lambda *_, **__: source)
    monkeypatch.setattr(build, "Datapath", open_none)
    monkeypatch.setattr(engine, "probe_netfilter", lambda options: (None, False))
    paths = Paths(tmp_path / "state", tmp_path)
    lock = status.AgentLock(paths, StateLock(paths.state))
    made = build_agent(Options(paths, "node-1", tmp_path, manifests=tmp_path), {}, lock, Inbox())
    with pytest.raises(KernelError), made:
        pass
    assert states == ["started"]
    assert source.state == "stopped"
