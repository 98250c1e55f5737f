# SPDX-License-Identifier: Apache-2.0
"""/readyz: 200 only once this agent's programs and every service are in force."""

import json
import os
import subprocess
from typing import Any

import pytest
from pyroute2 import netns

from ebpflb.lab.agents import wait_until
from ebpflb.serve.conditions import not_ready
from ebpflb.serve.health import MAX_REASONS, NOT_TOLD, SERVER, Health
from ebpflb.serve.listener import Request
from ebpflb.serve.status import AgentStatus
from tests.model import builders
from tests.serve.conftest import Serve, ask

OWN = 10247
NETNS, V6 = f"ebpflb-test-readyz-{os.getpid()}", "2001:db8::9"


def in_force(**more: Any) -> AgentStatus:
    made = AgentStatus(
        pid=7, node="n", source="s", started="2026-11-23T12:00:00+00:00", lists_complete=True
    )
    return made.changed(attached=True, in_sync=True, **more)


def test_everything_in_force_is_ready() -> None:
    """If nothing is missing, there is no reason against readiness."""
    assert not_ready(in_force()) == []


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"attached": False}, "the programs are not attached"),
        (
            {"programs": "an earlier version's: no BCC"},
            "the programs are an earlier version's: no BCC",
        ),
        ({"in_sync": False}, "not everything is written yet"),
        ({"in_sync": False, "sync_error": "no space"}, "the last sync failed: no space"),
        ({"devices_not_served": {"eth0": "busy"}}, "a device is not served: eth0: busy"),
        ({"choices_lost": {"eth0": "lost"}}, "a device's requests are not translated: eth0: lost"),
        (
            {"flows_wait": True, "devices_to_come": 480},
            "packets open no flows until 480 more devices have programs",
        ),
        ({"drift": {"map services": "has no pin"}}, "not as planned: map services: has no pin"),
        ({"audit_errors": {"pins": "no bpffs"}}, "an audit cannot finish: pins: no bpffs"),
    ],
)
def test_whatever_is_not_in_force_is_a_reason(fields: dict[str, Any], reason: str) -> None:
    """Each missing part suffices to make the agent unready."""
    assert not_ready(in_force().changed(**fields)) == [reason]


def test_pods_devices_that_get_programs_are_no_reason() -> None:
    """With netfilter, pods' devices without programs are no reason, because each device serves as
    soon as it has programs.
    """
    assert not_ready(in_force().changed(devices_to_come=480)) == []


def test_a_service_that_does_not_fit_is_no_reason() -> None:
    """A Service that does not fit is no reason; otherwise one tenant could make every node
    unready.
    """
    assert not_ready(in_force().changed(not_programmed={"a/b": "full"})) == []


def test_not_ready_before_the_first_sync() -> None:
    """/readyz fails before the first sync; /healthz and /livez are already 200, as in
    kube-proxy.
    """
    health = Health(timeout=60)
    health.set_node(builders.node())
    codes = {path: health.respond(Request(path, "")).status for path in ("/livez", "/healthz")}
    assert codes == {"/livez": 200, "/healthz": 200}
    assert health.respond(Request("/readyz", "")).status == 503
    health.set_not_ready([])
    assert health.respond(Request("/readyz", "")).status == 200


def test_healthz_says_when_the_data_plane_is_not_in_force() -> None:
    """/healthz fails; /livez does not, because a restart would not help."""
    health = Health(timeout=60)
    health.set_node(builders.node())
    health.set_in_force(False)
    assert health.respond(Request("/healthz", "")).status == 503
    assert health.respond(Request("/livez", "")).status == 200
    health.set_in_force(True)
    assert health.respond(Request("/healthz", "")).status == 200


@pytest.mark.parametrize("port", [10256, OWN])
def test_reasons_and_who_answers(serve: Serve, port: int) -> None:
    """The reasons are JSON, limited in number; the header Server distinguishes the agent from a
    kube-proxy.
    """
    servers = serve()
    servers.health.set_not_ready([f"reason {number}" for number in range(100)])
    reply = ask("/readyz", port)
    assert (reply.code, reply.headers["Server"]) == (503, SERVER)
    said = json.loads(reply.body)
    assert (said["ready"], len(said["reasons"])) == (False, MAX_REASONS)
    servers.health.set_not_ready([])
    assert json.loads(ask("/readyz", port).body) == {"ready": True, "reasons": []}


def is_reachable(address: str) -> bool:
    """Whether there is a route to the address: for a new IPv6 address the kernel adds it a moment
    later.
    """
    command = ["ip", "route", "get", address]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_reasons_are_told_on_loopback_only(serve: Serve) -> None:
    """A client at an address that is not loopback gets no reasons, neither by IPv4 nor by IPv6."""
    netns.create(NETNS)
    netns.pushns(NETNS)
    try:
        for command in (
            "link set lo up",
            "addr add 192.0.2.9/32 dev lo",
            f"addr add {V6}/128 dev lo nodad",
        ):
            subprocess.run(["ip", *command.split()], check=True)
        wait_until("the kernel has the route to the address", lambda: is_reachable(V6))
        servers = serve(healthz_address="0.0.0.0:10256", readyz_address="0.0.0.0:10247")
        servers.health.set_not_ready(["map services: default/secret does not fit"])
        for port in (10256, OWN):
            for host in ("192.0.2.9", V6):
                told = ask("/readyz", port, host)
                assert told.code == 503 and json.loads(told.body)["reasons"] == [NOT_TOLD]
            for host in ("127.0.0.1", "::1"):
                assert "default/secret" in ask("/readyz", port, host).body
        servers.stop()
    finally:
        netns.popns()
        netns.remove(NETNS)


def test_own_port_can_be_left_out(serve: Serve) -> None:
    """An empty address disables the port."""
    serve(readyz_address="")
    with pytest.raises(OSError):
        ask("/readyz", OWN)
    assert ask("/readyz", 10256).code == 503
