# SPDX-License-Identifier: Apache-2.0
"""Several API servers are tried in turn, with pauses for failing ones."""

import json
import time
from pathlib import Path

import pytest

from ebpflb.cluster import api as api_module
from ebpflb.cluster import api_servers
from ebpflb.cluster.api import Server
from ebpflb.cluster.api_servers import ApiServers
from ebpflb.cluster.list_watch import ApiSource
from ebpflb.cluster.source import ServerOptions
from ebpflb.errors import ClusterError
from ebpflb.model.addresses import host_port
from ebpflb.model.events import Changed, Kind
from tests.cluster.event_log import NODE, QUICK, EventLog
from tests.cluster.objects import service
from tests.kit.api_server import FakeApiServer
from tests.kit.certificates import self_signed

ONE, TWO, NAMED, USUAL = (f"https://192.0.2.{number}:6443" for number in range(1, 5))


def test_where_they_are_reached_is_told_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is looked up again after a failure; if the look-up fails, the former addresses
    stay.
    """
    answers, told = [["192.0.2.9"], [], ["192.0.2.8", "2001:db8::8"]], list[set[str]]()

    def look_up(host: str, port: int, proto: int) -> list[tuple[object, ...]]:
        if host != "api.example.org":
            return [(0, 0, 0, "", (host, port))]
        if not (found := answers.pop(0)):
            raise OSError
        return [(0, 0, 0, "", (each, port)) for each in found]

    monkeypatch.setattr(api_servers, "getaddrinfo", look_up)
    servers = ApiServers(
        on_reached=lambda places: told.append({host_port(*each) for each in places})
    )
    for _ in range(3):
        for url in (ONE, "https://api.example.org"):
            servers.find(url)
            servers.find(url)
            servers.failed(url)
    one = "192.0.2.1:6443"
    assert told == [{one}, {one, "192.0.2.9:443"}, {one, "192.0.2.8:443", "[2001:db8::8]:443"}]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_order() -> None:
    """The given servers come first, then those that the cluster named last; the server that
    answered last comes before all.
    """
    assert ApiServers().in_turn(USUAL) == [USUAL]
    servers = ApiServers([ONE, TWO])
    servers.name([TWO, NAMED])
    servers.name([])
    assert servers.in_turn(USUAL) == [ONE, TWO, NAMED]
    servers.answered(TWO)
    assert servers.in_turn(USUAL) == [TWO, ONE, NAMED]


def test_one_that_fails_is_left_out_for_a_pause_that_doubles() -> None:
    clock = Clock()
    servers = ApiServers([ONE, TWO], clock)
    for pause in (1, 2, 4, 8, 16, 30, 30):
        servers.failed(ONE)
        clock.now += pause - 0.1
        assert servers.in_turn(USUAL) == [TWO]
        clock.now += 0.2
        assert servers.in_turn(USUAL) == [ONE, TWO]
    servers.answered(ONE)
    servers.failed(ONE)
    clock.now += 1
    assert servers.in_turn(USUAL) == [ONE, TWO]


def test_without_verification_only_the_given_ones_are_asked(tmp_path: Path) -> None:
    """Only the given servers are asked; otherwise whoever writes a slice of default/kubernetes
    would get the token of a kubeconfig that skips verification. The error names the server that
    failed.
    """
    with FakeApiServer() as gone:
        pass
    with FakeApiServer(certificate=self_signed(tmp_path, "IP:127.0.0.1")) as named:
        kubeconfig = named.kubeconfig(tmp_path)
        config = json.loads(kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        cluster.pop("certificate-authority", cluster.pop("certificate-authority-data", None))
        cluster["insecure-skip-tls-verify"] = True
        kubeconfig.write_text(json.dumps(config))
        servers = ApiServers([gone.url])
        servers.name([named.url])
        server = Server(ServerOptions(kubeconfig, servers=servers), QUICK)
        with pytest.raises(ClusterError, match=f"^{gone.url}: .*refused"):
            list(server.page(Kind.SERVICE, {}))
        assert named.requests == []


def test_the_next_server_is_asked_when_one_dies(events: EventLog, tmp_path: Path) -> None:
    """No event is missed: the watch goes on from the last version that the former server sent."""
    with FakeApiServer() as other, FakeApiServer() as one:
        servers = ApiServers([one.url, other.url])
        kubeconfig = one.kubeconfig(tmp_path)
        source = ApiSource(
            events,
            node_name=NODE,
            server_options=ServerOptions(kubeconfig, servers=servers),
            timing=QUICK,
        )
        source.start()
        try:
            events.next(Kind.SERVICE)
            one.wait_for_watch("Service")
            assert not other.requests
            one.__exit__()
            other.wait_for_watch("Service")
            other.put(service("late"))
            assert isinstance(events.next(Kind.SERVICE), Changed)
        finally:
            source.stop()


def test_a_server_that_cannot_answer_is_left_for_another(tmp_path: Path) -> None:
    """A server that cannot answer, for example without its etcd, is left for another."""
    with FakeApiServer() as one, FakeApiServer() as other:
        one.fail("Service", 503, times=9)
        server = Server(
            ServerOptions(one.kubeconfig(tmp_path), servers=ApiServers([one.url, other.url])), QUICK
        )
        server.url = other.url
        with pytest.raises(ClusterError, match=f"^{one.url}: 503"):
            list(server.page(Kind.SERVICE, {}))
        assert list(server.page(Kind.SERVICE, {}))
        assert (len(one.requests), len(other.requests)) == (1, 1)


def test_a_watch_outlives_the_patience_for_a_connection(
    events: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow connection attempt is given up early, but not an open watch."""
    monkeypatch.setattr(api_module, "CONNECT_TIMEOUT", 0.5)
    with FakeApiServer() as one, FakeApiServer() as other:
        servers = ApiServers([one.url, other.url])
        source = ApiSource(
            events,
            node_name=NODE,
            server_options=ServerOptions(one.kubeconfig(tmp_path), servers=servers),
        )
        source.start()
        try:
            events.next(Kind.SERVICE)
            one.wait_for_watch("Service")
            time.sleep(1)
            assert len(one.watches("Service")) == 1
        finally:
            source.stop()


@pytest.mark.parametrize(
    ("names", "tls_server_name", "is_accepted"),
    [
        ("IP:127.0.0.1", None, True),
        ("DNS:kubernetes.default.svc", None, False),
        ("DNS:kubernetes.default.svc", "kubernetes.default.svc", True),
        ("DNS:another", "kubernetes.default.svc", False),
    ],
)
def test_those_that_the_cluster_names_are_verified(
    tmp_path: Path, names: str, tls_server_name: str | None, is_accepted: bool
) -> None:
    """The certificates of servers that the cluster names are verified by address, or by the name in
    the kubeconfig for all of them.
    """
    certificate = self_signed(tmp_path, names)
    with FakeApiServer(certificate=certificate) as gone:
        pass
    with FakeApiServer(certificate=certificate) as named:
        kubeconfig = named.kubeconfig(tmp_path)
        config = json.loads(kubeconfig.read_text())
        config["clusters"][0]["cluster"]["server"] = gone.url
        if tls_server_name:
            config["clusters"][0]["cluster"]["tls-server-name"] = tls_server_name
        kubeconfig.write_text(json.dumps(config))
        servers = ApiServers([gone.url])
        servers.name([named.url])
        server = Server(ServerOptions(kubeconfig, servers=servers), QUICK)
        if is_accepted:
            assert list(server.page(Kind.SERVICE, {}))
        else:
            with pytest.raises(ClusterError, match="certificate"):
                list(server.page(Kind.SERVICE, {}))
            assert named.requests == []
