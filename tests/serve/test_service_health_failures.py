# SPDX-License-Identifier: Apache-2.0
"""Health-check node ports that another program occupies (kube-proxy.md 10)."""

import socket
import time
from ipaddress import ip_address

import pytest

from ebpflb.cluster import event_recorder
from ebpflb.lab.agents import wait_until
from ebpflb.serve.servers import HttpServers
from tests.serve.conftest import NODE, FakeRecorder, Serve
from tests.serve.health_ports import OTHER, PORT, SHOP, V4, WEB, checked, get, refused


@pytest.fixture
def servers(serve: Serve) -> HttpServers:
    return serve(healthz_address="", metrics_address="", retry=0.01)


def test_failure_to_listen_is_told_on_the_service(
    servers: HttpServers, fake_recorder: FakeRecorder
) -> None:
    """A Warning event has kube-proxy's reason and action, and names node, service, port and
    error.
    """
    with socket.create_server(("127.0.0.1", PORT)):
        servers.service_health.update({WEB: checked()})
    event = fake_recorder.events[-1]
    assert event.about == event_recorder.service(WEB)
    assert (event.severity, event.reason, event.action) == (
        "Warning",
        "FailedToStartServiceHealthcheck",
        "Listen",
    )
    start = f'node {NODE} failed to start healthcheck "{WEB}" on port {PORT}: '
    assert event.note.startswith(f"{start}Address already in use")


def test_failure_closes_all_listeners_of_that_service(
    servers: HttpServers, fake_recorder: FakeRecorder
) -> None:
    """If one of two addresses is taken, the other one is closed too."""
    ours = {V4: [ip_address("127.0.0.1"), ip_address("127.0.0.2")]}
    with socket.create_server(("127.0.0.2", PORT)):
        servers.service_health.update({WEB: checked(), SHOP: checked(OTHER)}, ours)
        assert refused(host="127.0.0.1")
    assert get(port=OTHER).code == 200
    assert fake_recorder.reasons == ["Starting", "FailedToStartServiceHealthcheck"]


def test_failure_is_retried_without_a_sync(
    servers: HttpServers, fake_recorder: FakeRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    """A kube-proxy has all ports; when it ends, the agent opens them without any change.

    Each family has one event and one line in the log, with the reason, however often it was tried.
    """
    with socket.create_server(("::", PORT), family=socket.AF_INET6, dualstack_ipv6=True):
        servers.service_health.update({WEB: checked(v6=1)})
        time.sleep(0.1)
    wait_until("the server", lambda: not refused() and not refused(host="::1"))
    assert get().code == get(host="::1").code == 200
    failures = [event.note for event in fake_recorder.events if event.severity == "Warning"]
    assert [[host for host in ("0.0.0.0", "::") if repr(host) in it] for it in failures] == [
        ["0.0.0.0"],
        ["::"],
    ]
    lines = [it.getMessage() for it in caplog.records if it.levelname == "WARNING"]
    assert lines == [f"{note}; trying again every 0.01 s" for note in failures]


def test_a_port_that_changes_all_the_time_fills_no_log(
    servers: HttpServers, fake_recorder: FakeRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    """Two taken ports in turn give 25 lines and Events; the lines and Events of another Service
    still come.
    """
    with socket.create_server(("127.0.0.1", PORT)), socket.create_server(("127.0.0.1", OTHER)):
        for turn in range(100):
            servers.service_health.update({WEB: checked((PORT, OTHER)[turn % 2])})
        servers.service_health.update({SHOP: checked(PORT)})
    failures = [event.about for event in fake_recorder.events if event.severity == "Warning"]
    assert failures == [event_recorder.service(WEB)] * 25 + [event_recorder.service(SHOP)]
    assert len([it for it in caplog.messages if "failed to start healthcheck" in it]) == 26
