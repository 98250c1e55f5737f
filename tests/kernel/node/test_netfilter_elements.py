# SPDX-License-Identifier: Apache-2.0
"""Elements of the netfilter engine's table, in a namespace of the test's own."""

import os
from collections.abc import Iterator
from contextlib import closing
from ipaddress import IPv4Address, IPv6Address

import pytest

from ebpflb.kernel.netfilter import nft
from ebpflb.kernel.netfilter.elements import BACKEND_SETS, Change, Elements, unpack
from ebpflb.kernel.netfilter.nft import GET_ELEMENTS, Interrupted, Name, Refused, dump, dump_parts
from ebpflb.kernel.netfilter.table import (
    LOAD_CT_STATE,
    TABLE,
    NetfilterTable,
    TableOptions,
    one_rule_table,
)
from ebpflb.model.addresses import Address, parse_address
from tests.kernel.node import nodes
from tests.kernel.node.nodes import run

NAME = f"ebpflb-test-{os.getpid()}-elements"
OPTIONS = TableOptions(0x4000, ((20000, 20099),), drops_invalid=True, sctp=True)
Backend = tuple[int, Address, int]
WEB: Backend = (1, IPv4Address("10.0.0.2"), 8080)
DNS: Backend = (2, IPv6Address("fd00::2"), 53)
LAST: Backend = (131_071, IPv4Address("10.0.0.3"), 80)


@pytest.fixture
def table() -> Iterator[NetfilterTable]:
    """Return an empty table that other programs can change."""
    with nodes.fresh(NAME), closing(nodes.SharedTable(OPTIONS)) as built:
        built.build()
        yield built


@pytest.fixture
def elements(table: NetfilterTable) -> Elements:
    return Elements(table.session, OPTIONS)


def _many(count: int, version: int = 4) -> list[Backend]:
    kind, first = (IPv4Address, 10 << 24) if version == 4 else (IPv6Address, 0xFD << 120)
    return [(number, kind(first + number), number % 65535 + 1) for number in range(count)]


def _read(elements: Elements) -> set[Backend]:
    return {(number, *unpack(endpoint)) for number, endpoint in elements.read().items()}


def _compare(elements: Elements, *wanted: Backend) -> list[Change]:
    backends = {number: (address, port) for number, address, port in wanted}
    return [change for step in elements.compare(backends) for change in step]


def _shown(name: str) -> str:
    return run("nft", "list", "set" if "end" in name[:3] else "map", "inet", TABLE.table, name)


def test_backends_are_added_and_removed(elements: Elements) -> None:
    """Backends of both families are added and removed; existing or missing ones are no error."""
    for _ in range(2):
        elements.repair(_compare(elements, WEB, DNS, LAST))
        elements.write([WEB, DNS, LAST])
        assert _read(elements) == {WEB, DNS, LAST}
        assert _compare(elements, WEB, DNS, LAST) == []
    for _ in range(2):
        elements.write([], [WEB, LAST])
        assert _read(elements) == {DNS}
        assert _compare(elements, DNS) == []


@pytest.mark.parametrize("new", ["10.0.0.9", "10.0.0.2", "fd00::9"])
def test_an_id_gets_another_endpoint(elements: Elements, new: str) -> None:
    """An id can be removed and added with another endpoint, also with an endpoint of the other
    family.
    """
    elements.write([WEB, DNS])
    replaced: Backend = (1, parse_address(new), 9090)
    elements.write([replaced], [WEB])
    assert _read(elements) == {replaced, DNS}
    assert _compare(elements, replaced, DNS) == []
    assert _shown("endpoints4").count("8080") == 0


def test_replaces_what_others_wrote(elements: Elements) -> None:
    """If another program gave an id another endpoint, the id gets the new one."""
    run("nft", "add element inet ebpflb backends4 { 0:1 : 10.0.0.7 . 7 }")
    elements.write([WEB, DNS])
    assert _read(elements) == {WEB, DNS}
    run("nft", "delete element inet ebpflb backends4 { 0:1 }")
    elements.write([DNS[:1] + LAST[1:]], [WEB, DNS])
    assert _read(elements) == {DNS[:1] + LAST[1:]}


def test_endpoints_are_counted(elements: Elements) -> None:
    """An endpoint is in the set as long as one backend has it, also after a restart."""
    same: Backend = (3, *WEB[1:])
    elements.write([WEB, same])
    elements.write([], [WEB])
    assert "10.0.0.2 . 8080" in _shown("endpoints4")
    elements.write([WEB])
    elements.read()
    elements.write([], [same])
    assert "10.0.0.2 . 8080" in _shown("endpoints4")
    elements.write([], [WEB])
    assert "elements" not in _shown("endpoints4")


def test_a_missing_table(elements: Elements) -> None:
    """Adding to a missing table is refused; after it is built again everything can be written."""
    elements.write([WEB])
    run("nft", "flush", "ruleset")
    with pytest.raises(Refused):
        elements.write([DNS])
    elements.write([], [WEB])
    assert elements.read() == {}


@pytest.mark.parametrize("version", [4, 6])
def test_more_than_one_transaction_is_written(elements: Elements, version: int) -> None:
    """Elements that exceed one transaction are written, read, compared, repaired and removed."""
    many = _many(20_000, version)
    elements.write(many)
    assert _read(elements) == set(many)
    assert _compare(elements, *many) == []
    run("nft", f"flush map inet ebpflb backends{version}")
    run("nft", f"flush set inet ebpflb endpoints{version}")
    missing = _compare(elements, *many)
    assert len(missing) == 40_000
    elements.repair(missing)
    assert _compare(elements, *many) == []
    moved = [(number, address, 9) for number, address, _ in many]
    elements.write(moved, many)
    assert _compare(elements, *moved) == []
    elements.write([], moved)
    assert elements.read() == {}
    assert _compare(elements) == []


def test_differences_are_described_and_repaired(elements: Elements) -> None:
    """Changed, missing and unknown elements are described and repaired."""
    elements.write([WEB, DNS, LAST])
    for command in (
        "delete element inet ebpflb backends4 { 0:1 }",
        'add element inet ebpflb backends4 { 0:1 comment "mine" : 10.0.0.7 . 7 }',
        "add element inet ebpflb backends4 { 0:5 : 10.0.0.5 . 5 }",
        "delete element inet ebpflb backends6 { 0:2 }",
        "delete element inet ebpflb endpoints4 { 10.0.0.3 . 80 }",
        "add element inet ebpflb endpoints6 { fd00::6 . 6 }",
    ):
        run("nft", command)
    changes = _compare(elements, WEB, DNS, LAST)
    assert sorted(map(str, changes)) == [
        "backends4: backend 1 is 10.0.0.7 port 7, but should be 10.0.0.2 port 8080",
        "backends4: backend 5 should not exist",
        "backends6: backend 2 is missing",
        "endpoints4: 10.0.0.3 port 80 is missing",
        "endpoints6: fd00::6 port 6 should not exist",
    ]
    elements.repair(changes)
    assert _compare(elements, WEB, DNS, LAST) == []
    assert _read(elements) == {WEB, DNS, LAST}


def test_changes_while_it_is_compared(elements: Elements) -> None:
    """A write of the agent between two steps of the comparison is no difference; a real difference
    is found.
    """
    many = _many(20_000)
    elements.write(many)
    run("nft", "delete element inet ebpflb backends4 { 0:3039 }")
    wanted = {number: (address, port) for number, address, port in many}
    changes: list[Change] = []
    steps = 0
    for step in elements.compare(wanted):
        changes += step
        number, steps = 100_000 + steps, steps + 1
        elements.write([(number, *LAST[1:])], [(steps, *wanted.pop(steps))])
        wanted[number] = LAST[1:]
    assert steps > 20
    assert list(map(str, changes)) == [f"backends4: backend {0x3039} is missing"]
    elements.repair(changes)
    assert _compare(elements, *((number, *endpoint) for number, endpoint in wanted.items())) == []


def test_interrupted_lists(elements: Elements, monkeypatch: pytest.MonkeyPatch) -> None:
    """While other tables keep changing, the elements are read completely; other lists, which may be
    incomplete, are read again, but not forever.
    """
    many = _many(5000)
    elements.write(many)
    other = Name("inet", "other")
    attempts: list[int] = []

    def changing(*request: object) -> Iterator[list[bytes]]:
        attempts.append(0)
        for part in dump_parts(*request):  # type: ignore[arg-type]
            one_rule_table(other, "c", "filter", 0, [LOAD_CT_STATE]).commit()
            nft.delete(other)
            yield part

    monkeypatch.setattr(nft, "dump_parts", changing)
    assert _read(elements) == set(many)
    assert len(attempts) == 2
    with pytest.raises(Interrupted):
        dump(TABLE, GET_ELEMENTS, BACKEND_SETS[4].names())
    assert len(attempts) == 12
