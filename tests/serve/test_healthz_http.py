# SPDX-License-Identifier: Apache-2.0
"""Port 10256 as HTTP: headers, methods, paths and addresses (kube-proxy.md 13.1)."""

import re

import pytest

from tests.model import builders
from tests.serve.conftest import Serve, ask

PATHS = ("/healthz", "/livez")


@pytest.mark.parametrize("path", PATHS)
def test_headers_are_those_of_kube_proxy(serve: Serve, path: str) -> None:
    """The headers are application/json and nosniff, with 200 and with 503."""
    servers = serve()
    for node in (None, builders.node()):
        servers.health.set_node(node)
        headers = ask(path, 10256).headers
        assert headers["Content-Type"] == "application/json"
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_other_paths_are_404(serve: Serve) -> None:
    """No other path exists."""
    serve()
    for path in ("/", "/healthz/", "/metrics", "/livezz"):
        assert ask(path, 10256).code == 404


def test_answered_on_loopback_and_self_address(serve: Serve) -> None:
    """/healthz on 10256 has "lastUpdated", as e2e requires, on loopback and the node's address, in
    both families.
    """
    serve().health.set_node(builders.node())
    for host in ("127.0.0.1", "127.0.0.2", "::1"):
        assert re.search("lastUpdated", ask("/healthz", 10256, host).body)
