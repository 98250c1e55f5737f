# SPDX-License-Identifier: Apache-2.0
"""Requests to the API server are reported to an observer."""

from pathlib import Path

import pytest

from ebpflb.cluster.api import Server
from ebpflb.cluster.source import ServerOptions
from ebpflb.errors import ClusterError
from ebpflb.model.events import Kind
from tests.cluster.conftest import QUICK
from tests.cluster.event_log import EventLog, Start
from tests.kit.api_server import FakeApiServer

Observed = tuple[str, str, int | None]


@pytest.fixture
def observed() -> list[Observed]:
    return []


def test_a_source_tells_of_lists_and_watches(
    api: FakeApiServer, events: EventLog, watch: Start, observed: list[Observed], tmp_path: Path
) -> None:
    """Each request is reported once, with method, server and status; a watch at its answer."""
    server = ServerOptions(
        api.kubeconfig(tmp_path), observe=lambda *request: observed.append(request[:3])
    )
    source = watch(server_options=server)
    for kind in Kind:
        events.next(kind)
    url = source.server.url  # type: ignore[attr-defined]
    assert set(observed) == {("GET", url, 200)}
    assert len(observed) >= len(Kind)


def test_refusals_and_silence_are_observed(
    api: FakeApiServer, observed: list[Observed], tmp_path: Path
) -> None:
    """A refusal has a status; a missing answer has none; both have a duration."""
    seconds: list[float] = []

    def observe(method: str, url: str, code: int | None, spent: float) -> None:
        observed.append((method, url, code))
        seconds.append(spent)

    server = Server(ServerOptions(api.kubeconfig(tmp_path), observe=observe), QUICK)
    api.token = "another"
    with pytest.raises(ClusterError):
        list(server.page(Kind.NODE, {}))
    server.url = "http://127.0.0.1:1"
    with pytest.raises(ClusterError):
        server.create("/apis/events.k8s.io/v1/namespaces/default/events", b"{}")
    assert [(method, code) for method, _, code in observed] == [("GET", 401), ("POST", None)]
    assert all(spent > 0 for spent in seconds)
