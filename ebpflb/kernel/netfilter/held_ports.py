# SPDX-License-Identifier: Apache-2.0
"""Masquerade ports that connections of the kernel's NAT have when the flow tables begin.

Until then netfilter, or kube-proxy, gives them any port. If a flow got the same one to the same
endpoint, both would break. So each such port gets an entry as of a flow that has ended and whose
port rests: it translates nothing, and no flow gets the port.
"""

import logging
import time
from collections.abc import Iterator, Mapping

from ebpflb.entries.flows import ASSURED, Flow, FlowKind, Hook, Tuple
from ebpflb.errors import NodeError
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.layout import columns
from ebpflb.kernel.maps.sweep import FLOW_MAPS
from ebpflb.kernel.netfilter import conntrack

log = logging.getLogger(__name__)

_KIND = columns("struct flow", kind="B")
_HELD_SECONDS = 24 * 3600  # for connections that go on; others: until conntrack's timeout


def hold(maps: Mapping[str, Map], first: int, last: int) -> None:
    """Hold the ports from first to last that are in use. Without conntrack there are none."""
    now = time.monotonic_ns()
    try:
        for entry in conntrack.masqueraded(first, last):
            source, to, port, masqueraded = entry.reply
            seconds = _HELD_SECONDS if entry.status & ASSURED else entry.seconds
            key = Tuple(source, to, port, masqueraded, entry.protocol, Hook.INGRESS)
            made = Flow(
                created=now,
                connection=0,
                address=entry.original.source,
                port=entry.original.source_port,
                other_port=port,
                service=0,
                backend=0,
                ifindex=0,
                kind=FlowKind.RESTING,
                flags=frozenset({"fin"}),
                last_seen=now + seconds * 1_000_000_000,
            )
            name = next(name for name, them in FLOW_MAPS.items() if entry.protocol in them)
            maps[name].add(key, made)
    except NodeError as error:
        log.warning("masqueraded connections may break, as new ones may get their ports: %s", error)


def let_go(maps: Mapping[str, Map]) -> None:
    """Delete all entries that hold ports; to be called when no flow can open any more."""
    for opened in (maps[name] for name in FLOW_MAPS):
        size = opened.spec.key_size
        for keys, values in opened.slices():
            at = [n * size for n, kind in enumerate(_kinds(values)) if kind == FlowKind.RESTING]
            opened.delete([opened.key.unpack(keys[each : each + size]) for each in at])


def has_flows(maps: Mapping[str, Map]) -> bool:
    """Whether there is any flow; ports that are held are none."""
    tables = (maps[name] for name in FLOW_MAPS)
    slices = (values for table in tables for _, values in table.slices())
    return any(kind != FlowKind.RESTING for values in slices for kind in _kinds(values))


def _kinds(values: bytes) -> Iterator[int]:
    return (kind for (kind,) in _KIND.iter_unpack(values))
