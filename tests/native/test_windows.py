# SPDX-License-Identifier: Apache-2.0
"""A FIN or RST that its receiver accepts ends the flow; a guessed one does not.

The reference is a TCP (RFC 9293, RFC 5961 3.2) with two sides, whose segments get lost before or
after the node.
"""

from collections.abc import Callable
from ipaddress import ip_address
from typing import Any, NamedTuple

from hypothesis import example, given
from hypothesis import strategies as some

from ebpflb.entries.flows import Flow, FlowKind, Hook, Tuple
from ebpflb.kernel.maps import records
from tests.native.node import POD, NativeNode

CLIENT, FRONTEND, BACKEND = map(ip_address, ("10.1.0.9", "172.30.0.1", "10.1.0.1"))
REQUEST = Tuple(CLIENT, FRONTEND, 40000, 80, 6, Hook.INGRESS)
REPLY = Tuple(BACKEND, CLIENT, 8080, 40000, 6, Hook.EGRESS)
FIN, SYN, RST, ACK = 1, 2, 4, 16
WINDOW = 65535
FAR = 4_194_304 + 200_000  # further than what the flow tables take for near
PACKET = records.record("struct packet")

NewNode = Callable[[], NativeNode]


class Segment(NamedTuple):
    seq: int
    control: int
    ack: int
    size: int = 0  # of the payload

    @property
    def bytes(self) -> int:
        return self.size + bool(self.control & SYN) + bool(self.control & FIN)


class Side:
    """One side of the connection; sequence numbers do not wrap here."""

    def __init__(self, number: int) -> None:
        self.first = self.acked = self.sent = self.awaits = number
        self.early: set[tuple[int, int]] = set()
        self.has_got_fin = False

    def data(self, size: int) -> Segment:
        room = self.acked + WINDOW - self.sent
        made = Segment(self.sent, ACK, self.awaits, min(size, room))
        self.sent += made.size
        return made

    def again(self, size: int) -> Segment:
        return Segment(self.acked, ACK, self.awaits, min(size, self.sent - self.acked))

    def keepalive(self, _size: int) -> Segment:
        return Segment(self.acked - 1, ACK, self.awaits)

    def reset(self) -> Segment:
        return Segment(self.sent, RST, self.awaits)

    def fin(self) -> Segment:
        self.sent += 1
        return Segment(self.sent - 1, FIN | ACK, self.awaits)

    def take(self, got: Segment) -> bool:
        """Take a segment; return whether its FIN or RST, if any, is accepted."""
        if got.control & RST:
            return got.seq == self.awaits
        self.acked = max(self.acked, got.ack)
        is_near = got.seq <= self.awaits + WINDOW and got.seq + got.bytes >= self.awaits
        if is_near:
            self.early.add((got.seq, got.seq + got.bytes))
        for start, end in sorted(self.early):
            if start <= self.awaits:
                self.awaits = max(self.awaits, end)
        return is_near


class Connection:
    """A connection through a node; a side is 0 (the client) or 1 (the backend)."""

    def __init__(self, node: NativeNode, numbers: tuple[int, int]) -> None:
        self.node = node
        self.sides = Side(numbers[0]), Side(numbers[1])
        common = 40000, 1, 1, 0
        dnat = Flow(1, 0, BACKEND, 8080, *common, FlowKind.DNAT, frozenset({"request"}))
        node.put("tcp_flows", REQUEST, dnat)
        un_dnat = Flow(1, 0, FRONTEND, 80, *common, FlowKind.UN_DNAT, frozenset())
        node.put("tcp_flows", REPLY, un_dnat)
        client, backend = numbers
        self.sides[0].sent = self.sides[0].acked = self.sides[1].awaits = client + 1
        self.sides[1].sent = self.sides[1].acked = self.sides[0].awaits = backend + 1
        self.passes(0, Segment(client, SYN, 0))
        self.passes(1, Segment(backend, SYN | ACK, client + 1))
        self.passes(0, Segment(client + 1, ACK, backend + 1))

    def passes(self, side: int, segment: Segment) -> None:
        """Let the node process the segment."""
        ends = "RST" if segment.control & RST else "FIN" if segment.control & FIN else ""
        opens = segment.control == SYN
        key = REPLY if side else REQUEST
        numbers = segment.seq % 2**32, segment.ack % 2**32 if segment.control & ACK else 0
        packet = PACKET.cls(
            *(key, 34, 54 + segment.size, 0, 0, 0, 0, 0, opens, {"RST": 16, "FIN": 8, "": 0}[ends]),
            *(*numbers, segment.bytes, 0, 0, 0, 20, segment.control, 0),
        )
        assert self.node.kernel.run("pass_packet", PACKET.pack(packet), netns=POD)

    def sends(self, side: int, segment: Segment, fate: str) -> bool:
        """Send a segment; return whether the other side accepts its FIN or RST."""
        if fate != "lost before":
            self.passes(side, segment)
        return fate == "arrives" and self.sides[1 - side].take(segment)

    def flags(self, side: int) -> set[str]:
        flow = self.node.kernel.get("tcp_flows", REPLY if side else REQUEST)
        return set(flow.flags) & {"fin", "rst"}


sides = some.integers(0, 1)
sequences = some.integers(0, 2**32 - 1) | some.integers(2**32 - 70_000, 2**32 - 1)
fates = some.sampled_from(["arrives", "arrives", "lost before", "lost after"])
steps = some.lists(
    some.tuples(
        sides,
        some.sampled_from([Side.data, Side.again, Side.keepalive]),
        some.integers(0, 3000),
        fates,
    ),
    max_size=25,
)


def begun(new_node: NewNode, numbers: tuple[int, int], history: list[Any]) -> Connection:
    made = Connection(new_node(), numbers)
    for side, make, size, fate in history:
        made.sends(side, make(made.sides[side], size), fate)
        assert not made.flags(side)
    return made


@given(numbers=some.tuples(sequences, sequences), history=steps, side=sides)
def test_real_reset(
    new_node: NewNode, numbers: tuple[int, int], history: list[Any], side: int
) -> None:
    """A reset ends the flow if its receiver accepts it; otherwise the answer to a challenge ACK
    does.
    """
    made = begun(new_node, numbers, history)
    one, other = made.sides[side], made.sides[1 - side]
    if made.sends(side, one.reset(), "arrives"):
        assert made.flags(side) == {"rst"}
        return
    made.sends(1 - side, Segment(other.sent, ACK, other.awaits), "arrives")
    assert made.sends(side, Segment(other.awaits, RST, 0), "arrives")
    assert made.flags(side) == {"rst"}


@example(numbers=(0, 2**32 - 1), history=[], side=1)  # the number that is acknowledged is 0
@given(numbers=some.tuples(sequences, sequences), history=steps, side=sides)
def test_reset_answers_data(
    new_node: NewNode, numbers: tuple[int, int], history: list[Any], side: int
) -> None:
    """A host without the connection sends a reset with the acknowledged number."""
    made = begun(new_node, numbers, history)
    asked = made.sides[1 - side].data(10)
    made.sends(1 - side, asked, "lost after")
    assert made.sends(side, Segment(asked.ack, RST, 0), "arrives")
    assert made.flags(side) == {"rst"}


@given(numbers=some.tuples(sequences, sequences), history=steps, side=sides, fate=fates)
def test_real_fin(
    new_node: NewNode, numbers: tuple[int, int], history: list[Any], side: int, fate: str
) -> None:
    """A FIN that arrives counts, even if earlier segments have not arrived."""
    made = begun(new_node, numbers, history)
    fin = made.sides[side].fin()
    arrived = made.sends(side, fin, fate) or made.sends(side, fin, "arrives")
    assert arrived
    assert made.flags(side) == {"fin"}


@given(
    numbers=some.tuples(sequences, sequences),
    history=steps,
    side=sides,
    off=some.integers(FAR, 2**32 - FAR),
    control=some.sampled_from([RST, RST | ACK, FIN | ACK, FIN]),
    primed=some.lists(some.sampled_from([SYN, ACK, 0]), max_size=3),
)
def test_guessed_numbers_end_nothing(
    new_node: NewNode,
    numbers: tuple[int, int],
    history: list[Any],
    side: int,
    off: int,
    control: int,
    primed: list[int],
) -> None:
    """Segments whose numbers are far off end nothing and change no numbers."""
    made = begun(new_node, numbers, history)
    before = made.node.kernel.items("tcp_flows")
    at, ack = made.sides[side].sent + off, made.sides[1 - side].sent + off
    for bits in (*primed, control):
        made.passes(side, Segment(at, bits, ack))
    after = made.node.kernel.items("tcp_flows")
    assert not made.flags(side)
    for key, flow in after.items():
        assert flow._replace(asked=0) == before[key]._replace(asked=0)
    made.sends(side, made.sides[side].fin(), "arrives")
    assert made.flags(side) == {"fin"}
