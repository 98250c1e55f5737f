# SPDX-License-Identifier: Apache-2.0
"""Addresses of pools are written into Services: by one node, by two, and while the owner dies."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ebpflb.agent.address_writer import AGAIN, BURST, AddressWriter
from ebpflb.agent.pool_addresses import AddressesWritten, View
from ebpflb.cluster.event_recorder import EventRecorder, server_factory
from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.model.pools import CLASS, Pools, parse_pools
from ebpflb.plan.pool_addresses import Barred
from tests.kit.api_server import FakeApiServer

POOLS = parse_pools(("192.0.2.1-192.0.2.250",))


class Owner:
    """The thread that decides who owns the pools."""

    def __init__(self) -> None:
        self.writes, self.barred = True, lambda address: ""
        self.view: View | None = View()

    def changed(self, what: object) -> None:
        """The watch has told of something."""
        self.view = View(claims=(what,), barred=self.barred)  # type: ignore[arg-type]


class Writer:
    """A node's writer; ``told`` are the problems that it has last told."""

    def __init__(
        self,
        api: FakeApiServer,
        folder: Path,
        pools: Pools = POOLS,
        wrapped: Callable[[Any], Any] = lambda made: made,
    ) -> None:
        self.now, self.owner = 0.0, Owner()
        self.told: dict[str, str] = {}
        make = server_factory(api.kubeconfig(folder))
        self.events = EventRecorder(make, "one")
        here: Any = self
        self.writer = AddressWriter(
            pools, here.owner, lambda: wrapped(make()), self.events, here, clock=lambda: self.now
        )

    def put(self, message: AddressesWritten) -> None:
        """As the loop's inbox."""
        self.told = dict(message.problems)

    def turn(self, *, barred: Barred | None = None) -> None:
        self.owner.barred = barred or self.owner.barred
        self.now += 10.0
        self.owner.changed(self.now)
        self.writer.turn()


@pytest.fixture
def api() -> Iterator[FakeApiServer]:
    with FakeApiServer() as made:
        yield made


def put(api: FakeApiServer, name: str, created: str = "1", **more: Any) -> None:
    ports = [{"port": 80, "name": "", "protocol": "TCP"}]
    made = manifests.service(
        name, ["10.0.0.1"], ports, type="LoadBalancer", loadBalancerClass=CLASS, **more
    )
    made["metadata"] |= {"creationTimestamp": created, "uid": f"uid-{name}"}
    api.put(made)


def held(api: FakeApiServer) -> dict[str, list[str]]:
    """The addresses of each Service."""
    return {
        it["metadata"]["name"]: [
            each["ip"] for each in it.get("status", {}).get("loadBalancer", {}).get("ingress", [])
        ]
        for it in api.objects("Service")
    }


def check_all_have_one(api: FakeApiServer, number: int) -> None:
    found = held(api)
    counts = Counter(it for its in found.values() for it in its)
    assert len(found) == number and all(len(its) == 1 for its in found.values()), found
    assert set(counts.values()) == {1}, counts


def test_a_service_gets_an_address_and_keeps_it(api: FakeApiServer, tmp_path: Path) -> None:
    """Over a writer's restart, and whatever comes later. Services of other classes get none."""
    put(api, "web")
    api.put(manifests.service("other", ["10.0.0.2"], [{"port": 80}], type="LoadBalancer"))
    Writer(api, tmp_path).turn()
    assert held(api) == {"web": ["192.0.2.1"], "other": []}
    put(api, "older", created="0")
    again = Writer(api, tmp_path)
    again.turn()
    assert held(api) == {"web": ["192.0.2.1"], "other": [], "older": ["192.0.2.2"]}
    assert [it[0].reason for it in again.events.waiting] == ["AddressAssigned"]
    written = len(api.patches)
    again.turn()
    assert len(api.patches) == written


def test_only_the_owner_reads_and_writes(api: FakeApiServer, tmp_path: Path) -> None:
    put(api, "web")
    writer = Writer(api, tmp_path)
    writer.owner.writes = False
    writer.turn()
    assert api.requests == []


def test_200_services_at_once_while_the_owner_is_killed(api: FakeApiServer, tmp_path: Path) -> None:
    """The next owner gives what is left; nobody loses what it has."""
    for number in range(200):
        put(api, f"s{number:03}")
    first, second = Writer(api, tmp_path), Writer(api, tmp_path)
    first_writes = threading.Thread(target=first.turn)
    first_writes.start()
    wait_until("some are written", lambda: len(api.patches) >= 50)
    first.owner.writes = False
    first_writes.join()
    before = {name: its for name, its in held(api).items() if its}
    assert 50 <= len(before) < 200
    second.turn()
    check_all_have_one(api, 200)
    assert before.items() <= held(api).items()


def test_two_owners_for_a_while(api: FakeApiServer, tmp_path: Path) -> None:
    """Both write while Services come; then one puts right what both have done."""
    writers = [Writer(api, tmp_path), Writer(api, tmp_path)]
    done = threading.Event()

    def write(writer: Writer) -> None:
        while not done.is_set():
            writer.turn()

    with ExitStack() as stack:
        threads = [threading.Thread(target=write, args=(it,)) for it in writers]
        for thread in threads:
            stack.callback(thread.join)
        stack.callback(done.set)
        for thread in threads:
            thread.start()
        for number in range(100):
            put(api, f"s{99 - number:03}")  # the newest sorts first: the order changes each time
        wait_until("both have written", lambda: len(api.patches) >= 100)
    writers[0].turn()
    check_all_have_one(api, 100)


def test_of_two_with_one_address_the_newer_gets_another(api: FakeApiServer, tmp_path: Path) -> None:
    """The Event of the newer says why."""
    for name, created in (("old", "1"), ("new", "2")):
        put(api, name, created)
        it = next(it for it in api.objects("Service") if it["metadata"]["name"] == name)
        api.put(it | {"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.9"}]}}})
    writer = Writer(api, tmp_path)
    writer.turn()
    assert held(api) == {"old": ["192.0.2.9"], "new": ["192.0.2.1"]}
    (event, _), *_ = writer.events.waiting
    assert event.note == (
        "address 192.0.2.1 instead of 192.0.2.9: 192.0.2.9 is the address of another Service"
    )


def test_what_cannot_be_given_is_a_condition_and_an_event(
    api: FakeApiServer, tmp_path: Path
) -> None:
    """Until it can: it is tried again without any change of a Service."""
    put(api, "web", loadBalancerIP="192.0.2.7")
    writer = Writer(api, tmp_path)
    writer.turn(barred=lambda address: "is a gateway")
    assert writer.told == {"default/web": "192.0.2.7 is a gateway"}
    assert [it[0].reason for it in writer.events.waiting] == ["NoAddress"]
    about = writer.owner.view
    writer.owner.view = about and about._replace(barred=lambda address: "")
    writer.writer.turn()
    assert held(api) == {"web": []}
    writer.now += AGAIN
    writer.writer.turn()
    assert (held(api), writer.told) == ({"web": ["192.0.2.7"]}, {})


class Busy:
    """The API server of a tenant who changes a Service before each write of it."""

    def __init__(self, api: FakeApiServer, made: Any) -> None:
        self.api, self.page, self.write = api, made.page, made.patch

    def patch(self, path: str, *what: Any) -> None:
        if "busy" in path:
            put(self.api, "aa-busy")
        self.write(path, *what)


def test_a_service_that_changes_all_the_time_stops_no_other(
    api: FakeApiServer, tmp_path: Path
) -> None:
    """Its writes fail: it has another version each time."""
    put(api, "aa-busy")
    put(api, "web")
    writer = Writer(api, tmp_path, wrapped=lambda made: Busy(api, made))
    writer.turn()
    assert held(api) == {"aa-busy": [], "web": ["192.0.2.2"]}
    assert "409" in writer.told["default/aa-busy"]


def test_lists_have_a_bound_whatever_tenants_write(api: FakeApiServer, tmp_path: Path) -> None:
    put(api, "web")
    writer = Writer(api, tmp_path)
    for number in range(50):
        writer.owner.changed(number)
        writer.writer.turn()
    assert api.lists("Service") == BURST


def test_a_pool_for_namespaces_with_a_label(api: FakeApiServer, tmp_path: Path) -> None:
    for name, labels in (("default", {"team": "red"}), ("blue", {})):
        metadata = {"name": name, "labels": labels}
        api.put({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    put(api, "mine")
    put(api, "yours", namespace="blue")
    writer = Writer(api, tmp_path, parse_pools(("192.0.2.8@team=red",)))
    writer.turn()
    assert held(api) == {"mine": ["192.0.2.8"], "yours": []}
    assert writer.told == {"blue/yours": "--l2-pool has no pool for namespace blue"}


def test_the_api_server_that_refuses_is_named(api: FakeApiServer, tmp_path: Path) -> None:
    put(api, "web")
    api.fail("Patch", 403, b'{"message": "services/status is forbidden"}')
    writer = Writer(api, tmp_path)
    writer.turn()
    assert "services/status is forbidden" in writer.told["default/web"]
