# SPDX-License-Identifier: Apache-2.0
"""Whether established flows bypass the network stack (--fast-forward)."""

from msgspec import Struct

FAST_FORWARDS = (FORWARD_OFF, FORWARD_ON, FORWARD_AUTO) = ("off", "on", "auto")


class EachPacketRules(Struct, frozen=True):
    """The rules of this node that act on each packet of a connection, in words; or what hides them.

    Established flows must not bypass them with FORWARD_AUTO. ``changes`` is another number after
    each change of any rule that they would meet: a new one may drop them.
    """

    lines: tuple[str, ...] = ()
    changes: int = 0


def why_off(wanted: str, rules: EachPacketRules | None) -> str | None:
    """Return why flows do not bypass the stack; None if they do. ``rules``: None if not known."""
    if wanted == FORWARD_ON:
        return None
    if wanted == FORWARD_OFF:
        return "not wanted"
    if rules is None:
        return "the firewall rules have not been read yet"
    if not rules.lines:
        return None
    more = f"; {len(rules.lines) - 1} more" if len(rules.lines) > 1 else ""
    return rules.lines[0] + more
