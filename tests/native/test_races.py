# SPDX-License-Identifier: Apache-2.0
"""The results of a hook while the agent rewrites the maps."""

from collections.abc import Callable

import pytest

from tests.native.node import NativeNode
from tests.publishing import frontend

WEB = "172.30.0.1:80"
OLD, NEW, OTHER = "10.1.0.1:8080", "10.1.0.2:8080", "10.9.0.1:8080"
ECONNREFUSED = 111


@pytest.fixture(params=["tcp", "udp"])
def torn(node: NativeNode, request: pytest.FixtureRequest) -> NativeNode:
    """Publish a service that points to the slots of another one."""
    node.publish(1, [f"{WEB}/{request.param}"], cluster=[OLD])
    node.publish(2, ["172.30.0.2:80"], cluster=[OTHER])
    entry = node.kernel.get("services", frontend(f"{WEB}/{request.param}"))
    foreign = node.kernel.get("services", frontend("172.30.0.2:80")).cluster
    node.kernel.put("services", frontend(f"{WEB}/{request.param}"), entry._replace(cluster=foreign))
    return node


def protocol(node: NativeNode) -> str:
    return "udp" if frontend(f"{WEB}/udp") in node.kernel.items("services") else "tcp"


def mend(node: NativeNode) -> Callable[[], None]:
    return lambda: node.publish(1, [f"{WEB}/{protocol(node)}"], cluster=[NEW])


def test_lost_once(torn: NativeNode) -> None:
    """If a slot belongs to another service, the slot and the service are looked up again."""
    torn.kernel.meanwhile["slots"] = [mend(torn)]
    answer = torn.socket(protocol(torn)).connect(WEB)
    assert answer.place == NEW
    assert torn.counted() == {"retried": 1, "translated": 1}
    assert torn.kernel.get("service_stats", 1).chosen == 1
    assert torn.opened_closed(1, NEW) == (1, 0)


def test_lost_twice(torn: NativeNode) -> None:
    """After two wrong slots in a row the call is refused, never sent to another service."""
    answer = torn.socket(protocol(torn)).connect(WEB)
    if torn.kernel.names_errno:
        assert answer == (False, ECONNREFUSED, WEB)
    else:
        assert answer == (True, 0, f"127.0.0.1:{int(protocol(torn) == 'udp')}")
    assert torn.counted() == {"retried": 1, "recycled": 1}
    assert torn.kernel.get("service_stats", 1) == (0, 0, 0, 0)


def test_no_third_look(torn: NativeNode) -> None:
    """After two recycled look-ups there is no third one, even if it would succeed."""
    torn.kernel.meanwhile["slots"] = [lambda: None, mend(torn)]
    assert torn.socket(protocol(torn)).connect(WEB).place != NEW
    assert torn.counted() == {"retried": 1, "recycled": 1}


def test_recycled_leaves_no_entry(torn: NativeNode) -> None:
    """A request whose look-ups were recycled leaves no entry."""
    torn.socket(protocol(torn)).connect(WEB)
    assert not any(torn.kernel.remembered().values())
    assert not torn.kernel.items("affinity")


def test_frontend_goes_meanwhile(torn: NativeNode) -> None:
    """If the second look-up finds no frontend, the address is not translated."""
    name = f"{WEB}/{protocol(torn)}"
    torn.kernel.meanwhile["slots"] = [lambda: torn.kernel.drop("services", frontend(name))]
    socket = torn.socket(protocol(torn))
    assert socket.connect(WEB) == (True, 0, WEB)
    assert torn.counted() == {"retried": 1, "passed": 1}


def test_last_endpoint_goes_meanwhile(torn: NativeNode) -> None:
    """If the second look-up finds a service without endpoints, the call is refused."""
    torn.kernel.meanwhile["slots"] = [lambda: torn.publish(1, [f"{WEB}/{protocol(torn)}"])]
    torn.socket(protocol(torn)).connect(WEB)
    assert torn.counted() == {"retried": 1, "refused": 1}


def test_slots_beyond_the_array(node: NativeNode) -> None:
    """A range beyond the end of the array counts as a recycled slot, and does not crash."""
    node.publish(1, [WEB], cluster=[OLD])
    entry = node.kernel.get("services", frontend(WEB))
    far = entry.cluster._replace(base=0xFFFFFFFF)
    node.kernel.put("services", frontend(WEB), entry._replace(cluster=far))
    node.socket().connect(WEB)
    assert node.counted() == {"retried": 1, "recycled": 1}


def test_recycled_service(node: NativeNode) -> None:
    """An element that was given to another frontend while it was read is not used."""
    node.publish(1, [WEB], cluster=[OLD])
    node.publish(2, ["172.30.0.2:80"], cluster=[OTHER])
    own = node.kernel.get("services", frontend(WEB))
    table = node.kernel.tables["services"]
    key, other = (table.key.pack(frontend(each)) for each in (WEB, "172.30.0.2:80"))
    table.update(key, bytes(node.kernel.ffi.buffer(table.lookup(other))))
    refused = node.socket().connect(WEB)
    assert refused.place not in (OLD, OTHER)
    assert node.counted() == {"retried": 1, "recycled": 1}
    node.kernel.meanwhile["services"] = [
        lambda: None,
        lambda: node.kernel.put("services", frontend(WEB), own),
    ]
    assert node.socket().connect(WEB).place == OLD


def test_block_moves_between_service_and_slot(node: NativeNode) -> None:
    """The agent keeps an old block for a while, so a slow reader still finds its backend."""
    node.publish(1, [WEB], cluster=[OLD])
    moved = node.kernel.get("services", frontend(WEB))._replace(cluster=(1000, 1))
    node.kernel.meanwhile["slots"] = [lambda: node.kernel.put("services", frontend(WEB), moved)]
    assert node.socket().connect(WEB).place == OLD


def test_assigned_backend_loses_its_slot(node: NativeNode) -> None:
    """If the slot of an assignment is another service's, a new backend is selected."""
    node.publish(1, [f"{WEB}/udp"], cluster=[OLD])
    node.publish(2, ["172.30.0.2:80"], cluster=[OTHER])
    socket = node.socket("udp")
    socket.sendmsg(WEB)
    slot = node.kernel.get("backend_slots", node.backend_id(2, OTHER))
    node.kernel.put("backend_slots", node.backend_id(1, OLD), slot)
    assert socket.sendmsg(WEB).place == OLD
    assert node.counted() == {"translated": 2}
    assert node.opened_closed(1, OLD) == (2, 1)
