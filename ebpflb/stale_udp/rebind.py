# SPDX-License-Identifier: Apache-2.0
"""Where sockets cannot be ended: the packet path takes a pod's stale flow to another backend.

Written as a flow from the client through its former backend, it is followed, swept and shown as
any other. What has none yet, or has lost its backend, is given one; one that has been idle for a
while is renewed, for the sweeper would take it while its socket still means it.

That takes what this node routes. A client on the same bridge as its former backend sends to that
one's hardware address, so it is left alone; so is one to whom all other backends are itself.
"""

import time
from collections.abc import Mapping

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from ebpflb.datapath.maps.bpf_map import Map
from ebpflb.datapath.maps.records import PeerFrontend
from ebpflb.model.addresses import Address
from ebpflb.plan.entries import Backend
from ebpflb.plan.flow_entries import Flow, FlowKind, reverse
from ebpflb.plan.stale import Stranded, heirs
from ebpflb.stale_udp.find import Serving

RENEWAL = 60.0  # seconds; a flow that has gone both ways is swept after 180


def are_neighbours(one: Address, other: Address) -> bool:
    """Whether packets to both leave this node by the same device: then they meet without it."""
    devices = {_way_to(one), _way_to(other)}
    return len(devices) == 1 and None not in devices


def _way_to(address: Address) -> int | None:
    """The index of the device by which a packet would leave; None where there is no way."""
    try:
        with IPRoute() as route:
            found = route.route("get", dst=str(address))[0].get_attr("RTA_OIF")
    except NetlinkError:
        return None
    return int(found) if found else None


class Rebinding:
    """``bound`` are the backends that flows were taken to."""

    def __init__(self, maps: Mapping[str, Map]) -> None:
        self.flows = maps["other_flows"]
        self.members, self.slots = maps["members"], maps["slots"]
        self.bound: set[int] = set()

    def bind(self, stranded: Stranded, origin: PeerFrontend, serving: Serving) -> bool | None:
        """Whether the flow was taken to another backend; None where there is nothing to do."""
        now, flow = time.monotonic_ns(), self.flows.get(stranded.asked)
        if flow and self._serves(flow):
            self.bound.add(flow.backend)
            self._renew(stranded, flow, now)
            return None
        if flow:
            self.flows.delete([stranded.answered(flow.address, flow.port), stranded.asked])
        found = serving.find(origin.frontend)
        if found is None or are_neighbours(stranded.client[0], stranded.backend[0]):
            return False
        return any(self._take(stranded, heir, now) for heir in heirs(*found, stranded.client))

    def _serves(self, flow: Flow) -> bool:
        """As backend_find of bpf/path/backend.h."""
        slot = self.members.get(flow.backend)
        if slot >= self.slots.spec.entries:
            return False
        backend: Backend = self.slots.get(slot)
        return (backend.service, backend.id) == (flow.service, flow.backend)

    def _take(self, stranded: Stranded, heir: Backend, now: int) -> bool:
        """False where another flow of this client's port has the way back."""
        (way_back, answer), (asked, request) = stranded.entries(heir, now).items()
        if not self.flows.insert(way_back, answer):
            return False
        self.flows.delete([reverse(way_back)])  # a former flow's masquerade
        self.flows.write([(asked, request)])
        self.bound.add(heir.id)
        return True

    def _renew(self, stranded: Stranded, flow: Flow, now: int) -> None:
        if now - flow.last_seen < RENEWAL * 1e9:
            return
        way_back = stranded.answered(flow.address, flow.port)
        answer = self.flows.get(way_back) or flow._replace(
            address=stranded.backend[0],
            port=stranded.backend[1],
            kind=FlowKind.UN_DNAT,
            flags=frozenset({"seen"}),
        )
        renewed = ((way_back, answer), (stranded.asked, flow))
        self.flows.write([(key, entry._replace(last_seen=now)) for key, entry in renewed])
