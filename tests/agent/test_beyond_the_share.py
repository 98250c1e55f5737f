# SPDX-License-Identifier: Apache-2.0
"""A Service that asks for more than its namespace's share gets nothing beyond the share."""

from typing import Any

import pytest

from ebpflb.kernel.map_writer import CAPACITY
from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.model.events import Key, Kind
from ebpflb.plan.desired import NOTHING, Size
from ebpflb.serve.conditions import Cause, conditions
from tests.agent.fakes import Harness, changed, listed
from tests.agent.told import EVERYTHING

TENANT = Key("tenant", "big")


def big(name: str = "big", ports: int = 4, addresses: int = 7, cluster_ip: int = 7) -> Any:
    """Return a Service with this number of external addresses, and one more frontend for each
    port.
    """
    return manifests.service(
        name,
        [f"10.96.0.{cluster_ip}"],
        [{"name": f"p{number}", "port": number} for number in range(1, ports + 1)],
        namespace="tenant",
        externalIPs=[f"203.0.113.{number}" for number in range(1, addresses + 1)],
    )


def slices(endpoints: int, ports: int = 4) -> Any:
    return manifests.endpoint_slice(
        "big",
        "IPv4",
        [
            manifests.endpoint(f"10.1.7.{number}", node="n", target="p")
            for number in range(1, endpoints + 1)
        ],
        [{"name": f"p{number}", "port": 8080} for number in range(1, ports + 1)],
        namespace="tenant",
    )


@pytest.fixture
def tenant(harness: Harness) -> Harness:
    """Return an agent with small maps, and two Services of another namespace."""
    harness.datapath.capacity = CAPACITY._replace(services=20, backend_ids=20)
    harness.start()
    harness.send(*EVERYTHING)
    return harness


def wanted(harness: Harness) -> Size:
    return harness.service_sync.planner.claims.wanted.get("tenant", NOTHING)


def is_whole(harness: Harness) -> bool:
    return not harness.status.not_programmed


def test_ports_beyond_the_share_wait_for_room(tenant: Harness) -> None:
    """Ports are served while the share lasts, the rest when there is room; a condition and an Event
    name the Service.
    """
    tenant.send(changed(Kind.SERVICE, big()))
    wait_until("it is known", lambda: not is_whole(tenant))
    share = (
        "namespace tenant already has its share of map services"
        " (16 of 20 entries, see --namespace-share)"
    )
    assert tenant.status.not_programmed == {str(TENANT): share}
    assert tenant.lacks == [(TENANT, share)]
    assert [it.cause for it in conditions(tenant.status)].count(Cause.NOT_PROGRAMMED) == 1
    assert wanted(tenant).services == 16
    tenant.send(changed(Kind.SERVICE, big(addresses=3)))
    wait_until("all of it is made", lambda: is_whole(tenant))
    assert wanted(tenant).services == 16


@pytest.mark.parametrize("endpoints", [17, 5])
def test_endpoints_beyond_the_share_are_left_out(tenant: Harness, endpoints: int) -> None:
    """One port, or all ports together, have too many endpoints; later the Service loses some of
    them.
    """
    tenant.send(changed(Kind.SERVICE, big(addresses=0)))
    tenant.send(changed(Kind.ENDPOINT_SLICE, slices(endpoints)))
    wait_until("it does not fit", lambda: not is_whole(tenant))
    assert "share of map backend_slots" in tenant.status.not_programmed[str(TENANT)]
    assert wanted(tenant).backend_slots <= 16
    tenant.send(changed(Kind.ENDPOINT_SLICE, slices(3)))
    wait_until("all of it is made", lambda: is_whole(tenant))
    assert wanted(tenant).backend_slots == 12


def test_a_restart_keeps_what_is_there(tenant: Harness) -> None:
    """Existing entries stay, whichever Service the next agent receives first."""
    tenant.send(changed(Kind.SERVICE, big("served", ports=2, cluster_ip=8)))
    tenant.send(changed(Kind.SERVICE, big("a-waits", ports=2)))
    wait_until("one waits", lambda: not is_whole(tenant))
    before = {it for it in tenant.datapath.maps.services if it.port < 3}
    services = [big("a-waits", ports=2), big("served", ports=2, cluster_ip=8)]
    tenant.stop()
    tenant.start()
    tenant.send(listed(Kind.SERVICE, *services), *EVERYTHING[1:])
    wait_until("one waits", lambda: not is_whole(tenant))
    assert set(tenant.datapath.maps.services) == before
