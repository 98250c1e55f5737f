# SPDX-License-Identifier: Apache-2.0
"""Doctor's canary in the agent: for how long it is there, when it is refused, what it disturbs."""

from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest

from ebpflb.agent import canary_sync
from ebpflb.agent.canary_sync import CanaryRequests
from ebpflb.errors import KernelError
from ebpflb.kernel.map_writer import CAPACITY
from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.model.events import Kind
from ebpflb.plan.canary import UplinkReport, is_canary
from ebpflb.serve.listener import Request, Response
from tests.agent.fakes import Harness, changed, listed, service, slices

WISH = {
    "client": "198.18.0.1",
    "endpoint": "198.18.0.2",
    "node": "192.0.2.1",
    "port": "8080",
    "nodeport": "30999",
}


@pytest.fixture
def asked(harness: Harness) -> CanaryRequests:
    """Of an agent that is not started yet."""
    return CanaryRequests(
        lambda order: harness.agent.inbox.put(order),
        lambda: UplinkReport({"eth0": ""}),
        lambda _: Response(404, b""),
    )


def begin(harness: Harness, *ranges: str) -> None:
    """The agent has one Service, and knows these ranges."""
    cidrs = [listed(Kind.SERVICE_CIDR, manifests.service_cidr(*ranges))] if ranges else []
    harness.start()
    harness.send(
        *cidrs,
        listed(Kind.SERVICE, service("web", "10.96.0.3")),
        listed(Kind.ENDPOINT_SLICE, slices("web", "10.1.0.1")),
        listed(Kind.NODE),
    )
    harness.wait_for(lambda status: status.in_sync)


def ask(asked: CanaryRequests, what: str, query: Any) -> tuple[int, Any]:
    response = asked.respond(Request(f"/v1/canary/{what}", "", urlencode(query)))
    return response.status, msgspec.json.decode(response.body)


def written(harness: Harness) -> list[str]:
    names = harness.datapath.read_contents().entries
    return [str(name) for name in names if is_canary(name)]


def test_from_its_beginning_to_its_end(harness: Harness, asked: CanaryRequests) -> None:
    """It is in the maps when it is answered; nothing else is, and nobody counts it."""
    begin(harness, "10.96.0.0/24")
    before = harness.status
    status, lease = ask(asked, "begin", WISH)
    assert status == 200 and lease["cluster_ips"][0].startswith("10.96.0."), lease
    assert len(written(harness)) == 2
    assert ask(asked, "renew", {"id": lease["id"]})[0] == 200
    assert ask(asked, "begin", WISH)[0] == 409
    harness.send()
    now = harness.status
    assert (now.service_ports, now.backends) == (before.service_ports, before.backends)
    assert ask(asked, "end", {"id": "another's"})[0] == 200 and written(harness)
    assert ask(asked, "end", {"id": lease["id"]})[0] == 200
    assert written(harness) == []
    assert ask(asked, "renew", {"id": lease["id"]})[0] == 409


def test_it_ends_by_itself(
    harness: Harness, asked: CanaryRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its lease is not renewed: doctor has been killed."""
    monkeypatch.setattr(canary_sync, "LEASE_SECONDS", 0.05)
    begin(harness, "10.96.0.0/24")
    assert ask(asked, "begin", WISH)[0] == 200
    wait_until("it is withdrawn", lambda: not written(harness))


def test_all_is_written_anew(harness: Harness, asked: CanaryRequests) -> None:
    """After a write that failed there is no canary; the doctor that renews it is told so."""
    begin(harness, "10.96.0.0/24")
    _, lease = ask(asked, "begin", WISH)
    harness.datapath.failures.append(KernelError("map services", 28, "full"))
    harness.send(changed(Kind.SERVICE, service("web", "10.96.0.4")))
    wait_until("it is gone", lambda: not written(harness))
    assert ask(asked, "renew", {"id": lease["id"]})[0] == 409


def test_its_own_write_fails(harness: Harness, asked: CanaryRequests) -> None:
    """It is refused with the reason, and the agent writes everything anew."""
    begin(harness, "10.96.0.0/24")
    harness.datapath.failures.append(KernelError("map services", 28, "no space"))
    status, said = ask(asked, "begin", WISH)
    assert status == 503 and "no space" in said["error"]
    harness.wait_for(lambda status: status.in_sync and not status.sync_error)
    wait_until("nothing of it is there", lambda: not written(harness))


def test_a_mistake_of_ours_in_its_write(harness: Harness, asked: CanaryRequests) -> None:
    """Whatever is raised, the agent does not take for written what is not: it writes all anew."""
    begin(harness, "10.96.0.0/24")
    harness.datapath.failures.append(RuntimeError("a mistake"))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="a mistake"):
        ask(asked, "begin", WISH)
    harness.wait_for(
        lambda status: status.in_sync and not harness.agent.service_sync.must_start_over
    )
    wait_until("nothing of it is there", lambda: not written(harness))


@pytest.mark.parametrize(
    "small",
    [
        {"services": 1},
        {"services": 4},
        {"service_ids": 2},
        {"backend_ids": 2},
        {"slots": 2},
        {"source_ranges": 1},
    ],
)
def test_a_full_map(harness: Harness, asked: CanaryRequests, small: dict[str, int]) -> None:
    """No canary, no trace of one, and no Service that waits for space."""
    harness.datapath.capacity = CAPACITY._replace(**small)
    begin(harness, "10.96.0.0/24")
    status, said = ask(asked, "begin", WISH)
    assert status == 409 and said["error"].startswith("map "), said
    assert written(harness) == []
    harness.send()
    assert not harness.status.not_programmed and harness.status.service_ports == 1
    assert not any(is_canary(it) for it in harness.agent.service_sync.planner.claims.desired)


def test_no_range_is_known(harness: Harness, asked: CanaryRequests) -> None:
    """One cluster IP alone does not tell which others are."""
    begin(harness)
    status, said = ask(asked, "begin", WISH)
    assert status == 409 and "ServiceCIDR" in said["error"]


def test_a_nodeport_of_a_service(harness: Harness, asked: CanaryRequests) -> None:
    begin(harness, "10.96.0.0/24")
    port = {"port": 80, "protocol": "TCP", "nodePort": 30999}
    harness.send(
        changed(Kind.SERVICE, manifests.service("np", ["10.96.0.9"], [port], type="NodePort"))
    )
    status, said = ask(asked, "begin", WISH)
    assert status == 409 and "30999" in said["error"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shadow": True}, "--shadow"),
        ({"namespaces": frozenset({"default"})}, "--namespaces"),
    ],
)
def test_not_with_these_options(
    harness: Harness, asked: CanaryRequests, options: dict[str, Any], said: str
) -> None:
    harness.options = replace(harness.options, **options)
    begin(harness, "10.96.0.0/24")
    status, answer = ask(asked, "begin", WISH)
    assert status == 409 and said in answer["error"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"client": "no address"},
        {"client": "fd00::1"},
        {"port": "0"},
        {"nodeport": "x"},
        {"node": ""},
    ],
)
def test_wrong_requests(harness: Harness, asked: CanaryRequests, wrong: dict[str, str]) -> None:
    """An error, and the agent goes on."""
    begin(harness, "10.96.0.0/24")
    assert ask(asked, "begin", WISH | wrong)[0] == 400
    assert written(harness) == [] and ask(asked, "begin", WISH)[0] == 200
