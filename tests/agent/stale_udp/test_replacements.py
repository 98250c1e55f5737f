# SPDX-License-Identifier: Apache-2.0
"""To which backends a stale flow may be rebound, and its entries then."""

from ipaddress import ip_address

import pytest

from ebpflb.agent.stale_udp.socket_search import StaleFlow, replacements
from ebpflb.model.services import Protocol
from ebpflb.plan.entries import Backend, Flags, Range, ServiceEntry
from ebpflb.plan.flow_entries import FlowState, gather, state
from tests.plan.builders import BOTH, CLUSTER, LOCAL, SERVING

CLIENT = (ip_address("10.1.0.200"), 40000)
BLOCK = [(1, CLUSTER), (2, BOTH), (3, LOCAL), (4, SERVING)]


def service(*flags: str, affinity: int = 0) -> tuple[ServiceEntry, list[Backend]]:
    """A block with a backend in each list, from slot 12 on."""
    block = [
        Backend(ip_address(f"10.1.0.{number}"), 8080, words, number, 7) for number, words in BLOCK
    ]
    ranges = Range(12, 2), Range(13, 2)
    return ServiceEntry(7, frozenset(flags), affinity, 4, *ranges), block


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), {1, 2}),
        (("local",), {2, 3}),
        (("external",), {1, 2}),
        (("external", "local"), {1, 2}),
    ],
)
def test_allowed(flags: Flags, expected: set[int]) -> None:
    """A flow may go to the backends that its socket could get by the frontend's policy."""
    assert {each.id for each in replacements(*service(*flags), CLIENT)} == expected


def test_spread() -> None:
    """Clients are spread over all; under session affinity those of one address are together."""
    ports = range(1000, 1100)
    first = {next(replacements(*service(), (CLIENT[0], port))).id for port in ports}
    assert first == {1, 2}
    first = {next(replacements(*service(affinity=60), (CLIENT[0], port))).id for port in ports}
    assert len(first) == 1


def test_not_to_itself() -> None:
    """A client's flow never goes to itself: that would need a masquerade."""
    itself = ip_address("10.1.0.1"), 40000
    assert [each.id for each in replacements(*service(), itself)] == [2]


def test_none() -> None:
    """Where all backends only serve the connections that they have, there is none."""
    found, block = service()
    none = found._replace(slots=1, cluster=Range(12, 0), local=Range(12, 0))
    assert list(replacements(none, block[3:], CLIENT)) == []


@pytest.mark.parametrize("address", ["10.1.0.9", "fd00::9"])
def test_entries(address: str) -> None:
    """The two entries are one flow of the packet path that was used in both directions."""
    _, block = service()
    former = ip_address(address), 5353
    entries = StaleFlow(CLIENT, former).entries(block[0], 5)
    for key, flow in entries.items():
        assert gather(key, flow, entries.get) == entries
    assert state(Protocol.UDP, entries.values()) == FlowState.BOTH_WAYS
    request = entries[StaleFlow(CLIENT, former).request]
    assert (request.address, request.port) == (block[0].address, block[0].port)
    answer = entries[StaleFlow(CLIENT, former).reply(block[0].address, block[0].port)]
    assert (answer.address, answer.port) == former
    assert {(flow.service, flow.backend) for flow in entries.values()} == {(7, 1)}
