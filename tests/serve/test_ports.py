# SPDX-License-Identifier: Apache-2.0
"""The addresses of 10256 and 10249, and failures to listen (kube-proxy.md 13)."""

import asyncio
import json
import socket
import threading
import time
from pathlib import Path
from queue import SimpleQueue

import pytest

from ebpflb.cluster import event_recorder
from ebpflb.errors import NodeError
from ebpflb.lab.agents import wait_until
from ebpflb.serve.listener import ServerThread, run_beside
from tests.serve.conftest import NODE, SECONDS, FakeRecorder, Serve, ask

PORTS = {"healthz_address": "0.0.0.0:10256", "metrics_address": "127.0.0.1:10249"}
ARE_OURS = {"healthz_address": "/livez", "metrics_address": "/proxyMode"}
REASONS = {
    "healthz_address": "FailedToStartProxierHealthcheck",
    "metrics_address": "FailedToStartMetricServer",
}


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def answers(host: str, port: int) -> bool:
    try:
        return ask("/livez", port, host).code in (200, 404)
    except OSError:
        return False


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_listens_on_both_families_where_the_address_allows(serve: Serve, host: str) -> None:
    """Each wildcard address means both families, as in kube-proxy."""
    serve(healthz_address=f"{host}:10256")
    assert answers("127.0.0.1", 10256)
    assert answers("::1", 10256)


@pytest.mark.parametrize(("host", "other"), [("127.0.0.1", "::1"), ("::1", "127.0.0.1")])
def test_one_address_is_one_family(serve: Serve, host: str, other: str) -> None:
    """An address of one family means only that address."""
    serve(healthz_address=f"[{host}]:10256" if ":" in host else f"{host}:10256")
    assert answers(host, 10256)
    assert not answers(other, 10256)


def test_without_ipv6_the_wildcard_is_ipv4(serve: Serve) -> None:
    """On a node with IPv6 disabled the wildcard address listens on IPv4."""
    Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
    serve()
    assert answers("127.0.0.1", 10256)


@pytest.mark.parametrize("which", PORTS)
def test_empty_address_disables_it(serve: Serve, which: str) -> None:
    """An empty address disables only this port."""
    serve(**{which: ""})
    for each, address in PORTS.items():
        assert answers("127.0.0.1", port_of(address)) == (each != which)


@pytest.mark.parametrize("which", PORTS)
def test_taken_port_is_retried_until_it_is_free(
    serve: Serve, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each reason gives a warning and no event; the other port is open, and the status names the
    missing port. This is expected beside a kube-proxy that will be replaced.
    """
    port = port_of(PORTS[which])
    with socket.create_server(("127.0.0.1", port)):
        servers = serve(retry=0.01)
        (other,) = PORTS.keys() - {which}
        assert answers("127.0.0.1", port_of(PORTS[other]))
        (reason,) = servers.ports_not_open().values()
        assert reason == f"{PORTS[which]}: Address already in use"
        time.sleep(0.1)
    wait_until("the server", lambda: answers("127.0.0.1", port))
    wait_until("the server", lambda: servers.ports_not_open() == {})
    assert ask(ARE_OURS[which], port).code == 200
    lines = [it.getMessage() for it in caplog.records if it.levelname == "WARNING"]
    assert len(lines) == 1 and "ERROR" not in {it.levelname for it in caplog.records}
    assert PORTS[which] in lines[0]
    assert "Address already in use" in lines[0]
    servers.stop()
    assert not answers("127.0.0.1", port)


@pytest.mark.parametrize("which", PORTS)
def test_bind_address_hard_fail_is_fatal_with_an_event_on_the_node(
    serve: Serve, fake_recorder: FakeRecorder, which: str
) -> None:
    """The error names the address and the reason; afterwards nothing of the agent listens."""
    port = port_of(PORTS[which])
    with socket.create_server(("127.0.0.1", port)), pytest.raises(NodeError) as raised:
        serve(bind_address_hard_fail=True)
    assert PORTS[which] in str(raised.value)
    assert "Address already in use" in str(raised.value)
    (event,) = fake_recorder.events
    assert event.about == event_recorder.node(NODE)
    assert (event.severity, event.reason, event.action) == (
        "Warning",
        REASONS[which],
        "StartKubeProxy",
    )
    assert event.note == str(raised.value)
    assert fake_recorder.stopped, "events have to be sent before the agent ends"
    for address in PORTS.values():
        assert not answers("127.0.0.1", port_of(address))


def test_starting_is_told_on_the_node(serve: Serve, fake_recorder: FakeRecorder) -> None:
    """The Event is kube-proxy's: Normal, Starting, StartKubeProxy, no note (kube-proxy.md 17)."""
    serve()
    assert fake_recorder.events == [
        (event_recorder.node(NODE), "Normal", "Starting", "StartKubeProxy", "")
    ]


def test_timeout_is_twice_the_sync_period(serve: Serve) -> None:
    """The timeout is twice the period, so with a period of 0 there is no time at all."""
    servers = serve(sync_period=0.0)
    servers.health.queued()
    reply = ask("/livez", 10256)
    assert reply.code == 503
    assert json.loads(reply.body)["healthy"] is False
    patient = serve(sync_period=30.0, healthz_address="127.0.0.1:20256", metrics_address="")
    patient.health.queued()
    assert ask("/livez", 20256).code == 200


def test_a_task_that_fails_ends_the_agent(
    server_thread: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed task ends the agent as a thread does (stopping.Parts); a cancelled one does not."""
    failed: SimpleQueue[threading.ExceptHookArgs] = SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", failed.put)

    async def fail() -> None:
        raise KeyError("a mistake")

    async def begin() -> None:
        run_beside(asyncio.sleep(SECONDS)).cancel()
        run_beside(fail())

    server_thread.run(begin())
    failure = failed.get(timeout=SECONDS)
    assert (failure.exc_type, failure.thread and failure.thread.name) == (KeyError, "serve")
    assert failed.empty()
