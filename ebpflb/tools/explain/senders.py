# SPDX-License-Identifier: Apache-2.0
"""Who may be asked for by name in `ebpflb explain --from`: the pods that are found on this node."""

import msgspec

from ebpflb.errors import NodeError
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.node import clients, namespaces
from ebpflb.tools import pins
from ebpflb.tools.events import EventNames


class Sender(msgspec.Struct):
    """A pod, or another network namespace that has a name."""

    name: str
    addresses: list[str]


class Senders(msgspec.Struct):
    """``node`` has the node's own addresses."""

    pods: list[Sender]
    node: list[str]


def find_senders(state: StateDir) -> Senders:
    """Sorted by name. Raises NodeError."""
    with pins.pinned_maps(state.directory) as maps:
        host = maps["settings"].get(0).host_netns
        path = clients.by_cookie(host) if host else namespaces.OWN_NETNS
        if path is None:
            raise NodeError(f"the node of {state.directory} has no network namespace that is found")

        def find() -> Senders:
            named = (owner for owner in EventNames(maps).pods() if owner.pod and owner.addresses)
            pods = [Sender(it.pod, [*map(str, it.addresses)]) for it in named]
            own = [str(it) for it in clients.own_addresses() if not it.is_loopback]
            return Senders(sorted(pods, key=lambda pod: pod.name), own)

        return namespaces.call_in(path, find)
