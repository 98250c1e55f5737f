# SPDX-License-Identifier: Apache-2.0
"""Names for events: services and backends by their ids, pods by namespace and address.

What is found is kept for seconds, as ids are given to others; what takes long to look for is looked
for once in so many seconds.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from ebpflb.datapath.maps.bpf_map import Map
from ebpflb.diagnose.snapshot import Snapshot
from ebpflb.errors import NodeError
from ebpflb.model.addresses import Address
from ebpflb.node import clients, namespaces
from ebpflb.plan.entries import BackendName, Frontend
from ebpflb.plan.wording import service_name

KEPT_SECONDS = 5.0
SEARCH_SECONDS = 2.0  # from one search through all namespaces to the next
PODS_SECONDS = 30.0  # the same of all endpoints
_MOST = 10_000
NODE = "node"


class NetnsOwner(NamedTuple):
    """A network namespace: the pod whose it is, if that can be told, and its addresses."""

    pod: str
    addresses: tuple[Address, ...]


_UNKNOWN = NetnsOwner("", ())


class EventNames:
    """Of one node, whose network namespace the process is in."""

    def __init__(self, maps: Mapping[str, Map]) -> None:
        self._maps = maps
        self._host = maps["settings"].get(0).host_netns
        self._services: dict[int | Frontend, str] = {}
        self._targets: dict[int, str] = {}
        self._owners: dict[int, NetnsOwner] = {
            self._host: NetnsOwner(NODE, clients.own_addresses())
        }
        self._pods: dict[Address, str] = {}
        self._kept_until = self._next_search = self._next_pods = 0.0

    def service(self, number: int, frontend: Frontend | None) -> str:
        """By its id; by its frontend where no id was noted. "" if there is none."""
        self._forget_in_time()
        key = number or frontend
        if key is None:
            return ""
        if key not in self._services:
            number = number or self._service_at(frontend)
            self._services[key] = service_name(self._maps["service_names"].get(number), number)
        return self._services[key]

    def target(self, backend: int) -> str:
        """The pod that is an endpoint."""
        self._forget_in_time()
        if backend not in self._targets:
            named = self._maps["backend_names"].get(backend) or BackendName("", "")
            self._targets[backend] = named.target
        return self._targets[backend]

    def place(self, netns: int, process: int) -> NetnsOwner:
        """Of a socket, by the cookie of its namespace and its process."""
        if netns not in self._owners:
            found = self._of_process(netns, process) or self._search(netns)
            if not found:
                return _UNKNOWN
            self._owners[netns] = found
        return self._owners[netns]

    def pod_at(self, address: Address) -> str:
        """The pod with this address, if it is an endpoint; the node for its own addresses."""
        if address in self._owners[self._host].addresses:
            return NODE
        if address not in self._pods and time.monotonic() > self._next_pods:
            self._next_pods = time.monotonic() + PODS_SECONDS
            snapshot = Snapshot.read(self._maps)
            self._pods = {
                backend.address: snapshot.backend_names[number].target
                for number, backend in snapshot.backends().items()
                if number in snapshot.backend_names
            }
        return self._pods.get(address, "")

    def _service_at(self, frontend: Frontend | None) -> int:
        """A NodePort has no address of its own."""
        if frontend is None:
            return 0
        zero = ip_address("0.0.0.0" if frontend.address.version == 4 else "::")
        for candidate in (frontend, frontend._replace(address=zero)):
            if found := self._maps["services"].get(candidate):
                return int(found.id)
        return 0

    def _of_process(self, netns: int, process: int) -> NetnsOwner | None:
        """Its process may have ended, and its number may be another's."""
        folder = Path("/proc", str(process))
        with suppress(NodeError):
            if process and clients.cookie(folder / "ns/net") in (None, netns):
                return self._owner_at(folder / "ns/net", clients.host_name(folder))
        return None

    def _search(self, netns: int) -> NetnsOwner | None:
        if time.monotonic() < self._next_search:
            return None
        self._next_search = time.monotonic() + SEARCH_SECONDS
        with suppress(NodeError):
            if path := clients.by_cookie(netns):
                return self._owner_at(path, "")
        return None

    def _owner_at(self, path: Path, name: str) -> NetnsOwner:
        found = clients.addresses(path)
        named = next((pod for it in found if (pod := self.pod_at(it))), "")
        return NetnsOwner(named or name or _given_name(path), found)

    def _forget_in_time(self) -> None:
        if time.monotonic() > self._kept_until or len(self._services) > _MOST:
            self._kept_until = time.monotonic() + KEPT_SECONDS
            self._services.clear()
            self._targets.clear()


def _given_name(path: Path) -> str:
    """What ip(8) calls a namespace; those of container runtimes tell nobody anything."""
    wanted = namespaces.identity(path)
    for folder in namespaces.NAMED if wanted else ():
        for entry in folder.iterdir() if folder.is_dir() else ():
            if namespaces.identity(entry) == wanted and not entry.name.startswith("cni-"):
                return entry.name
    return ""
