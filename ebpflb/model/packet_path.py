# SPDX-License-Identifier: Apache-2.0
"""Which engine translates new flows of packets, and why: netfilter or the flow tables.

A flow that either engine has opened goes on until it ends, whichever opens new ones.
"""

from dataclasses import dataclass
from enum import StrEnum

from ebpflb.errors import NodeError


class Engine(StrEnum):
    """``NETFILTER``: the kernel's NAT, by a table of nftables. ``FLOWS``: ebpflb's own tables."""

    NETFILTER = "netfilter"
    FLOWS = "flows"

    @classmethod
    def _missing_(cls, value: object) -> "Engine | None":
        """By its former name, which an agent's status may still have."""
        return FORMER_NAMES.get(value) if isinstance(value, str) else None


AUTO = "auto"
CHOICES = (AUTO, *(str(each) for each in Engine))  # of --packet-path
FORMER_NAMES = {"conntrack": Engine.NETFILTER}  # as --packet-path was given before 0.1.0

_CHOSEN = "chosen by --packet-path"
_WORKS = "the kernel's NAT works with nftables"


@dataclass(frozen=True)
class PacketPath:
    """The engine in force; ``reason`` is one sentence for the operator, without a full stop."""

    engine: Engine
    reason: str


def decide(chosen: str, *, missing: str | None, unsuited: str | None = None) -> PacketPath:
    """The engine for one of CHOICES.

    ``missing`` says why the engine netfilter cannot work on this node, ``unsuited`` why it should
    not be used here: then it is used only if it was chosen. Raises NodeError if what was chosen
    cannot work.
    """
    if chosen == Engine.FLOWS:
        return PacketPath(Engine.FLOWS, _CHOSEN)
    if chosen == Engine.NETFILTER:
        if missing:
            raise NodeError(f"--packet-path=netfilter cannot work on this node: {missing}")
        return PacketPath(
            Engine.NETFILTER, f"{_CHOSEN}, although {unsuited}" if unsuited else _CHOSEN
        )
    obstacle = missing or unsuited
    if obstacle:
        return PacketPath(Engine.FLOWS, obstacle)
    return PacketPath(Engine.NETFILTER, _WORKS)
