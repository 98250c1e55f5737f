# SPDX-License-Identifier: Apache-2.0
"""The exposition of metrics: formats, unreadable metrics, closing, and the agent's own counts."""

import re
import threading
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics

from ebpflb.errors import KernelError
from ebpflb.kernel.netfilter import conntrack
from ebpflb.model.annotations import BY_SOCKETS
from ebpflb.model.events import Kind
from ebpflb.serve.metrics import Metrics
from tests.serve import subjects
from tests.serve.subjects import changes, fake_maps, value, values

OPEN_METRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.mark.parametrize("accept", ["", "*/*", "text/html", "text/plain;version=0.0.4"])
def test_without_openmetrics_the_answer_is_text(metrics: Metrics, accept: str) -> None:
    """Without OpenMetrics in Accept the answer is the text format, as from kube-proxy."""
    shown = metrics.exposition(accept)
    assert shown.content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert not shown.body.endswith(b"# EOF\n")


def test_open_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """The strict parser of OpenMetrics accepts the answer, with the same values."""
    made = subjects.everything(monkeypatch)
    shown = made.exposition(OPEN_METRICS)
    assert shown.content_type.startswith("application/openmetrics-text; version=1.0.0")
    found = [s for m in open_metrics(shown.body.decode()) for s in m.samples]
    assert {_number(s.name, s.labels) for s in found} == {
        _number(name, dict(labels)) for name, labels in values(made)
    }


def _number(name: str, labels: dict[str, str]) -> tuple[Any, ...]:
    """Return the numbers of a series; the two formats write the bounds of buckets differently."""
    numbers = {"le": float(labels["le"])} if "le" in labels else {}
    return name, frozenset({**labels, **numbers}.items())


def test_nothing_of_its_making(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no _created series, as in kube-proxy."""
    made = subjects.everything(monkeypatch)
    shown = made.exposition().body + made.exposition(OPEN_METRICS).body
    assert not re.search(rb"(?m)^\w+_created\b", shown)


def test_what_cannot_be_read_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unreadable metric is left out, counted and logged; all other metrics are shown."""
    made = subjects.everything(monkeypatch)

    def refuse(*_: object) -> None:
        raise KernelError("opening program 7", 1, "not permitted")

    monkeypatch.setattr(conntrack, "count", refuse)
    before = values(made)
    after = values(made)
    assert not any(name == "ebpflb_conntrack_entries" for name, _ in after)
    assert any(name == "ebpflb_verdicts_total" for name, _ in after)
    assert value(made, "ebpflb_scrape_errors_total", what="maps") == 0
    assert changes(made, before)["ebpflb_scrape_errors_total"] == {"conntrack": 3.0}
    assert "opening program 7" in caplog.text


def test_after_closing_no_map_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """After closing no map is read, and counted metrics are still shown; closing twice is no
    error.
    """
    made = Metrics()
    maps = fake_maps()
    made.read(subjects.sources(maps))
    made.answered("/livez", 200)
    made.close()
    made.close()
    reads = {name: len(opened.reads) for name, opened in maps.items()}
    assert value(made, "kubeproxy_proxy_livez_total", code="200") == 1
    assert {name: len(opened.reads) for name, opened in maps.items()} == reads


def test_close_waits_for_a_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    """close() waits for a running scrape, so the maps may be closed when it returns."""
    made = Metrics()
    maps = fake_maps()
    reading, go_on = threading.Event(), threading.Event()

    def slowly(_: int) -> Any:
        reading.set()
        go_on.wait(60)
        return (0,)

    monkeypatch.setattr(maps["verdicts"], "get", slowly)
    made.read(subjects.sources(maps))
    scrape, close = threading.Thread(target=made.exposition), threading.Thread(target=made.close)
    scrape.start()
    reading.wait(60)
    close.start()
    close.join(0.1)
    assert close.is_alive()
    go_on.set()
    close.join(60)
    scrape.join(60)
    assert not close.is_alive() and not scrape.is_alive()


def test_requests_are_counted_by_code(metrics: Metrics) -> None:
    """Requests are counted by code, method and host; a request without an answer has client-go's
    code for errors.
    """
    before = values(metrics)
    metrics.request("GET", "https://10.96.0.1:443/api/v1/nodes", 200, 0.3)
    metrics.request("POST", "https://10.96.0.1:443", None, 1.0)
    found = changes(metrics, before)
    assert found["rest_client_requests_total"] == {
        "200 10.96.0.1:443 GET": 1,
        "<error> 10.96.0.1:443 POST": 1,
    }
    name = "rest_client_request_duration_seconds"
    assert found[f"{name}_sum"] == {"10.96.0.1:443 GET": 0.3, "10.96.0.1:443 POST": 1.0}
    assert found[f"{name}_bucket"]["10.96.0.1:443 0.5 GET"] == 1


def test_slis_have_the_outcome_of_each_check(metrics: Metrics) -> None:
    """/metrics/slis has the last outcome of each check, and the count of each outcome."""
    for ok in (True, True, False):
        metrics.check("ping", "healthz", ok=ok)
    text = metrics.slis_exposition().body.decode()
    assert 'kubernetes_healthcheck{name="ping",type="healthz"} 0.0' in text
    for status, count in (("success", 2), ("error", 1)):
        labels = f'name="ping",status="{status}",type="healthz"'
        assert f"kubernetes_healthchecks_total{{{labels}}} {count}.0" in text
    assert b"kubernetes_healthcheck" not in metrics.exposition().body


def test_facts_are_in_the_next_scrape(metrics: Metrics) -> None:
    """Counts and facts of the agent's parts are in the next scrape, each with its labels."""
    before = values(metrics)
    metrics.socket_destroy_supported(True)
    metrics.connections_reset(BY_SOCKETS, 6)
    metrics.connections_reset(BY_SOCKETS, 1)
    metrics.watch_silent(Kind.SERVICE)
    metrics.node_written(False)
    assert changes(metrics, before) == {
        "ebpflb_socket_destroy_supported": {"": 1},
        "ebpflb_connections_reset_total": {BY_SOCKETS: 7},
        "ebpflb_watches_silent_total": {"Service": 1},
        "ebpflb_node_readiness_writes_total": {"error": 1},
    }


@pytest.mark.parametrize("enabled", [True, False])
def test_feature_enabled(metrics: Metrics, enabled: bool) -> None:
    """A supported feature gate is shown with its stage, and whether it is on."""
    metrics.gate("AllowServiceExternalIPs", "DEPRECATED", enabled=enabled)
    labels = {"name": "AllowServiceExternalIPs", "stage": "DEPRECATED"}
    assert value(metrics, "kubernetes_feature_enabled", **labels) == enabled
