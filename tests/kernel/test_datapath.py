# SPDX-License-Identifier: Apache-2.0
"""A node's maps and programs together, with small maps and both variants."""

import os
import struct
from collections.abc import Iterator
from contextlib import closing
from ipaddress import IPv4Address, ip_address, ip_network
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ebpflb.entries.services import (
    NO_SLOT,
    Backend,
    BackendLoad,
    BackendName,
    DeviceEntry,
    Frontend,
    LastIds,
    Range,
    ServiceEntry,
    ServiceRange,
    Settings,
    Translation,
    prefix_of,
    service_range,
)
from ebpflb.errors import CompileError, KernelError
from ebpflb.kernel import bpf
from ebpflb.kernel.attach import device_programs
from ebpflb.kernel.attach.clsact import Clsact
from ebpflb.kernel.attach.device_programs import unpin_all
from ebpflb.kernel.datapath import Datapath
from ebpflb.kernel.maps.bpf_map import Counters
from ebpflb.kernel.maps.state_dir import StateDir, remove_tree
from ebpflb.kernel.programs import compiler
from ebpflb.plan.planner import Plan
from ebpflb.tools.snapshot import Snapshot
from tests.kernel.attach.device_namespace import HOOKS, Namespace, entered
from tests.kernel.variants import needs_root

pytestmark = needs_root

NAME = f"ebpflb-test-{os.getpid()}-datapath"
WIDE, NARROW = (service_range(ip_network(text)) for text in ("10.96.0.0/16", "fd00::/112"))


@pytest.fixture
def datapath(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Datapath]:
    """Return a datapath that attaches by clsact, whose programs tc shows on every kernel."""
    monkeypatch.setattr(device_programs, "attacher", lambda state: Clsact(state.devices_directory))
    made = Datapath(StateDir(directory))
    yield made
    made.close()


@pytest.fixture
def ns() -> Iterator[Namespace]:
    """Move the test's thread into a namespace."""
    with entered(NAME) as made:
        yield made


def held(datapath: Datapath, name: str) -> dict[Any, Any]:
    return dict(datapath.maps[name].items())


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("service_ranges", {WIDE: 1, NARROW: 1}, {ServiceRange(104, ip_address("10.0.0.0")): 1}),
        ("node_addresses", {ip_address("192.0.2.1"): 1}, {ip_address("fd00::1"): 1}),
        (
            "devices",
            {2: DeviceEntry(ip_address("192.0.2.1"), ip_address("::"), frozenset())},
            {2: DeviceEntry(ip_address("192.0.2.2"), ip_address("fd00::1"), frozenset({"pods"}))},
        ),
    ],
)
def test_a_map_becomes_equal_to_the_wanted_one(
    datapath: Datapath, name: str, first: dict[Any, Any], second: dict[Any, Any]
) -> None:
    """A map becomes equal to the wanted one; writing the same again changes nothing."""
    for wanted in (first, first | second, second, {}, first):
        datapath.write_map(name, wanted)
        assert held(datapath, name) == wanted
    writes = held(datapath, "settings")[0].writes
    datapath.write_map(name, first)
    assert held(datapath, "settings")[0].writes == writes


def test_settings_change_as_given(datapath: Datapath) -> None:
    """The settings change as given; the count of writes stays."""
    span = prefix_of(ip_network("10.96.0.0/16"))
    datapath.write_settings(Settings(flags=frozenset({"masquerade_all"})))
    datapath.write_settings(
        Settings(flags=frozenset({"masquerade_all"}), first_port=7, span_v4=span)
    )
    found = held(datapath, "settings")[0]
    assert found.flags - {"attaching"} == {"masquerade_all"}
    assert (found.first_port, found.span_v4) == (7, span)
    assert found.writes == 0


def test_egress_stays_until_the_last_flow_has_ended(
    cgroup: Path, ns: Namespace, cache: Path, datapath: Datapath
) -> None:
    """Flows are opened once all devices have a program at egress; it stays as long as a flow may be
    there, and no flow is opened any more before it goes.
    """

    def state() -> tuple[bool, bool]:
        flags = held(datapath, "settings")[0].flags
        return "attaching" in flags, all(ns.filters(each.name)["egress"] for each in ns.served())

    def want(wanted: bool, opened: int, empty: int) -> tuple[bool, bool]:
        datapath.wants_egress = wanted
        datapath.maps["flow_gate"].write([(0, (opened, empty, 0))])
        datapath.attach_devices(ns.served())
        return state()

    datapath.load(cache)
    datapath.write_settings(Settings())
    datapath.wants_egress = False
    datapath.attach(cgroup, ns.served())
    assert state() == (True, False)
    assert want(True, 0, 1) == (False, True)
    assert want(False, 1, 1) == (False, True)
    assert not datapath.has_needless_egress
    assert want(False, 1, 2) == (True, True)
    assert datapath.has_needless_egress
    assert want(False, 2, 2) == (False, True)
    assert [want(False, 2, 3), want(False, 2, 3)] == [(True, True), (True, False)]
    unpin_all(datapath.state)


@pytest.mark.parametrize("protocol", ["tcp", "other", None])
def test_no_flow_to_look_up_on_a_new_node(
    cgroup: Path, ns: Namespace, cache: Path, datapath: Datapath, protocol: str | None
) -> None:
    """The first packet needs no look-up, unless the flow tables have a flow."""
    if protocol:
        flows = datapath.maps[f"{protocol}_flows"]
        spec = flows.spec
        flow = flows.key.unpack(bytes(spec.key_size)), flows.value.unpack(bytes(spec.value_size))
        flows.write([flow])
    datapath.load(cache)
    datapath.attach(cgroup, ns.served())
    assert datapath.maps["flow_gate"].get(0).empty == (0 if protocol else 1)
    unpin_all(datapath.state)


def test_flows_during_an_upgrade(
    directory: Path, cgroup: Path, ns: Namespace, cache: Path, datapath: Datapath
) -> None:
    """An agent that replaces another's programs keeps opening flows, and does not mark empty tables
    as empty: a program may be opening a flow.
    """
    datapath.load(cache)
    datapath.attach(cgroup, ns.served())
    datapath.maps["flow_gate"].write([(0, gate := (1, 1, 0))])
    with closing(Datapath(StateDir(directory))) as newer:
        assert newer.is_attached()
        newer.write_settings(Settings(flags=frozenset({"detect_local"})))
        assert held(newer, "settings")[0].flags == {"detect_local"}
        newer.load(cache)
        newer.attach(cgroup, ns.served())
        assert held(newer, "flow_gate") == {0: gate}
    unpin_all(datapath.state)


def test_frontend_moves(datapath: Datapath) -> None:
    """The count grows when a UDP frontend gets another service, or none; other writes leave it
    unchanged.
    """

    def moved(*plans: Plan) -> list[bool]:
        found = []
        for plan in plans:
            before = held(datapath, "settings")[0].frontend_moves
            datapath.apply(plan)
            found.append(held(datapath, "settings")[0].frontend_moves != before)
        return found

    def service(id: int, size: int = 1, protocol: int = 17) -> Plan:
        where = Frontend(ip_address("10.96.0.10"), 53, protocol)
        ranges = Range(0, size), Range(0, 0)
        return Plan(services=[(where, ServiceEntry(id, frozenset(), 0, size, *ranges))])

    datapath.write_settings(Settings())
    assert held(datapath, "settings")[0].frontend_moves > 0
    assert moved(service(1), service(1), service(1, size=2)) == [True, False, False]
    assert moved(service(2), service(2), Plan()) == [True, False, False]
    assert moved(service(3, protocol=6), service(4, protocol=6)) == [False, False]
    frontends = [frontend for frontend, _ in service(2).services + service(4, protocol=6).services]
    assert moved(*(Plan(removed_services=[each]) for each in frontends)) == [True, False]


def test_frontend_moves_after_a_failure(
    datapath: Datapath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an unfinished write the next one counts as a move, whatever it writes."""

    def fail(*_: object) -> None:
        raise KernelError("map update", 7, "full")

    datapath.write_settings(Settings())
    for write in (
        lambda: datapath.write_settings(Settings()),
        lambda: datapath.apply(Plan()),
        lambda: datapath.write_map("node_addresses", {ip_address("192.0.2.9"): 1}),
    ):
        before = held(datapath, "settings")[0].frontend_moves
        with monkeypatch.context() as patched, pytest.raises(KernelError):
            patched.setattr(datapath.maps["backend_slots"], "write", fail)
            datapath.apply(Plan(backend_slots=[(1, 1)]))
        write()
        settings = held(datapath, "settings")[0]
        assert (settings.frontend_moves, settings.writes % 2) == (before + 1, 0)


def test_last_ids(datapath: Datapath, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last given ids are recorded before anything else in the plan is written, and stay with
    other writes.
    """
    assert datapath.read_contents().last_ids == LastIds(0, 0)
    datapath.apply(Plan(last_ids=[LastIds(3, 9)]))
    datapath.write_settings(Settings(flags=frozenset({"shadow"})))
    datapath.apply(Plan(removed_backend_slots=[5]))
    assert datapath.read_contents().last_ids == LastIds(3, 9)
    with monkeypatch.context() as patched, pytest.raises(KernelError):
        patched.setattr(datapath, "netfilter", Mock(write=Mock(side_effect=KernelError("", 7, ""))))
        datapath.apply(Plan(last_ids=[LastIds(3, 10)], backend_slots=[(10, 1)]))
    assert datapath.read_contents().last_ids == LastIds(3, 10)


def test_a_former_backend_without_a_service(datapath: Datapath) -> None:
    """What netfilter translated for a backend of no Service is known to the next agent, wherever
    its slot is.
    """
    backend = Backend(IPv4Address("10.1.0.7"), 8080, frozenset({"cluster"}), 7, 3)
    names = [(7, BackendName("node", "pod"))]
    datapath.apply(Plan(slots=[(900, backend)], backend_slots=[(7, 900)], backend_names=names))
    assert datapath.read_contents().leftover_translations == [Translation(7, *backend[:2])]


def test_no_backend_has_a_slot(datapath: Datapath) -> None:
    """An agent starts, though somebody has written that no backend of any id has a slot."""
    slots = datapath.maps["backend_slots"]
    slots.write([(id, NO_SLOT) for id in range(slots.spec.entries)])
    assert datapath.read_contents().entries == {}


def test_a_name_that_is_removed_while_others_read(datapath: Datapath) -> None:
    """Beside an agent, `ebpflb monitor` and `maps dump` find no name, and do not fail."""
    datapath.apply(Plan(backend_names=[(7, BackendName("node", "pod"))]))
    names = Snapshot(datapath.maps).backend_names
    datapath.apply(Plan(removed_backend_names=[7]))
    assert (7 in names, names[7]) == (True, BackendName("", ""))


def test_counters_of_former_backends(datapath: Datapath) -> None:
    """The counters show sockets of a removed backend until a new backend gets its id."""
    stats = datapath.maps["backend_stats"]
    assert isinstance(stats, Counters)
    name = BackendName("node", "pod")
    datapath.apply(Plan(backend_slots=[(5, 0)], backend_names=[(5, name)]))
    count = struct.pack("=2Q", 3, 1).ljust(stats.size, b"\0")
    bpf.map_update(stats.fd, stats.key.pack(5), count)
    for plan in (
        Plan(backend_slots=[(5, 1)]),
        Plan(backend_names=[(5, name._replace(target="renamed"))]),
        Plan(removed_backend_slots=[5], removed_backend_names=[5]),
    ):
        datapath.apply(plan)
        assert stats.get(5) == (3, 1)
    datapath.apply(Plan(backend_slots=[(5, 2)], backend_names=[(5, name)]))
    assert stats.get(5) == (0, 0)


def test_open_connections_of_former_backends(datapath: Datapath) -> None:
    """Open connections of a removed backend do not count for a later backend with the same id; a
    counter counts uncounted connections.
    """
    loads, name = datapath.maps["backend_loads"], BackendName("node", "pod")
    datapath.apply(Plan(backend_slots=[(5, 0)], backend_names=[(5, name)]))
    loads.write([(5, BackendLoad(open=3, generation=7, uncounted=2))])
    datapath.apply(Plan(removed_backend_slots=[5], removed_backend_names=[5]))
    assert loads.get(5) == BackendLoad(open=0, generation=8, uncounted=2)
    datapath.apply(Plan(backend_slots=[(5, 2)], backend_names=[(5, name)]))
    assert loads.get(5) == BackendLoad(open=0, generation=9, uncounted=2)


def tags(ns: Namespace, device: str) -> dict[str, bytes]:
    """Return the tags of the programs at a device, which are hashes of their code."""
    found = {}
    for end, (number,) in ns.filters(device).items():
        fd = bpf.prog_by_id(number)
        found[end] = bytes(bpf.info(fd, "prog_info").tag)
        os.close(fd)
    return found


def test_devices_without_a_link_header_have_their_own_programs(
    datapath: Datapath, ns: Namespace, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices without a link header have separate programs, compiled at the start, and loaded once
    a device needs them.
    """
    datapath.load(cache)
    monkeypatch.setattr(compiler, "compile_source", lambda *_, **__: 1 / 0)
    assert datapath.attach_devices(ns.served("!tun*")) == {}
    alike = len(datapath.programs)
    assert datapath.attach_devices(ns.served()) == {}
    assert len(datapath.programs) == alike + len(HOOKS)
    assert tags(ns, "v0") == tags(ns, "br0")
    assert all(tags(ns, "v0")[end] != tags(ns, "tun0")[end] for end in HOOKS)
    unpin_all(datapath.state)


def test_attaches_without_the_state_directory(
    datapath: Datapath, ns: Namespace, cache: Path, cgroup: Path
) -> None:
    """If all pins are removed while the agent starts, it pins its maps again."""
    datapath.load(cache)
    remove_tree(datapath.state.directory)
    assert datapath.attach(cgroup, ns.served("!tun*")) == {}
    assert list(datapath.state.pin_faults(datapath.maps)) == []
    assert datapath.is_attached()
    unpin_all(datapath.state)


def test_load_fails(
    datapath: Datapath, ns: Namespace, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the packet programs do not compile, there are no programs to attach."""
    real = compiler.compile_source

    def fail(source: str, *flags: Any, **where: Any) -> Any:
        if source == "hooks/packet.c":
            raise CompileError("no clang")
        return real(source, *flags, **where)

    monkeypatch.setattr(compiler, "compile_source", fail)
    with pytest.raises(CompileError):
        datapath.load(cache)
    assert not datapath.programs
    assert not datapath.is_attached()
