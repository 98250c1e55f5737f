# SPDX-License-Identifier: Apache-2.0
"""The page answers only requests for this machine's names, from no other site, with the token."""

import asyncio
import logging
import re
from typing import Any

import pytest

from tests.page.asgi import OURS, Node, get, guarded

TOKEN = "0123456789abcdef-secret"


@pytest.mark.parametrize(
    "host",
    [
        OURS,
        "localhost",
        "127.0.0.1:8080",
        "[::1]:10251",
        "192.0.2.1",
        "LocalHost.:1",
        "node.example",
    ],
)
def test_names_of_this_machine_are_served(host: str) -> None:
    """The accepted names are loopback with any port, the connection's address, and --allow-host's
    names.
    """
    assert (
        get(guarded(Node(), hosts=("Node.Example",)), "/api/status", {"host": host}).status == 200
    )


@pytest.mark.parametrize(
    "host",
    [
        *(None, "", "evil.example", "evil.example:10251", "localhost.evil.example", "192.0.2.2"),
        *("127.0.0.1.evil.example", "[::1", "localhost:1@evil.example", "[::1].evil.example:1"),
    ],
)
@pytest.mark.parametrize("path", ["/", "/api/status", "/static/app.js"])
def test_another_name_is_refused(host: Any, path: str) -> None:
    """A foreign DNS name may lead here (DNS rebinding): neither page nor values are sent."""
    found = get(guarded(Node()), path, {"host": host})
    assert found.status == 421
    assert "--allow-host" in found.said["error"]


def test_two_names_are_refused() -> None:
    """A request with two names is refused, whichever of them a proxy has checked."""
    scope_headers = {"host": OURS, "Host": "evil.example"}
    app = guarded(Node())
    assert get(app, "/api/status", {k.lower(): v for k, v in scope_headers.items()}).status == 421


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "http://localhost:9999"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_other_sites_are_refused(headers: dict[str, str]) -> None:
    """Other sites cannot make the node read anything."""
    node = Node()
    assert get(guarded(node), "/api/status", headers).status == 403
    assert node.asked == []


def test_our_own_page_is_served() -> None:
    """Our own page is served with a browser's headers, and behind a proxy that ends TLS."""
    for origin in (f"http://{OURS}", f"https://{OURS}"):
        headers = {"origin": origin, "sec-fetch-site": "same-origin"}
        assert get(guarded(Node()), "/api/status", headers).status == 200


def test_a_link_of_another_site_leads_to_the_page() -> None:
    """A link on another site opens the page; that site sees nothing of it, and cannot show it in a
    frame.
    """
    found = get(guarded(Node()), "/", {"sec-fetch-site": "cross-site"})
    assert found.status == 200
    assert found.headers["x-frame-options"] == "DENY"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_can_be_changed(method: str) -> None:
    assert get(guarded(Node()), "/api/status", method=method).status == 405


@pytest.mark.parametrize(
    "given",
    [None, "", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer "],
)
def test_without_the_token_there_are_no_values(given: Any) -> None:
    """The page itself is public: it asks for the token."""
    node = Node()
    app = guarded(node, TOKEN)
    found = get(app, "/api/status", {"authorization": given})
    assert (found.status, found.headers["www-authenticate"]) == (401, "Bearer")
    assert TOKEN not in found.body.decode()
    assert node.asked == []
    assert get(app, "/").status == 200


def test_with_the_token_there_are() -> None:
    """The token is compared as bytes: a wrong token that is not ASCII raises no exception."""
    app = guarded(Node(), TOKEN)
    assert get(app, "/api/status", {"authorization": f"bearer {TOKEN}"}).status == 200
    assert get(app, "/api/status", {"authorization": "Bearer \xe9\xff"}).status == 401


def test_the_token_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """No log line has the token, not even a wrong one; an error shows only its position."""
    from ebpflb import redaction

    redaction.remember(TOKEN)
    node = Node()
    node.answers["status"] = OSError(5, "a reason", f"/{TOKEN}")
    caplog.set_level(logging.DEBUG)
    found = get(guarded(node, TOKEN), "/api/status", {"authorization": f"Bearer {TOKEN}"})
    assert TOKEN not in found.body.decode()
    assert TOKEN not in caplog.text


@pytest.mark.parametrize("path", ["/", "/api/status", "/api/nothing", "/static/app.js", "/nothing"])
def test_every_response_has_the_policy(path: str) -> None:
    """The policy allows no script or style in the page, none from elsewhere, and no caching."""
    headers = get(guarded(Node()), path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert set(re.findall(r"[a-z]+-src ([^;]+)", policy)) == {"'none'", "'self'"}
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert headers["referrer-policy"] == "no-referrer"
    assert "access-control-allow-origin" not in headers


def test_refusals_have_the_policy_too() -> None:
    assert "content-security-policy" in get(guarded(Node()), "/", {"host": "evil.example"}).headers


def test_a_client_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The response to a client that reads nothing ends after SEND_SECONDS."""
    from ebpflb_page import web_server

    monkeypatch.setattr(web_server, "SEND_SECONDS", 0.01)

    async def takes_nothing(message: Any) -> None:
        await asyncio.Event().wait()

    async def ask() -> None:
        sending = web_server.guarded(takes_nothing)
        await sending({"type": "http.response.body", "body": b""})

    with pytest.raises(TimeoutError):
        asyncio.run(ask())
