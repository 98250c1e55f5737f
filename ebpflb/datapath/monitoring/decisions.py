# SPDX-License-Identifier: Apache-2.0
"""Which decisions can be asked for, and their events as values (bpf/record/events.h)."""

import hashlib
from collections.abc import Iterable, Iterator

from ebpflb.datapath.maps import layout
from ebpflb.datapath.maps.records import RECORDS, MonitorEvent
from ebpflb.datapath.monitoring.ring import HEADER

EVENT_RECORD = RECORDS["struct event"]
SIZE = EVENT_RECORD.struct.size
STRIDE = HEADER + SIZE
HOOKS = layout.names("event_hook", "EVENT_")
FLOW_KINDS = layout.names("flow_kind", "FLOW_")
# Counted on the way to a verdict, and no decision of its own; and how many there are.
_NO_DECISIONS = {"retried", "s"}
DECISIONS = {word: number for number, word in layout.VERDICTS.items() if word not in _NO_DECISIONS}
# Of every packet: shown if they are asked for by name.
FREQUENT = frozenset({"passed", "established", "reply_translated"})
USUAL = frozenset(DECISIONS) - FREQUENT


def format_hash() -> str:
    """Names how events are laid out: an agent and a command of two versions may differ."""
    text = (layout.SOURCES / "record/events.h").read_text()
    return hashlib.sha256(f"{layout.layout_hash()} {text}".encode()).hexdigest()[:12]


def mask(verdicts: Iterable[str]) -> int:
    """A bit for each; raises KeyError for what is no decision."""
    return sum(1 << DECISIONS[word] for word in verdicts)


def unpacked(records: bytes) -> Iterator[MonitorEvent]:
    """The events of ``Ring.take``."""
    for at in range(0, len(records), STRIDE):
        yield EVENT_RECORD.unpack(records[at + HEADER : at + STRIDE])
