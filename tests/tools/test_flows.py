# SPDX-License-Identifier: Apache-2.0
"""The flows that `ebpflb flows` lists and deletes, from maps filled by hand."""

import time
from collections.abc import Iterator, Sequence
from ipaddress import ip_address

import pytest

from ebpflb.entries.flows import Entries, Timeouts
from ebpflb.entries.services import BackendName
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.sweep import SweptTable
from ebpflb.model.addresses import Family
from ebpflb.model.services import PortName, Protocol
from ebpflb.tools.flow_list import FlowFilter, FlushResult, flush_flows, list_flows
from tests.plan.flow_builders import Made
from tests.tools.conftest import count

WEB = 7
PLAIN, CHANGED, MASQUERADED = Made(1), Made(2, changed=True), Made(3, masqueraded=True)
PENDING, DATAGRAMS = Made(4, masqueraded=True, chosen=False), Made(5, Protocol.UDP)
ALL = (PLAIN, CHANGED, MASQUERADED, PENDING, DATAGRAMS)


def entries(made: Made) -> Entries:
    """Return entries that the datapath wrote a minute ago, and used half a minute ago."""
    now = time.monotonic_ns()
    seen, begun = now - 30_000_000_000, now - 60_000_000_000
    return {key: flow._replace(last_seen=seen, created=begun) for key, flow in made.plain().items()}


def table(maps: dict[str, Map], made: Made) -> Map:
    return maps["tcp_flows" if made.protocol == Protocol.TCP else "other_flows"]


@pytest.fixture(autouse=True)
def filled(maps: dict[str, Map]) -> Iterator[None]:
    maps["service_names"].write(
        [
            (WEB, PortName("shop", "web", "http", Protocol.TCP, Family.IPV4)),
            (8, PortName("shop", "other", "", Protocol.TCP, Family.IPV4)),
        ]
    )
    maps["backend_names"].write([(21, BackendName("node-1", "web-0"))])
    for made in ALL:
        table(maps, made).write(list(entries(made).items()))
    yield
    for made in ALL:
        table(maps, made).delete(list(made.plain()))


def row_of(maps: dict[str, Map], made: Made) -> dict[str, object]:
    (row,) = [
        row
        for row in list_flows(maps, FlowFilter())
        if row["frontend"] == f"10.96.0.{made.number}:80"
    ]
    return row


def test_a_row_has_both_ends_and_the_state(maps: dict[str, Map]) -> None:
    """One row has client, frontend, backend, reply and state."""
    row = row_of(maps, PLAIN)
    assert row.pop("age_seconds") == pytest.approx(60, abs=20)
    assert row.pop("idle_seconds") == pytest.approx(30, abs=20)
    assert row == {
        "protocol": "TCP",
        "state": "open",
        "service": "shop/web:http/TCP",
        "client": "198.51.100.7:3001",
        "frontend": "10.96.0.1:80",
        "backend": "10.244.1.11:8080",
        "pod": "web-0",
        "node": "node-1",
        "masqueraded_as": "",
        "reply": "10.244.1.11:8080 > 198.51.100.7:3001",
        "engine": "flows",
    }


@pytest.mark.parametrize(
    ("choice", "count"),
    [
        (FlowFilter(), 5),
        (FlowFilter(service=("shop", "web")), 5),
        (FlowFilter(service=("shop", "other")), 0),
        (FlowFilter(service=("shop", "never")), 0),
        (FlowFilter(client=ip_address("198.51.100.7")), 5),
        (FlowFilter(client=ip_address("198.51.100.8")), 0),
        (FlowFilter(("shop", "web"), ip_address("198.51.100.7")), 5),
    ],
    ids=str,
)
def test_only_matching_flows_are_shown(
    maps: dict[str, Map], choice: FlowFilter, count: int
) -> None:
    """Only matching flows are shown, and none for an unknown service."""
    assert len(list_flows(maps, choice)) == count


def test_partial_flow(maps: dict[str, Map]) -> None:
    """A flow without its request entry is a row with all known columns."""
    whole = row_of(maps, MASQUERADED)
    request, masquerade, answer, reply = entries(MASQUERADED)
    maps["tcp_flows"].delete([request])
    row = row_of(maps, MASQUERADED)
    assert {name for name in row if row[name] != whole[name]} <= {
        "state",
        "age_seconds",
        "idle_seconds",
    }
    assert row["state"] == "partial"
    maps["tcp_flows"].delete([reply])
    (row,) = (row for row in list_flows(maps, FlowFilter()) if row["state"] == "partial")
    assert (row["client"], row["frontend"]) == ("198.51.100.7:3003", "")
    assert row["masqueraded_as"] == "192.0.2.1:61003"
    maps["tcp_flows"].delete([masquerade])
    (row,) = (row for row in list_flows(maps, FlowFilter()) if row["state"] == "partial")
    assert (row["client"], row["backend"]) == ("198.51.100.7:3003", "10.244.1.11:8080")
    assert len(list_flows(maps, FlowFilter())) == 5
    assert maps["tcp_flows"].get(answer)


def test_partial_flows_are_flushed(maps: dict[str, Map]) -> None:
    """Partial flows are deleted with the flows of their service or client."""
    maps["tcp_flows"].delete([next(iter(entries(MASQUERADED)))])
    assert flush_flows(
        maps, FlowFilter(("shop", "web"), ip_address("198.51.100.7"))
    ) == FlushResult(5, 12)
    assert not list(maps["tcp_flows"].items())


def test_flushed_entries_are_not_called_evicted(
    maps: dict[str, Map], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep at the same time does not count flushed entries as evicted."""
    held = len(dict(maps["tcp_flows"].items()))
    table = SweptTable(maps, "tcp_flows", Timeouts(), lambda _: 0)
    count(maps["flow_stats"], 0, table.numbers.swept + table.numbers.evicted + held, 0, 0)
    before, delete = table.numbers, Map.delete

    def delete_and_sweep(self: Map, keys: Sequence[object]) -> int:
        deleted = 0
        for key in keys:
            deleted += delete(self, [key])
            list(table.sweep())
        return deleted

    with monkeypatch.context() as patch:
        patch.setattr(Map, "delete", delete_and_sweep)
        flush_flows(maps, FlowFilter())
    assert table.numbers == before._replace(swept=before.swept + held, entries=0)
