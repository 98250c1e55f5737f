# SPDX-License-Identifier: Apache-2.0
"""What the tests of the two sources share: the events heard, a fake API server, short waits."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ebpflb.cluster.manifests import ManifestSource
from ebpflb.cluster.pacing import Pace
from ebpflb.cluster.source import Source
from ebpflb.cluster.watching import ApiSource
from tests.cluster.fake_api import FakeApi
from tests.cluster.heard import NODE, QUICK, Begin, Heard, Quick, Start


@pytest.fixture
def quick() -> Quick:
    """QUICK, but for some waits."""
    return partial(replace, QUICK)


@pytest.fixture(autouse=True)
def no_mistakes_of_ours(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A source logs an error only for what it did not expect."""
    yield
    assert [it.getMessage() for it in caplog.records if it.levelname == "ERROR"] == []


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake server is reached directly, whatever the environment says."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with FakeApi() as server:
        yield server


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Starts sources, and stops them when the test is over."""
    begun: list[Source] = []

    def begin(source: Source) -> Source:
        begun.append(source)
        source.start()
        return source

    yield begin
    for source in begun:
        source.stop()


@pytest.fixture
def watch(api: FakeApi, heard: Heard, tmp_path: Path, begin: Begin) -> Start:
    """Starts an ApiSource on the fake server; pace and limit can be given."""

    def watch(**settings: Any) -> Source:
        kubeconfig = api.kubeconfig(tmp_path)
        return begin(
            ApiSource(heard, node_name=NODE, kubeconfig=kubeconfig, **{"pace": QUICK} | settings)
        )

    return watch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "manifests"
    path.mkdir()
    return path


@pytest.fixture
def follow(folder: Path, heard: Heard, begin: Begin) -> Start:
    """Starts a ManifestSource on the folder; the pace can be given."""

    def follow(pace: Pace = QUICK) -> Source:
        return begin(ManifestSource(heard, directory=folder, node_name=NODE, pace=pace))

    return follow
