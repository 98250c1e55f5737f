# SPDX-License-Identifier: Apache-2.0
"""Endpoints on this node whose replies to clients outside do not come back to the node.

Clients outside keep their address if the endpoint is on this node, where kube-proxy masquerades
them. A pod with several networks may send its replies by another one (docs/limits.md).
"""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from ebpflb.errors import NodeError
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.node import namespaces, routes
from ebpflb.kernel.node.routes import FAR_CLIENTS, ReplyRoute
from ebpflb.model.addresses import Address
from ebpflb.tools.snapshot import Snapshot

REMEDY = "--masquerade-local-backends"
_MOST_SHOWN = 20


def misled(state_directory: Path) -> list[str]:
    """A line for each endpoint; none where no agent has run. Raises NodeError."""
    endpoints = _asked_from_outside(state_directory)
    if not endpoints:
        return []
    clients = {*FAR_CLIENTS, *routes.gateways()}
    lines = list(_lines(endpoints, _replies(endpoints, sorted(clients, key=str))))
    more = len(lines) - _MOST_SHOWN
    return lines[:_MOST_SHOWN] + ([f"{more} more endpoints like these"] if more > 0 else [])


def _replies(endpoints: dict[Address, str], clients: list[Address]) -> Iterator[ReplyRoute]:
    """Of all pods of the node; one that ends meanwhile is left out."""
    for path in namespaces.linked():
        try:
            found = namespaces.call_in(path, partial(routes.replies, endpoints.keys(), clients))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise NodeError(f"pods' routes cannot be read: {error.strerror}") from error
        yield from found


def _lines(endpoints: dict[Address, str], replies: Iterable[ReplyRoute]) -> Iterator[str]:
    """One for each endpoint, with the first client that it does not answer."""
    said = set()
    for reply in replies:
        if reply.leaves_by != reply.device and reply.address not in said:
            said.add(reply.address)
            way = f"leave by {reply.leaves_by}" if reply.leaves_by else "have no route"
            name = f"{endpoints[reply.address]} ({reply.address})".strip()
            yield (
                f"{name}: replies to clients outside, such as {reply.client}, {way}; "
                f"requests come in by {reply.device}"
            )


def _asked_from_outside(state_directory: Path) -> dict[Address, str]:
    """The endpoints, by address, that get requests with the address of a client outside under
    policy Cluster, and what they are. (With policy Local kube-proxy masquerades nobody either.)
    """
    try:
        maps = StateDir(state_directory).read_maps()
    except NodeError:
        return {}
    try:
        if "masquerade_here" in maps["settings"].get(0).flags:
            return {}
        snapshot = Snapshot.read(maps)
    finally:
        for opened in maps.values():
            opened.close()
    outside = {
        service.id
        for service in snapshot.services.values()
        if "external" in service.flags and "local" not in service.flags
    }
    return {
        backend.address: snapshot.backend_names[backend.id].target
        for backend in snapshot.slots.values()
        if backend.service in outside and backend.id in snapshot.backend_names
    }
