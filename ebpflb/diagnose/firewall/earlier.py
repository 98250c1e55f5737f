# SPDX-License-Identifier: Apache-2.0
"""What the rules before one leave of the packets in its chain."""

from collections.abc import Sequence
from typing import NamedTuple

from ebpflb.diagnose.firewall.matches import AnyMatch, View
from ebpflb.diagnose.firewall.rules import Chain, Does, FirewallRule

_MOST_RULES = 50  # rules before one that are considered


class Earlier(NamedTuple):
    """``ended``: the matches of rules for which no packet goes on, if that is certain. Those of a
    chain that has been left again are not considered.

    ``drops_after``: of the calling chains, whether a rule or the policy may drop what comes back.
    """

    ended: tuple[tuple[AnyMatch, ...], ...] = ()
    drops_after: bool = False

    def leaves(self, view: View) -> bool:
        """Whether a packet that looks like this comes so far."""
        return not any(all(match.holds(view) for match in each) for each in self.ended)

    def and_rule(self, rule: FirewallRule) -> "Earlier":
        """What is before the next rule of the chain."""
        if not rule.ends or len(self.ended) >= _MOST_RULES:
            return self
        return self._replace(ended=(*self.ended, rule.matches))


def may_drop_after(rules: Sequence[FirewallRule], chain: Chain) -> int:
    """The index of the last rule that drops, or leads to a chain that may; -1 if there is none.

    Beyond all rules if the chain's policy drops.
    """
    if chain.drops:
        return len(rules)
    may = (at for at, rule in enumerate(rules) if rule.jump or rule.does is Does.DROP)
    return max(may, default=-1)
