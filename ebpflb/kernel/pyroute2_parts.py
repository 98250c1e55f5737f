# SPDX-License-Identifier: Apache-2.0
"""What ebpflb uses of pyroute2, each imported when it is first used.

``pyroute2_parts.IPRoute()`` is ``pyroute2.IPRoute()``. To import it takes 50 ms of processor time,
and most commands do not need it. pyroute2's package itself would import every protocol that it has,
and a database of devices: 40 ms more. A package of the same name without content takes its place
here, before any module of pyroute2 is imported. From then on a process can import
``pyroute2.iproute.IPRoute``, and not ``pyroute2.IPRoute``.
"""

import sys
from importlib.util import find_spec, module_from_spec
from typing import Any

from ebpflb.errors import in_words


def import_no_more_than_asked() -> None:
    """Does nothing where pyroute2 is imported already."""
    if "pyroute2" not in sys.modules and (spec := find_spec("pyroute2")):
        sys.modules["pyroute2"] = module_from_spec(spec)


def reason(error: Exception) -> str:
    """Say why a call failed; the errors of pyroute2 have the kernel's words last."""
    from pyroute2.netlink.exceptions import NetlinkError

    return str(error.args[-1]) if isinstance(error, NetlinkError) else in_words(error)


def __getattr__(name: str) -> Any:
    """Import a class of pyroute2."""
    match name:
        case "IPRoute":
            from pyroute2.iproute import IPRoute as Found
        case "IPSet":
            from pyroute2.ipset import IPSet as Found
        case "IPVS":
            from pyroute2.ipvs import IPVS as Found
        case "IPVSService":
            from pyroute2.ipvs import IPVSService as Found
        case "NetlinkError":
            from pyroute2.netlink.exceptions import NetlinkError as Found
        case _:
            raise AttributeError(f"{__name__} has no {name}")
    return Found
