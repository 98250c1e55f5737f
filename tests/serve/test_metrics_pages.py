# SPDX-License-Identifier: Apache-2.0
"""Port 10249, page by page (kube-proxy.md 13.2)."""

import json
import re
from typing import Any

import pytest

from ebpflb.serve.listener import Request, Response
from tests.serve.conftest import PlainMetrics, Serve, ask, plain_pages

PORT = 10249


def get(path: str, **pages: Any) -> Response:
    return plain_pages(**pages).respond(Request(path, "text/plain"))


@pytest.mark.parametrize(("path", "name"), [("/metrics", "metrics"), ("/metrics/slis", "slis")])
def test_metrics_and_slis(serve: Serve, path: str, name: str) -> None:
    """The answer is the exposition for the request's Accept header, with its type."""
    serve()
    reply = ask(path, PORT, Accept="application/openmetrics-text")
    assert reply.code == 200
    assert reply.body == f"{name} for application/openmetrics-text"
    assert reply.headers["Content-Type"] == f"text/{name}"


def test_healthz_is_plain_ok(serve: Serve) -> None:
    """The body is "ok" without a newline."""
    serve()
    reply = ask("/healthz", PORT)
    assert (reply.code, reply.body) == (200, "ok")
    assert reply.headers["Content-Type"] == "text/plain; charset=utf-8"


def test_healthz_is_counted() -> None:
    """kubernetes_healthcheck{name="ping",type="healthz"} counts each request to this page only."""
    metrics = PlainMetrics()
    for path in ("/healthz", "/metrics", "/healthz"):
        get(path, metrics=metrics)
    assert metrics.checks == ["ping", "ping"]


def test_proxy_mode_is_ebpf_without_newline(serve: Serve) -> None:
    """/proxyMode has kube-proxy's headers; e2e expects 200."""
    serve()
    reply = ask("/proxyMode", PORT)
    assert (reply.code, reply.body) == (200, "ebpf")
    assert reply.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert reply.headers["X-Content-Type-Options"] == "nosniff"


def test_configz_is_the_configuration_in_force() -> None:
    """/configz has kube-proxy's key."""
    answer = get("/configz", configuration={"mode": "nftables"})
    assert json.loads(answer.body) == {"kubeproxy.config.k8s.io": {"mode": "nftables"}}
    assert (answer.status, answer.content_type) == (200, "application/json")


def test_flagz_lists_the_flags_by_name() -> None:
    """/flagz looks like kube-proxy's page: a heading, a warning, a blank line, name=value."""
    said = get("/flagz", flags={"v": "2", "config": "/etc/x"}).body.decode()
    lines = said.splitlines()
    assert lines[:2] == ["", "ebpflb flags"]
    assert lines[2].startswith("Warning: This endpoint is not meant to be machine parseable")
    assert lines[3:] == ["", "config=/etc/x", "v=2"]


def test_statusz_tells_since_when_and_what_runs() -> None:
    """/statusz looks like kube-proxy's page, with Python instead of Go."""
    said = get("/statusz", started=0.0).body.decode()
    assert said.startswith("\nebpflb statusz\nWarning: ")
    assert "Started: Thu Jan  1 00:00:00 UTC 1970\n" in said
    assert re.search(r"^Up: \d+ hr \d\d min \d\d sec$", said, re.M)
    assert re.search(r"^Python version: 3\.", said, re.M)
    assert re.search(r"^Binary version: \d", said, re.M)
    assert "/proxyMode" in said


def test_stacks_only_with_profiling() -> None:
    """With profiling the page shows the stack of every thread, including that of this test."""
    assert get("/debug/stacks").status == 404
    answer = get("/debug/stacks", profiling=True)
    assert answer.status == 200
    assert b"MainThread:" in answer.body
    assert b"test_stacks_only_with_profiling" in answer.body


@pytest.mark.parametrize("profiling", [False, True])
def test_unknown_path_is_404(serve: Serve, profiling: bool) -> None:
    """Go's profiles are 404 too, because Python cannot make them."""
    serve(plain_pages(profiling=profiling))
    for path in ("/", "/nothing", "/debug/pprof/", "/debug/pprof/heap", "/debug/flags/v"):
        reply = ask(path, PORT)
        assert (reply.code, reply.body) == (404, "404 page not found\n")


def test_page_that_fails_is_500_and_logged(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in one page does not affect the other pages."""

    def fail(_: object, accept: str) -> tuple[bytes, str]:
        raise RuntimeError("no metrics today")

    monkeypatch.setattr(PlainMetrics, "exposition", fail)
    serve()
    assert ask("/metrics", PORT).code == 500
    assert ask("/proxyMode", PORT).code == 200
    assert "no metrics today" in caplog.text
