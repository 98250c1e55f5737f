# SPDX-License-Identifier: Apache-2.0
"""Whether the way of a connection in the flowtable may have become another one.

If the way leads over a bridge or a VLAN, the kernel keeps its device, its MAC addresses and its MTU
as they were when the connection entered the flowtable, and asks for no route any more. (Elsewhere
it asks whether the route is still valid, and for the neighbour.)
"""

import struct

from ebpflb.kernel import netlink
from ebpflb.kernel.netlink import attributes

# RTNLGRP_LINK, _NEIGH, _IPV4_ROUTE, _IPV6_ROUTE
GROUPS = 1, 3, 7, 11
_LINK, _NEIGHBOUR, _ROUTES = 16, 28, (24, 25)  # RTM_NEWLINK, _NEWNEIGH, _NEWROUTE, _DELROUTE
_GET_LINKS, _GET_NEIGHBOURS = 18, 30  # RTM_GETLINK, _GETNEIGH
_IFINFO = struct.Struct("=BxHiII")  # struct ifinfomsg
_NDMSG = struct.Struct("=BxxxiHBB")  # struct ndmsg
_RTMSG = struct.Struct("=BBBBBBBBI")  # struct rtmsg
_ADDRESS, _MTU, _MASTER, _KINDS = 1, 4, 10, 18  # IFLA_*, _LINKINFO
_KIND, _PORT_OF = 1, 4  # IFLA_INFO_KIND, _SLAVE_KIND
_KEEPING = {b"vlan", b"ppp", b"dsa"}  # links whose ways the kernel keeps, as with bridge ports
_UP = 1  # IFF_UP: the kernel itself ends the offloads of a device that is down
_BRIDGE = 7  # AF_BRIDGE: an entry of a bridge's table
_DESTINATION, _LINK_ADDRESS, _VLAN = 1, 2, 5  # NDA_*; RTA_DST is 1 too
_LINK_LOCAL = b"\xfe\x80"
_FORWARDED = 1, 6, 7, 8  # RTN_UNICAST, _BLACKHOLE, _UNREACHABLE, _PROHIBIT
_CLONED = 0x200  # RTM_F_CLONED
_MOST = 1 << 16  # neighbours: what fills them is forgotten


class Ways:
    """What is known of links and neighbours; a new one is no change, while all are known
    (``knows_all``). Before a link leads over a bridge or a VLAN, only links change a way.
    """

    def __init__(self) -> None:
        self._known = dict[object, object]()
        self.knows_all, self._keeps_any = True, False
        try:
            for content in netlink.dump(_GET_LINKS, _IFINFO.pack(0, 0, 0, 0, 0)):
                self.changes(_LINK, content)
            for family in (0, _BRIDGE):
                for content in netlink.dump(_GET_NEIGHBOURS, _NDMSG.pack(family, 0, 0, 0, 0)):
                    self.changes(_NEIGHBOUR, content)
        except OSError:
            self.forget()

    def forget(self) -> None:
        """Note that messages are lost, or too many: anything may be as it was not before."""
        self._known.clear()
        self.knows_all = False

    def changes(self, kind: int, content: bytes) -> bool:
        """Whether this message of rtnetlink says that something is as it was not before."""
        if kind == _LINK:
            return self._link_changes(content)
        if kind == _NEIGHBOUR:
            return self._differs(*_neighbour(content)) and self._keeps_any
        if kind not in _ROUTES or not self._keeps_any:
            return False
        *_, type_, flags = _RTMSG.unpack_from(content)
        to = attributes(content, _RTMSG.size).get(_DESTINATION, b"")
        is_usual = flags & _CLONED or to.startswith(_LINK_LOCAL)  # each device has the latter
        return type_ in _FORWARDED and not is_usual

    def _link_changes(self, content: bytes) -> bool:
        family, _, index, flags, _ = _IFINFO.unpack_from(content)
        if family or not flags & _UP:  # of a family: a bridge tells of its port again, with less
            return False
        found = attributes(content, _IFINFO.size)
        kinds = attributes(found.get(_KINDS, b""))
        kind, port_of = (kinds.get(it, b"").rstrip(b"\0") for it in (_KIND, _PORT_OF))
        self._keeps_any |= kind in _KEEPING or port_of == b"bridge"
        return self._differs(index, tuple(found.get(it) for it in (_ADDRESS, _MTU, _MASTER)))

    def _differs(self, key: object, value: object) -> bool:
        """Whether the value is another one than before. None as value says nothing."""
        if value is None:
            return False
        if len(self._known) >= _MOST:
            self.forget()
        former = self._known.get(key)
        self._known[key] = value
        return not self.knows_all if former is None else former != value


def _neighbour(content: bytes) -> tuple[object, object]:
    family, index, *_ = _NDMSG.unpack_from(content)
    found = attributes(content, _NDMSG.size)
    if family == _BRIDGE:
        return (family, found.get(_LINK_ADDRESS), found.get(_VLAN)), index
    return (family, index, found.get(_DESTINATION)), found.get(_LINK_ADDRESS)
