# SPDX-License-Identifier: Apache-2.0
"""The agent's status is made, told and written when something of it has changed, and only then."""

from pathlib import Path
from typing import Any

import pytest

from ebpflb import files
from ebpflb.agent.reporter import Publisher
from ebpflb.options import Options, Paths
from ebpflb.serve import status
from ebpflb.serve.health import Health
from ebpflb.serve.status import AgentStatus


class Published:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths = Paths(state=Path("/sys/fs/bpf/it"), run=folder, cache=folder)
        self.told, self.writes, self.errors = list[AgentStatus](), 0, list[OSError]()
        self.is_in_force = True
        options = Options(self.paths, "node-1", Path("/cgroup"))
        health = Health(1.0)
        self.publisher = Publisher(options, health, lambda: self.is_in_force)
        monkeypatch.setattr(
            health, "set_in_force", lambda _: self.told.append(self.publisher.status)
        )
        self._replace = files.replace
        monkeypatch.setattr("ebpflb.serve.status.files.replace", self._count)

    def publish(self, *, drift: dict[str, str] | None = None, **fields: Any) -> None:
        """Publish as the loop does, with these fields of the status."""
        self.is_in_force = not drift
        self.publisher.publish({"drift": drift or {}, **fields})

    def _count(self, path: Path, content: bytes) -> None:
        self.writes += 1
        if self.errors:
            raise self.errors.pop()
        self._replace(path, content)


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Published:
    return Published(tmp_path, monkeypatch)


def test_a_status_that_could_not_be_written_is_written_in_the_next_turn(
    published: Published,
) -> None:
    published.errors.append(OSError(28, "No space left on device"))
    published.publish(backends=1)
    assert status.read(published.paths) is None
    published.publish(backends=1)
    found = status.read(published.paths)
    assert found is not None
    assert found.backends == 1
