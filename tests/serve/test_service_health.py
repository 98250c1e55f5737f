# SPDX-License-Identifier: Apache-2.0
"""Health-check node ports, sentence by sentence of kube-proxy.md 10."""

import socket
import subprocess
from contextlib import suppress
from http.client import HTTPConnection
from ipaddress import ip_address

import pytest

from ebpflb.model import nodes
from ebpflb.serve.servers import HttpServers
from tests.model import builders
from tests.serve.conftest import Serve
from tests.serve.health_ports import OTHER, PORT, SHOP, V4, WEB, checked, get, refused


@pytest.fixture
def servers(serve: Serve) -> HttpServers:
    return serve(healthz_address="", metrics_address="")


def test_one_server_per_family_with_its_own_count(servers: HttpServers) -> None:
    """tcp4 on 0.0.0.0 and tcp6 on [::] are separate, each with its own endpoints."""
    servers.service_health.update({WEB: checked(v4=2, v6=0)})
    v4, v6 = get(host="127.0.0.1"), get(host="::1")
    assert (v4.code, v4.headers["X-Load-Balancing-Endpoint-Weight"]) == (200, "2")
    assert (v6.code, v6.headers["X-Load-Balancing-Endpoint-Weight"]) == (503, "0")


@pytest.mark.parametrize("path", ["/", "/healthz", "/any/thing?at=all"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE", "ANY"])
def test_any_path_any_method(servers: HttpServers, path: str, method: str) -> None:
    """All paths and methods get the same answer."""
    servers.service_health.update({WEB: checked()})
    assert get(path, method=method).code == 200


def test_status_is_200_iff_there_are_endpoints_and_the_proxy_is_healthy(serve: Serve) -> None:
    """The status is 200 only with endpoints and a healthy proxy; with a period of 0 any queued
    change makes the proxy unhealthy.
    """
    servers = serve(healthz_address="", metrics_address="", sync_period=0.0)
    found = {}
    for count in (0, 3):
        servers.service_health.update({WEB: checked(v4=count)})
        for healthy in (True, False):
            (servers.health.synced if healthy else servers.health.queued)()
            found[count, healthy] = get().code
    assert found == {(0, True): 503, (0, False): 503, (3, True): 200, (3, False): 503}


def test_node_eligibility_is_not_considered(servers: HttpServers) -> None:
    """A node that is about to be deleted still reports its endpoints."""
    servers.health.set_node(builders.node(taints=[{"key": nodes.DELETION_TAINT}]))
    assert not servers.health.eligible
    servers.service_health.update({WEB: checked()})
    assert get().code == 200


@pytest.mark.parametrize("count", [0, 2])
def test_headers_weight_also_with_503(servers: HttpServers, count: int) -> None:
    """The answer has kube-proxy's three headers, whatever the status."""
    servers.service_health.update({WEB: checked(v4=count)})
    reply = get()
    assert reply.code == (200 if count else 503)
    assert reply.headers["Content-Type"] == "application/json"
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    assert reply.headers["X-Load-Balancing-Endpoint-Weight"] == str(count)


def test_body_is_tab_indented_in_kube_proxys_order(servers: HttpServers) -> None:
    """The bytes of the body equal kube-proxy's."""
    servers.service_health.update({WEB: checked(v4=2)})
    assert get().body == (
        '{\n\t"service": {\n\t\t"namespace": "default",\n\t\t"name": "web"\n\t},\n'
        '\t"localEndpoints": 2,\n\t"serviceProxyHealthy": true\n}'
    )


def test_body_of_an_unhealthy_proxy(serve: Serve) -> None:
    """serviceProxyHealthy is a boolean, and the count is unchanged."""
    servers = serve(healthz_address="", metrics_address="", sync_period=0.0)
    servers.service_health.update({WEB: checked(v4=2)})
    servers.health.queued()
    assert '"localEndpoints": 2,\n\t"serviceProxyHealthy": false\n}' in get().body


def test_restricted_nodeport_addresses_restrict_the_listeners(servers: HttpServers) -> None:
    """Only the given addresses listen; a family without any of them is unrestricted."""
    subprocess.run(["ip", "addr", "add", "192.0.2.1/32", "dev", "lo"], check=True)
    subprocess.run(["ip", "addr", "add", "192.0.2.2/32", "dev", "lo"], check=True)
    ours = {V4: [ip_address("192.0.2.1"), ip_address("192.0.2.2")]}
    servers.service_health.update({WEB: checked(v6=1)}, ours)
    assert get(host="192.0.2.1").code == get(host="192.0.2.2").code == 200
    assert get(host="::1").code == 200
    assert refused(host="127.0.0.1")


def test_addresses_are_followed(servers: HttpServers) -> None:
    """New addresses of the node are listened on; removed addresses no longer are."""
    for ours, other in (("127.0.0.1", "127.0.0.2"), ("127.0.0.2", "127.0.0.1")):
        servers.service_health.update({WEB: checked()}, {V4: [ip_address(ours)]})
        assert get(host=ours).code == 200
        assert refused(host=other)


def test_updated_after_each_sync(servers: HttpServers) -> None:
    """The count is updated, also on a kept connection."""
    servers.service_health.update({WEB: checked(v4=0)})
    connection = HTTPConnection("127.0.0.1", PORT, timeout=60)
    seen = []
    for count in (0, 2, 1, 0):
        servers.service_health.update({WEB: checked(v4=count)})
        connection.request("GET", "/")
        reply = connection.getresponse()
        reply.read()
        seen.append((reply.status, reply.getheader("X-Load-Balancing-Endpoint-Weight")))
    connection.close()
    assert seen == [(503, "0"), (200, "2"), (200, "1"), (503, "0")]


def test_port_change_closes_and_opens(servers: HttpServers) -> None:
    """The old port is refused at once, the new one has the current count."""
    servers.service_health.update({WEB: checked(v4=1)})
    servers.service_health.update({WEB: checked(OTHER, v4=2)})
    assert refused()
    assert get(port=OTHER).headers["X-Load-Balancing-Endpoint-Weight"] == "2"


def test_service_gone_closes_the_listener(servers: HttpServers) -> None:
    """After deletion, or a change to policy Cluster or another type, new connections are refused,
    and kept connections ended.
    """
    servers.service_health.update({WEB: checked(v6=1), SHOP: checked(OTHER)})
    with socket.create_connection(("127.0.0.1", PORT), timeout=60) as kept:
        kept.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert kept.recv(4096).startswith(b"HTTP/1.1 200 ")
        servers.service_health.update({SHOP: checked(OTHER)})
        assert refused()
        assert refused(host="::1")
        with suppress(ConnectionResetError):
            assert kept.recv(4096) == b""
    assert get(port=OTHER).code == 200


def test_stop_closes_everything(servers: HttpServers) -> None:
    """A stopped agent answers no one, so load balancers turn elsewhere."""
    servers.service_health.update({WEB: checked(v6=1)})
    servers.stop()
    assert refused()
    assert refused(host="::1")
