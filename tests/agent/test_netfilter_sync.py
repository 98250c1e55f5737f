# SPDX-License-Identifier: Apache-2.0
"""The table of the engine netfilter matches the maps, in a namespace of the test's own.

Each test runs with a table owned by the agent's socket, as in new kernels, and with a table that
every program can change, as in older kernels.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from ebpflb.agent import engine
from ebpflb.agent.audit import ElementsCheck
from ebpflb.agent.engine import NetfilterSync
from ebpflb.entries.flows import Flow, FlowKind, Tuple
from ebpflb.entries.services import NO_SLOT, Backend, Frontend, Range, ServiceEntry, Translation
from ebpflb.errors import KernelError, NodeError
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.netfilter import conntrack, nft
from ebpflb.kernel.netfilter.elements import Elements, unpack
from ebpflb.kernel.netfilter.nft import Session
from ebpflb.kernel.netfilter.table import KEEPER, TABLE, table_options
from ebpflb.kernel.node import sysctls
from ebpflb.model.events import Part
from ebpflb.options import ConntrackOptions, Options, Paths
from ebpflb.plan.planner import Plan
from tests.kernel.maps.small import small_maps
from tests.kernel.node import nodes
from tests.kernel.node.nodes import run

NAME = f"ebpflb-test-{os.getpid()}-sync"
OPTIONS = Options(Paths(Path("/none")), "node", Path("/none"))
WEB = Translation(1, ip_address("10.244.1.11"), 8080)
DNS = Translation(2, ip_address("fd00:244::2"), 53)
NEW = Translation(3, ip_address("10.244.1.11"), 8080)  # another service's, with the same endpoint
LEFT = Translation(9, ip_address("10.244.1.9"), 9)


@pytest.fixture(params=["owned", "shared"])
def is_owned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    found: bool = request.param == "owned"
    if not found:
        monkeypatch.setattr(engine, "NetfilterTable", nodes.SharedTable)
    return found


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether other programs can change the table."""
    monkeypatch.setattr(engine, "NetfilterTable", nodes.SharedTable)


@pytest.fixture
def maps() -> Iterator[dict[str, Map]]:
    """Return maps with two backends."""
    read = "backend_slots", "slots", "udp_choices", "services", "tcp_flows", "other_flows"
    with small_maps(read) as made:
        put(made, WEB, DNS)
        yield made


@pytest.fixture
def sync(maps: dict[str, Map]) -> Iterator[NetfilterSync]:
    with nodes.fresh(NAME):
        made = NetfilterSync(maps, OPTIONS)
        yield made
        made.close()


def put(maps: dict[str, Map], *backends: Translation) -> None:
    """Write backends as plans do, each at a slot number that differs from its id."""
    for id, address, port in backends:
        maps["slots"].write([(id + 100, Backend(address, port, frozenset({"cluster"}), id, 1))])
        maps["backend_slots"].write([(id, id + 100)])


def take(maps: dict[str, Map], *ids: int) -> None:
    maps["backend_slots"].write([(id, NO_SLOT) for id in ids])


def elements() -> set[Translation]:
    found = Elements(Session(), table_options(OPTIONS, sctp=False, beside_flows=True)).read()
    return {Translation(id, *unpack(endpoint)) for id, endpoint in found.items()}


def endpoints() -> str:
    return run("nft", "list", "set", *TABLE, "endpoints4")


def ruleset() -> str:
    return run("nft", "list", "ruleset")


def test_the_table_has_every_backend_after_a_start(sync: NetfilterSync, is_owned: bool) -> None:
    """The table has an element for each backend in the maps; another start changes nothing.

    A second table keeps NAT alive only if other programs can remove the first one.
    """
    assert not sync.active
    for _ in range(2):
        sync.start()
        assert sync.active
        assert elements() == {WEB, DNS}
        assert sync.differences() == []
    assert nft.exists(KEEPER) == (not is_owned)


@pytest.mark.usefixtures("is_owned")
def test_start_after_another_agent(sync: NetfilterSync, maps: dict[str, Map]) -> None:
    """The new agent takes over the table unchanged, and writes only its differences from the
    maps.
    """
    sync.start()
    sync.write(Plan(translations=[LEFT, NEW._replace(port=1)]))
    before = run("nft", "--handle", "list", "tables")
    sync.close()
    assert nft.exists(TABLE)
    put(maps, NEW)
    take(maps, DNS.id)
    other = NetfilterSync(maps, OPTIONS)
    other.start()
    assert elements() == {WEB, NEW}
    assert run("nft", "--handle", "list", "tables") == before
    assert "9 " not in endpoints()
    other.close()


@pytest.mark.usefixtures("is_owned")
def test_former_elements_stay(sync: NetfilterSync, maps: dict[str, Map]) -> None:
    """The start keeps the elements that programs of another layout choose, until a plan removes
    them.
    """
    sync.start()
    sync.write(Plan(translations=[LEFT]))
    sync.close()
    other = NetfilterSync(maps, OPTIONS)
    assert other.read_former() == [LEFT]
    other.start()
    assert elements() == {WEB, DNS, LEFT}
    other.write(Plan(removed_translations=[LEFT]))
    assert elements() == {WEB, DNS}
    other.close()


@pytest.mark.usefixtures("shared")
def test_a_refused_plan_is_not_written(sync: NetfilterSync, maps: dict[str, Map]) -> None:
    """A plan whose elements the kernel refuses is not written: a KernelError makes the agent's loop
    try again.
    """
    sync.start()
    nft.delete(TABLE)
    with pytest.raises(KernelError, match="writing translations: table inet ebpflb"):
        sync.write(Plan(translations=[NEW]))
    put(maps, NEW)
    assert sync.restore() == ["the table is missing"]
    assert elements() == {WEB, DNS, NEW}


class Services:
    """The part of ServiceSync that ElementsCheck reads: ids in use, or in quarantine."""

    complete = True

    def __init__(self, *ids: int) -> None:
        self.planner: Any = self
        self.knows_backend = set(ids).__contains__


def damage() -> None:
    """Remove an element, change another, and add two, one of them as if in quarantine."""
    commands = (
        "delete element inet ebpflb backends6 { 0:2 }",
        "delete element inet ebpflb backends4 { 0:1 }",
        "add element inet ebpflb backends4 { 0:1 : 10.244.1.12 . 8080 }",
        "add element inet ebpflb backends4 { 0:9 : 10.244.1.9 . 9 }",
        "add element inet ebpflb backends4 { 0:8 : 10.244.1.8 . 8 }",
    )
    run("nft", "-f", "-", said="\n".join(commands) + "\n")


@pytest.mark.usefixtures("shared")
def test_elements_that_differ(sync: NetfilterSync) -> None:
    """Differing elements are named and corrected; the element of an id in quarantine stays, because
    programs may just have chosen it.
    """
    services: Any = Services(1, 2, 8)
    check = ElementsCheck(sync, services, 1.0)
    assert not check.possible
    sync.start()
    assert check.possible
    assert [drift for step in check.steps() for drift in step] == []
    damage()
    found = sorted(str(drift) for step in check.steps() for drift in step)
    assert [part for step in check.steps() for part, *_ in step] == [Part.TABLE] * 3
    words = ("10.244.1.12 port 8080, but should be 10.244.1.11", "9 should not", "2 is missing")
    assert all(any(word in line for line in found) for word in words)
    check.repair()
    assert elements() == {WEB, DNS, Translation(8, ip_address("10.244.1.8"), 8)}
    assert [drift for step in check.steps() for drift in step] == []
    services.complete = False
    assert not check.possible


def test_the_table_goes_when_no_connection_needs_it(sync: NetfilterSync) -> None:
    """If netfilter no longer serves, its table is removed once no connection needs the hooks."""
    sync.start()
    sync.release()
    assert nft.exists(TABLE)
    sync.end()
    nodes.translate("127.0.0.7", 53)
    sync.release()
    assert nft.exists(TABLE)
    conntrack.delete(conntrack.connections(lambda *_: True))
    for _ in range(2):
        sync.release()
        assert not nft.tables()
    sync.start()
    assert elements() == {WEB, DNS}


WIDE, BESIDE_FLOWS = "masquerade to :1024-29999", "masquerade to :1024-9999"
COUNTED = Frontend(ip_address("10.96.0.1"), 80, 6)
ENTRY = ServiceEntry(1, frozenset({"least_connections"}), 0, 0, Range(0, 0), Range(0, 0))


@pytest.mark.usefixtures("is_owned")
def test_ports_are_left_before_a_flow_opens(sync: NetfilterSync, maps: dict[str, Map]) -> None:
    """The rules stop using the flow tables' ports before a plan lets the flow tables open flows."""
    sync.start()
    sync.write(Plan(services=[(COUNTED, ENTRY._replace(flags=frozenset()))]))
    assert WIDE in ruleset()
    sync.write(Plan(translations=[NEW], services=[(COUNTED, ENTRY)]))
    assert BESIDE_FLOWS in ruleset()
    assert sync.differences() == []
    assert elements() == {WEB, DNS, NEW}


@pytest.mark.parametrize("what", ["nothing", "services", "tcp_flows"])
def test_ports_after_a_start(sync: NetfilterSync, maps: dict[str, Map], what: str) -> None:
    """The rules do not use the ports if a flow is in the flow tables, or a Service opens some
    there.
    """
    if what == "services":
        maps["services"].write([(COUNTED, ENTRY)])
    elif what == "tcp_flows":
        client, to = ip_address("192.0.2.1"), COUNTED.address
        flow = Flow(1, 0, to, 80, 0, 1, 1, 0, FlowKind.DNAT, frozenset())
        maps["tcp_flows"].write([(Tuple(client, to, 40000, 80, 6, 1), flow)])
    sync.start()
    assert (WIDE if what == "nothing" else BESIDE_FLOWS) in ruleset()


def test_table_options() -> None:
    """The options are the masquerade mark, SCTP, and the treatment of segments that conntrack finds
    invalid.
    """
    liberal = ConntrackOptions(be_liberal=True)
    chosen = Options(
        Paths(Path("/none")), "node", Path("/none"), masquerade_mark=2, conntrack=liberal
    )
    made = table_options(chosen, sctp=True, beside_flows=True)
    assert (made.masquerade_mark, made.sctp) == (2, True)
    assert made.drops_invalid == (not chosen.conntrack_wanted.be_liberal)
    assert not made.drops_invalid
    assert table_options(OPTIONS, sctp=False, beside_flows=True).drops_invalid


Steps = list[tuple[str, bool]]  # changes of the sysctl, each with whether segments were dropped


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    made = Steps()

    def be_liberal(record: Path) -> bool:
        if not record.exists():
            made.append(("liberal", drops()))
            record.touch()
        return True

    def be_strict(record: Path) -> None:
        if record.exists():
            made.append(("strict", drops()))
            record.unlink()

    monkeypatch.setattr(sysctls, "be_liberal", be_liberal)
    monkeypatch.setattr(sysctls, "be_strict", be_strict)
    return made


def drops() -> bool:
    return "chain invalid" in ruleset()


AUTO = replace(OPTIONS, conntrack=ConntrackOptions(follows_rules=True))


@pytest.fixture
def auto(maps: dict[str, Map], steps: Steps, tmp_path: Path) -> Iterator[Any]:
    """Return a function that makes, and starts, an agent's part in the node as it is."""
    last = list[NetfilterSync]()
    with nodes.fresh(NAME):

        def made_by(options: Options = AUTO, *, starts: bool = True) -> NetfilterSync:
            paths = replace(OPTIONS.paths, run=tmp_path)
            made = NetfilterSync(maps, replace(options, paths=paths))
            if last:
                last.pop().close()
            last.append(made)
            if starts:
                made.start()
            return made

        yield made_by
        last.pop().close()


def test_a_liberal_conntrack_is_asked_for_no_invalid_segments(
    auto: Any, steps: Steps, is_owned: bool
) -> None:
    """Segments are dropped until conntrack is liberal, and again before it is strict; elements
    and sets stay. The watch of the table finds no difference.
    """
    sync = auto()
    assert drops()
    sync.let_be_liberal(wanted=True)
    assert (drops(), sync.differences()) == (False, [])
    assert elements() == {WEB, DNS}
    assert "10.244.1.11 . 8080" in endpoints()
    sync.let_be_liberal(wanted=False)
    assert (drops(), sync.differences()) == (True, [])
    assert steps == [("liberal", True), ("strict", True)]


@pytest.mark.parametrize("reason", ["option", "engine", "removal"])
def test_the_end_of_a_liberal_conntrack(auto: Any, steps: Steps, shared: None, reason: str) -> None:
    """A restart changes nothing. An agent without the option, and one that changes to the flow
    tables, put the chain back before the sysctl; a table that is not needed goes before.
    """
    auto().let_be_liberal(wanted=True)
    assert not drops()
    sync = auto()
    assert (sync.is_liberal, drops()) == (True, False)
    steps.clear()
    if reason == "option":
        auto(OPTIONS)
    elif reason == "engine":
        sync.end()
    else:
        auto(starts=False).release()
        assert not nft.exists(TABLE)
    assert steps == [("strict", reason != "removal")]


def test_a_sysctl_that_cannot_be_set(
    auto: Any, steps: Steps, shared: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments are dropped; also if it is lost later, as the watch of the table notices."""
    sync = auto()
    sync.let_be_liberal(wanted=True)
    monkeypatch.setattr(sysctls, "be_liberal", lambda record: False)
    assert "chain invalid is missing" in sync.restore()
    assert (sync.is_liberal, drops()) == (False, True)
    sync.let_be_liberal(wanted=True)
    assert (sync.is_liberal, drops()) == (False, True)


def test_a_chain_that_cannot_be_written(
    auto: Any, steps: Steps, shared: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sysctl stays until the chain is there; the next attempt makes both."""
    sync = auto()
    sync.let_be_liberal(wanted=True)
    steps.clear()

    def fails() -> list[str]:
        raise NodeError("no memory")

    with monkeypatch.context() as patch, pytest.raises(KernelError, match="no memory"):
        patch.setattr(sync, "restore", fails)
        sync.let_be_liberal(wanted=False)
    assert steps == []
    sync.let_be_liberal(wanted=False)
    assert (steps, drops()) == ([("strict", True)], True)
