# SPDX-License-Identifier: Apache-2.0
"""Any packet passes unchanged, is correctly translated, or ends with a verdict. PacketNode asserts
the properties of each run.
"""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from ebpflb.errors import KernelError
from tests.load import scaled
from tests.packet import wire
from tests.packet.errors import error
from tests.packet.frames import at, fragments, opening, reply, segment
from tests.packet.node import Outcome, PacketNode
from tests.packet.places import V4, V6, Places
from tests.packet.services import KINDS, serve

PLENTY = settings(
    max_examples=scaled(2000),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
DROPS = {
    "no_local_endpoint", "recycled", "ports_exhausted", "flows_full", "source_denied",
    "unallocated", "reject_limited",
}  # fmt: skip
GOES_ON = {"translated", "established", "related", "masqueraded", "port_changed"}

Send = Callable[[bytes], Outcome | None]


def frames(node: PacketNode, places: Places) -> list[bytes]:
    """Return packets of all kinds, most of which would be translated."""
    found = []
    for number, protocol in enumerate(("tcp", "udp", "sctp"), 1):
        there = [at(places.there, 8080), at(places.elsewhere, 80)]
        for kind in KINDS:
            service = number * 10 + list(KINDS).index(kind) + 100 * places.version
            where = serve(node, places, kind, protocol, service=service, cluster=there)
            asked = opening(protocol, at(places.client, 50_000 + service), where)
            seen = node.through(asked)
            found += [asked, seen, reply(seen), reply(asked)]
            found += [
                error("too big", places.router, seen),
                error("unreachable", places.there, seen),
            ]
        found.append(opening(protocol, at(places.pod, 50123), at(places.cluster_ip, 7)))
        found.append(opening(protocol, at(places.pod, 50123), at(places.unallocated, 80)))
    found += fragments(at(places.pod, 50123), at(places.cluster_ip, 80))
    found.append(segment(at(places.client, 50123), at(places.node, 30080), "FA"))
    return [bytes(packet) for packet in found]


@pytest.fixture
def valid(node: PacketNode) -> list[bytes]:
    node.settings("detect_local", "masquerade_all")
    return frames(node, V4) + frames(node, V6)


@pytest.fixture
def send(node: PacketNode) -> Send:
    """Send the packet through one hook and check it; None if the kernel rejects the frame."""

    def run(hook: Any, frame: bytes) -> Outcome | None:
        try:
            outcome: Outcome = hook(frame)
        except KernelError:
            return None
        judge(frame, outcome)
        return outcome

    def both(frame: bytes) -> Outcome | None:
        came = run(node.ingress, frame)
        run(lambda one: node.egress(one, into=None), frame)
        if came and came.action == "pass":
            run(node.egress, came.frame)
        return came

    return both


def judge(frame: bytes, outcome: Outcome) -> None:
    """Check that the outcome has a verdict, and matches it."""
    names = set(outcome.verdicts)
    assert names and sum(outcome.verdicts.values()) <= 2
    if outcome.action == "drop":
        assert names & DROPS
    elif outcome.action == "redirect":
        assert names == {"refused"}
    elif outcome.frame not in (frame, wire.without_priority(frame)):
        assert names & GOES_ON
    else:
        assert names & {"passed", "malformed"} or names & GOES_ON


def mutation(size: int) -> some.SearchStrategy[tuple[int, int]]:
    """Return a place in the frame, mostly in its headers, and the bytes for it."""
    places = some.integers(12, min(size, 80) - 1) | some.integers(0, size - 1)
    return some.tuples(places, some.integers(0, 255))


@PLENTY
@given(data=some.data())
def test_changed_packets_have_a_valid_outcome(
    valid: list[bytes], send: Send, data: some.DataObject
) -> None:
    """A packet with some bytes changed, removed or added has a valid outcome."""
    frame = bytearray(data.draw(some.sampled_from(valid)))
    for place, value in data.draw(some.lists(mutation(len(frame)), max_size=4)):
        frame[place] = value
    cut = data.draw(some.none() | some.integers(14, len(frame)))
    tail = data.draw(some.binary(max_size=8))
    send(bytes(frame[:cut]) + tail)


@PLENTY
@given(
    kind=some.sampled_from([b"\x08\0", b"\x86\xdd", b"\x81\0", b"\x08\x06"]),
    rest=some.binary(max_size=200),
)
def test_random_bytes_have_a_valid_outcome(
    valid: list[bytes], send: Send, kind: bytes, rest: bytes
) -> None:
    """Random bytes in a frame to the device have a valid outcome."""
    send(valid[0][:12] + kind + rest)


@PLENTY
@given(data=some.data())
def test_crossed_packets_have_a_valid_outcome(
    valid: list[bytes], send: Send, data: some.DataObject
) -> None:
    """The header of one packet with the body of another has a valid outcome."""
    one, other = (data.draw(some.sampled_from(valid)) for _ in range(2))
    seam = data.draw(some.integers(14, 100))
    send(one[:seam] + other[seam:])


def test_most_unchanged_packets_are_translated(valid: list[bytes], send: Send) -> None:
    """Most of the unchanged packets that these tests start from are translated."""
    outcomes = [send(frame) for frame in valid]
    changed = [o for o, f in zip(outcomes, valid, strict=True) if o and o.frame != f]
    assert len(changed) * 2 > len(valid)
