# SPDX-License-Identifier: Apache-2.0
"""Which engine opens the flows of packets, and why: the kernel's conntrack or the flow tables.

A flow that either engine has opened is followed until it ends, whichever opens new ones.
"""

from dataclasses import dataclass
from enum import StrEnum

from ebpflb.errors import NodeError


class Engine(StrEnum):
    """What opens flows of packets, and translates them."""

    CONNTRACK = "conntrack"
    FLOWS = "flows"


AUTO = "auto"
CHOICES = (AUTO, *(str(each) for each in Engine))  # of --packet-path

_CHOSEN = "chosen by --packet-path"
_WORKS = "the kernel's conntrack can be used by programs"


@dataclass(frozen=True)
class PacketPath:
    """The engine in force; ``reason`` is one sentence for the operator, without a full stop."""

    engine: Engine
    reason: str


def decide(chosen: str, *, missing: str | None, unsuited: str | None = None) -> PacketPath:
    """The engine for one of CHOICES.

    ``missing`` says why the conntrack engine cannot work on this node, ``unsuited`` why it should
    not be used here: then it is used only if it was chosen. Raises NodeError if what was chosen
    cannot work.
    """
    if chosen == Engine.FLOWS:
        return PacketPath(Engine.FLOWS, _CHOSEN)
    if chosen == Engine.CONNTRACK:
        if missing:
            raise NodeError(f"--packet-path=conntrack cannot work on this node: {missing}")
        return PacketPath(
            Engine.CONNTRACK, f"{_CHOSEN}, although {unsuited}" if unsuited else _CHOSEN
        )
    obstacle = missing or unsuited
    if obstacle:
        return PacketPath(Engine.FLOWS, obstacle)
    return PacketPath(Engine.CONNTRACK, _WORKS)
