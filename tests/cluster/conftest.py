# SPDX-License-Identifier: Apache-2.0
"""Fixtures for the tests of both sources: recorded events, a fake API server, short waits."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ebpflb.cluster.list_watch import ApiSource
from ebpflb.cluster.manifests import ManifestSource
from ebpflb.cluster.source import ServerOptions, Source, Timing
from tests.cluster.event_log import NODE, QUICK, Begin, EventLog, Quick, Start
from tests.kit.api_server import FakeApiServer


@pytest.fixture
def quick() -> Quick:
    """Use QUICK with some of its waits changed."""
    return partial(replace, QUICK)


@pytest.fixture(autouse=True)
def no_mistakes_of_ours(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail the test if a source logs an unexpected error."""
    yield
    assert [it.getMessage() for it in caplog.records if it.levelname == "ERROR"] == []


@pytest.fixture
def events() -> EventLog:
    return EventLog()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reach the fake server directly, whatever the environment says."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def api() -> Iterator[FakeApiServer]:
    with FakeApiServer() as server:
        yield server


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Start sources, and stop them at the end of the test."""
    begun: list[Source] = []

    def begin(source: Source) -> Source:
        begun.append(source)
        source.start()
        return source

    yield begin
    for source in begun:
        source.stop()


@pytest.fixture
def watch(api: FakeApiServer, events: EventLog, tmp_path: Path, begin: Begin) -> Start:
    """Start an ApiSource on the fake server; timing and limit can be given."""

    def watch(**settings: Any) -> Source:
        usual: dict[str, Any] = {
            "server_options": ServerOptions(api.kubeconfig(tmp_path)),
            "timing": QUICK,
        }
        return begin(ApiSource(events, node_name=NODE, **usual | settings))

    return watch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "manifests"
    path.mkdir()
    return path


@pytest.fixture
def follow(folder: Path, events: EventLog, begin: Begin) -> Start:
    """Start a ManifestSource on the folder; the timing can be given."""

    def follow(timing: Timing = QUICK) -> Source:
        return begin(ManifestSource(events, directory=folder, node_name=NODE, timing=timing))

    return follow
