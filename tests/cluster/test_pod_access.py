# SPDX-License-Identifier: Apache-2.0
"""How a pod reaches the API: with its service account, without the Kubernetes client; and through
proxies.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.cluster import access
from ebpflb.cluster.access import bypasses_proxy, proxy_for
from ebpflb.cluster.api import Server
from ebpflb.cluster.source import ServerOptions
from ebpflb.errors import ClusterError
from ebpflb.model.events import Kind
from tests.cluster.event_log import QUICK
from tests.kit.api_server import FakeApiServer
from tests.kit.certificates import self_signed

TOKEN = "the first token"


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of the service account."""
    monkeypatch.setattr(access, "SERVICE_ACCOUNT", tmp_path)
    return tmp_path


@pytest.fixture
def pod(account: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApiServer]:
    """Return the API server for this process, which runs as if in a pod."""
    certificate = self_signed(account, "IP:127.0.0.1")
    (account / "certificate.pem").rename(account / "ca.crt")
    (account / "token").write_text(f"{TOKEN}\n")
    with FakeApiServer(token=TOKEN, certificate=certificate) as api:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", api.url.rpartition(":")[2])
        yield api


def is_answered(server: Server) -> bool:
    return bool(list(server.page(Kind.SERVICE, {})))


@pytest.mark.parametrize("after", ["a minute", "401"])
def test_a_renewed_token(
    pod: FakeApiServer, account: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """The token is read again after a minute, before the former one expires, and after a 401."""
    if after == "a minute":
        monkeypatch.setattr(access, "TOKEN_SECONDS", -1.0)
    server = Server(ServerOptions(), QUICK)
    assert is_answered(server)
    (account / "token").write_text("the next")
    pod.token = "the next"
    before = len(pod.requests)
    assert is_answered(server)
    assert len(pod.requests) - before == (1 if after == "a minute" else 2)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("token", None, "the token of this pod: .*/token: No such file or directory"),
        ("token", "\n", "the token is empty"),
        ("ca.crt", None, "certificate-authority: not usable as PEM: No such file or directory"),
        ("ca.crt", "x", "certificate-authority: not usable as PEM"),
    ],
)
@pytest.mark.usefixtures("pod")
def test_an_unusable_account(account: Path, name: str, content: str | None, words: str) -> None:
    """An unusable account is an error at the start, in words."""
    (account / name).unlink()
    if content is not None:
        (account / name).write_text(content)
    with pytest.raises(ClusterError, match=words):
        Server(ServerOptions(), QUICK)


@pytest.mark.parametrize(
    ("host", "url"),
    [("192.0.2.1", "https://192.0.2.1:6443"), ("2001:db8::1", "https://[2001:db8::1]:6443")],
)
@pytest.mark.usefixtures("pod")
def test_the_server_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, host: str, url: str
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    assert Server(ServerOptions(), QUICK).url == url


def test_kubernetes_is_imported_for_a_kubeconfig_alone() -> None:
    """The client costs 25 MB, which neither a pod nor a node on manifests must pay."""
    program = (
        "import sys, ebpflb.cluster.list_watch, ebpflb.cluster.manifests;"
        "from ebpflb.cluster.access import open_access;"
        "open_access(None, 'http://127.0.0.1').pool([]);"
        "sys.exit('kubernetes' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


URLS = ("https://192.0.2.7:6443", "https://[2001:db8::7]:443", "https://api.Example.com:6443")
NO_PROXIES = (
    *("", "*", "192.0.2.7", "192.0.2.7:6443", "192.0.2.7:443", "192.0.2.0/24", "192.0.3.0/24"),
    *("2001:db8::7", "2001:db8::/32", "[2001:db8::7]:443", "10.0.0.0/8, 192.0.2.9/24"),
    *("example.com", ".example.com", "EXAMPLE.com:6443", "ple.com", "com", "api.example.com,"),
    *("a, b ,192.0.2.7", "/", ".", "300.0.0.0/8"),
)


@pytest.mark.parametrize("no_proxy", NO_PROXIES)
def test_hosts_without_a_proxy(no_proxy: str) -> None:
    """NO_PROXY has the same meaning as with a kubeconfig."""
    from kubernetes.client.rest import should_bypass_proxies  # a fifth of a second

    for url in URLS:
        assert bypasses_proxy(url, no_proxy) == should_bypass_proxies(url, no_proxy), url


def test_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable for the scheme is used, else the one for all schemes; lower case wins."""
    for name in ("https_proxy", "http_proxy", "all_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert proxy_for(URLS[0]) == ""
    monkeypatch.setenv("ALL_PROXY", "http://all")
    assert proxy_for(URLS[0]) == proxy_for("http://192.0.2.7") == "http://all"
    monkeypatch.setenv("HTTPS_PROXY", "http://upper")
    assert proxy_for(URLS[0]) == "http://upper"
    monkeypatch.setenv("https_proxy", "http://lower")
    assert proxy_for(URLS[0]) == "http://lower"
    monkeypatch.setenv("NO_PROXY", "192.0.2.0/24")
    assert proxy_for(URLS[0]) == ""


def test_requests_go_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request fails if its proxy is missing; no error shows the proxy's password."""
    monkeypatch.setenv("http_proxy", "http://me:password@127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(ClusterError, match="proxy") as failed:
        is_answered(Server(ServerOptions(master="http://192.0.2.1"), QUICK))
    assert "password" not in str(failed.value)
