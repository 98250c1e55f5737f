# SPDX-License-Identifier: Apache-2.0
"""What ebpflb uses of pyroute2, each imported when it is first used.

``pyroute2_parts.IPRoute()`` is ``pyroute2.IPRoute()``. To import it takes 50 ms of processor time,
and most commands do not need it. pyroute2's package itself would import every protocol that it has,
and a database of devices: 40 ms more. A package of the same name without content takes its place
here, before any module of pyroute2 is imported. From then on a process can import
``pyroute2.iproute.IPRoute``, and not ``pyroute2.IPRoute``.
"""

import importlib.util
import sys
from typing import Any

_NAME = "pyroute2"
_PLACES = {
    "IPRoute": "pyroute2.iproute",
    "IPSet": "pyroute2.ipset",
    "IPVS": "pyroute2.ipvs",
    "IPVSService": "pyroute2.ipvs",
    "NetlinkError": "pyroute2.netlink.exceptions",
}


def import_no_more_than_asked() -> None:
    """Does nothing where pyroute2 is imported already."""
    spec = importlib.util.find_spec(_NAME)
    if spec and _NAME not in sys.modules:
        sys.modules[_NAME] = importlib.util.module_from_spec(spec)


def __getattr__(name: str) -> Any:
    """Import a class of pyroute2."""
    if name not in _PLACES:
        raise AttributeError(f"{__name__} has no {name}")
    return getattr(importlib.import_module(_PLACES[name]), name)
