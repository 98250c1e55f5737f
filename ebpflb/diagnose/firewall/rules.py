# SPDX-License-Identifier: Apache-2.0
"""Tables, chains and rules of netfilter, whichever tool has printed them."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ebpflb.diagnose.firewall.matches import AnyMatch

# Priorities of netfilter's hooks (uapi/linux/netfilter_ipv4.h).
RAW, MANGLE, NAT_DST, FILTER, SECURITY, NAT_SRC = -300, -150, -100, 0, 50, 100
STATES = frozenset({"new", "established", "related", "invalid", "untracked"})  # conntrack's


class Does(Enum):
    """What a rule does with what it matches, as far as findings differ."""

    NOTHING = "counts, logs or limits"
    ACCEPT = "accepts or returns"
    DROP = "drops or rejects"
    MARK = "marks the packet or its connection"
    NAT = "leads the packet elsewhere"
    UNTRACK = "takes the packet from conntrack"


class FirewallRule(NamedTuple):
    """``where`` is the rule's handle or text; ``jump`` the chain that it goes to, "" for none.

    ``mark`` has the bits that a MARK sets, 0 for unknown. ``ends``: it asks for nothing but its
    matches, and what they hold for goes no further in the chain. ``each`` says what it does with
    each packet of a connection: "" for nothing. ``states`` are the connection states that it asks
    for, none for any; ``only_states``: it asks for nothing else, and is no return.
    """

    where: str
    matches: tuple[AnyMatch, ...]
    does: Does
    jump: str = ""
    mark: int = 0
    ends: bool = False
    each: str = ""
    states: frozenset[str] = frozenset()
    only_states: bool = False


@dataclass
class Chain:
    """``hook`` is netfilter's name in lower case, "" for a chain that only others jump to.

    ``drops``: its policy is to drop.
    """

    name: str
    hook: str = ""
    priority: int = 0
    is_nat: bool = False
    drops: bool = False
    rules: list[FirewallRule] = field(default_factory=list)


@dataclass
class FirewallTable:
    """``title`` says whose it is: "table inet filter", "iptables-legacy, table nat".

    ``family`` is 4 or 6 where it has packets of one family only, else 0. ``of_bridges``: its chains
    are those of family bridge.
    """

    title: str
    family: int
    chains: dict[str, Chain] = field(default_factory=dict)
    of_bridges: bool = False
