# SPDX-License-Identifier: Apache-2.0
"""How many connections each backend has, where one of the three maps that say it has lost its pin.

An element of sockets or connections takes from backend_loads what it has added to it
(bpf/core/connection.h). If one of them were made anew beside the others, what the lost elements
have added would stay for ever, or elements would take what was never added. So backend_loads is
made anew too, with a generation that no element has. An earlier agent's programs go on with theirs.
"""

import logging
import secrets
from collections.abc import Mapping

from ebpflb.datapath.maps.bpf_map import Map, MappedArray
from ebpflb.datapath.maps.layout import MapSpec
from ebpflb.datapath.maps.state_dir import StateDir
from ebpflb.plan.entries import BackendLoad

_LOADS = "backend_loads"
COUNTED = ("sockets", "connections", _LOADS)
_GENERATION_BITS = 31  # it grows by one when a backend is removed, and must not pass 32 bits

log = logging.getLogger(__name__)


def renew_if_lost(state: StateDir, specs: Mapping[str, MapSpec]) -> None:
    """Before maps are opened; if killed amid it, the next start finds one missing again."""
    lost = [name for name in COUNTED if not state.is_pinned(specs[name])]
    if 0 < len(lost) < len(COUNTED):
        log.warning(
            "map %s has lost its pin: connections of backends are counted anew", ", ".join(lost)
        )
        state.renew(specs[_LOADS], _begin)


def _begin(loads: Map) -> None:
    assert isinstance(loads, MappedArray)
    load = loads.value.pack(BackendLoad(generation=secrets.randbits(_GENERATION_BITS)))
    loads.memory[0 : loads.spec.entries * loads.stride] = load * loads.spec.entries
