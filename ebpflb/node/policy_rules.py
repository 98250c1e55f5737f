# SPDX-License-Identifier: Apache-2.0
"""The routing rules of this network namespace (ip rule), as far as marks choose a table."""

from socket import AF_INET, AF_INET6

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from ebpflb.errors import NodeError


def marks() -> set[int]:
    """The marks, under their masks. Raises NodeError."""
    try:
        with IPRoute() as route:
            rules = [rule for family in (AF_INET, AF_INET6) for rule in route.get_rules(family)]
    except (NetlinkError, OSError) as error:
        raise NodeError(f"routing rules cannot be listed: {error.args[-1]}") from error
    found = ((rule.get_attr("FRA_FWMARK"), rule.get_attr("FRA_FWMASK")) for rule in rules)
    return {mark & (2**32 - 1 if mask is None else mask) for mark, mask in found if mark} - {0}
