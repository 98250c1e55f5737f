# SPDX-License-Identifier: Apache-2.0
"""The client: a process of the node, a pod on it, or a client outside.

The thread must be in the node's network namespace.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from ebpflb.entries.services import (
    Backend,
    BackendName,
    Choice,
    Frontend,
    Range,
    ServiceEntry,
    protocol_name,
    service_name,
)
from ebpflb.errors import NodeError, one_line
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.node import namespaces, routes
from ebpflb.model.addresses import Address, host_port, parse_address
from ebpflb.model.services import PROTOCOLS, PortName, Protocol
from ebpflb.tools.snapshot import require_service, services_at

# The destination of a connection: ADDRESS:PORT, and a protocol.

_NAME = re.compile(
    r"(?:(?P<space>[a-z0-9-]+)/(?P<name>[a-z0-9-]+)"
    r"|(?P<first>[a-z0-9-]+)\.(?P<second>[a-z0-9-]+)\.svc(?:\.[a-z0-9.-]+)?)"
    r"(?::(?P<port>[a-z0-9-]+))?(?:/(?P<protocol>\w+))?"
)
_FORM = re.compile(r"(?:\[(?P<v6>[^\]]*)\]|(?P<v4>[^:\[\]]*)):(?P<port>\d{1,5})(?:/(?P<name>\w+))?")
FORMS_OF_QUESTIONS = (
    "ADDRESS:PORT[/tcp|udp|sctp] or NAMESPACE/NAME[:PORT], such as 10.96.0.10:80, [fd00::a]:53/udp "
    "or default/web:http"
)


class NamedService(NamedTuple):
    """A Service by its name; ``port`` is a number or a name, or "" for its only port."""

    namespace: str
    name: str
    port: str
    protocol: Protocol | None

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def parse_question(text: str) -> Frontend | NamedService:
    """Parse the destination: an address, or a Service by its name as in kubectl or DNS.

    Raises ValueError with a message for the operator.
    """
    if named := _NAME.fullmatch(text):
        namespace = named["space"] or named["second"]
        protocol = _protocol(named["protocol"]) if named["protocol"] else None
        return NamedService(
            namespace, named["name"] or named["first"], named["port"] or "", protocol
        )
    if not (found := _FORM.fullmatch(text)):
        raise ValueError(f'"{one_line(text)}" is not {FORMS_OF_QUESTIONS}')
    protocol, port = _protocol(found["name"] or "tcp"), int(found["port"])
    if not 0 < port < 65536:
        raise ValueError(f"port {port} is not from 1 to 65535")
    address = parse_address(found["v6"] or found["v4"] or "")
    if address.is_unspecified or address.is_multicast:
        raise ValueError(f"{address} is not the address of one host")
    return Frontend(address, port, protocol)


def _protocol(name: str) -> Protocol:
    if name.upper() not in PROTOCOLS:
        raise ValueError(f'"{one_line(name.lower())}" is not tcp, udp or sctp')
    return Protocol(PROTOCOLS[name.upper()])


def find_frontend(maps: Mapping[str, Map], wanted: NamedService) -> Frontend:
    """Return a frontend of the Service: the cluster IP before other addresses, IPv4 before IPv6.

    Raises NodeError if no port fits, or several do.
    """
    require_service(maps, str(wanted))
    names: dict[int, PortName] = dict(maps["service_names"].items())
    entries: list[tuple[Frontend, ServiceEntry]] = list(maps["services"].items())
    own = [
        (at, entry, name)
        for at, entry in entries
        if (name := names.get(entry.id)) and not at.address.is_unspecified
        if name.owner == (wanted.namespace, wanted.name)
    ]
    fitting = [
        (at, entry)
        for at, entry, name in own
        if wanted.port in ("", name.port, str(at.port)) and wanted.protocol in (None, at.protocol)
    ]
    if len({at.port for at, _ in fitting}) != 1:
        ports = sorted({f"{at.port}/{protocol_name(at.protocol).lower()}" for at, *_ in own})
        lacks = "" if fitting else f"no port {wanted.port}; "
        raise NodeError(f"{wanted}: {lacks}it has {', '.join(ports)}; name one of them")
    return min(fitting, key=_is_further)[0]


def _is_further(found: tuple[Frontend, ServiceEntry]) -> tuple[bool, int, int]:
    at, entry = found
    return "external" in entry.flags, at.address.version, at.protocol


# The rows that steps refer to, each read from its map on access.


class Share(NamedTuple):
    """A backend of a service, and the probability that a new connection gets it, from 0 to 1."""

    chance: float
    endpoint: str
    pod: str
    node: str
    zone: str
    slot: int
    note: str


class MapFacts:
    """What a question needs from the pinned maps.

    ``cgroup`` is where the socket hooks are attached, as a path in /proc; ``socket_hooks``: whether
    they are attached; ``devices``: the devices with programs; ``hands_over``: those at which
    requests are handed to other nodes.
    """

    def __init__(
        self,
        maps: Mapping[str, Map],
        cgroup: Path,
        devices: Collection[int],
        *,
        socket_hooks: bool,
        hands_over: Collection[int] = (),
    ) -> None:
        self.maps, self.cgroup, self.devices = maps, cgroup, devices
        self.socket_hooks, self.hands_over = socket_hooks, hands_over
        self.settings = maps["settings"].get(0)
        self.host_netns: int = self.settings.host_netns

    def service_at(self, frontend: Frontend) -> ServiceEntry | None:
        found: ServiceEntry | None = self.maps["services"].get(frontend)
        return found

    def service_ids(self, frontend: Frontend) -> list[int]:
        """Return the ids of services with this frontend, by address or as a NodePort."""
        return [service.id for service in services_at(self.maps, frontend)]

    def service(self, number: int) -> str:
        return one_line(service_name(self.maps["service_names"].get(number), number))

    def name(self, backend: int) -> BackendName:
        found = self.maps["backend_names"].get(backend) or BackendName("", "")
        return BackendName(*map(one_line, found))

    def backend(self, number: int) -> Backend | None:
        slot = self.maps["backend_slots"].get(number)
        return self.slot(slot) if slot is not None else None

    def slot(self, slot: int) -> Backend | None:
        if slot >= self.maps["slots"].spec.entries:
            return None
        found: Backend = self.maps["slots"].get(slot)
        return found

    def endpoint(self, backend: Backend | None) -> str:
        """Return the ADDRESS:PORT and the pod of a backend."""
        if backend is None:
            return "a removed endpoint"
        pod = self.name(backend.id).target
        return host_port(backend.address, backend.port) + (f" ({pod})" if pod else "")

    def endpoints_of(self, pod: str) -> Iterator[tuple[Address, str]]:
        """Yield the address and node of the backends of pods with this name."""
        for number, name in self.maps["backend_names"].items():
            backend = self.backend(number) if name.target == pod else None
            if backend and backend.id == number:
                yield backend.address, name.node

    def shares(self, service: ServiceEntry, candidates: Range, only: int | None) -> Iterator[Share]:
        """Yield a Share for each slot of the service.

        Only slots in ``candidates`` can get the connection; if ``only`` is set, that backend gets
        it.
        """
        chances = self._chances(service, candidates)
        for slot in range(service.cluster.base, service.cluster.base + service.slots):
            backend = self.slot(slot)
            if backend is None or backend.service != service.id:
                continue
            is_candidate = candidates.base <= slot < candidates.base + candidates.size
            chance = float(backend.id == only) if only else chances.get(slot, 0.0)
            name, where = self.name(backend.id), host_port(backend.address, backend.port)
            note = "other node" if "cluster" in backend.flags else "draining"
            note = "" if is_candidate else note
            yield Share(chance, where, name.target, name.node, name.zone, slot, note)

    def _chances(self, service: ServiceEntry, candidates: Range) -> dict[int, float]:
        """Return the probability of each slot, drawn from the slots or from the service's table."""
        if not service.table.size:
            slots = range(candidates.base, candidates.base + candidates.size)
            return dict.fromkeys(slots, 1 / max(1, candidates.size))
        found: defaultdict[int, float] = defaultdict(float)
        is_local = candidates == service.local != service.cluster
        first = service.table.base + (service.table.size if is_local else 0)
        for at in range(first, first + service.table.size):
            place: Choice = self.maps["choices"].get(at)
            part = place.below / 2**32 / service.table.size
            found[place.slot] += part
            found[place.other] += 1 / service.table.size - part
        return found


NODE_CLIENT, POD_CLIENT, OUTSIDE_CLIENT = "node", "pod", "outside"
# Addresses for documentation (RFC 5737, 3849, 9637): unused, and reached by the default route.
_NOBODY = {4: ("198.51.100.77", "203.0.113.77", "192.0.2.77"), 6: ("2001:db8:ffff::77", "3fff::77")}
UNKNOWN_COOKIE = 2**64 - 1  # for a pod, if the kernel has no option for it (before 5.14)
FORMS = "a pod (NAME or NAMESPACE/NAME), an address, node or outside"


class Client(Struct, frozen=True):
    """The client; ``address`` is None for a pod without an address of the question's family.

    ``hooked``: whether socket hooks see its sockets; ``notes``: unknown facts.
    """

    kind: str
    name: str
    address: Address | None
    netns: int = 0
    hooked: bool = False
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.kind == NODE_CLIENT:
            return "this node"
        where = f" ({self.address})" if self.address and self.name != str(self.address) else ""
        return f"{'pod ' if self.kind == POD_CLIENT else ''}{self.name}{where}"


def find_client(text: str, version: int, facts: MapFacts) -> Client:
    """Find the client. Raises NodeError that says what to do."""
    if text == NODE_CLIENT:
        return _node(version, facts)
    if text == OUTSIDE_CLIENT:
        return _outside(version)
    try:
        address = parse_address(text)
    except ValueError:
        return _named(text, version, facts)
    return _addressed(address, version, facts)


def _node(version: int, facts: MapFacts) -> Client:
    own = [address for address in namespaces.own_addresses() if address.version == version]
    return Client(
        NODE_CLIENT, NODE_CLIENT, own[0] if own else None, facts.host_netns, facts.socket_hooks
    )


def _outside(version: int) -> Client:
    devices = set(routes.default_devices(version))
    if not devices:
        raise NodeError(
            f"no default route of IPv{version} leads outside: name the client's address instead"
        )
    for candidate in map(ip_address, _NOBODY[version]):
        if routes.route_to(candidate).ifindex in devices:
            return Client(OUTSIDE_CLIENT, "a client outside", candidate)
    raise NodeError("no address for documentation is routed outside: name the client's instead")


def _addressed(address: Address, version: int, facts: MapFacts) -> Client:
    if address.version != version:
        raise NodeError(f"{address} is not an IPv{version} address: client and frontend differ")
    if address in namespaces.own_addresses():
        return _node(version, facts)
    path = namespaces.by_address(address)
    if path:
        return _in_namespace(path, str(address), version, facts, address)
    return Client(OUTSIDE_CLIENT, str(address), address)


def _named(text: str, version: int, facts: MapFacts) -> Client:
    pod = text.rpartition("/")[2]
    found = namespaces.by_host_name(pod)
    if len(found) > 1:
        raise NodeError(
            f"{len(found)} network namespaces belong to pods called {one_line(pod)}:"
            " name the pod's address"
        )
    if found:
        return _in_namespace(found[0], one_line(text), version, facts)
    return _endpoint(text, pod, version, facts)


def _endpoint(text: str, pod: str, version: int, facts: MapFacts) -> Client:
    """Find a pod by the names of backends in the maps."""
    for address, node in facts.endpoints_of(pod):
        path = namespaces.by_address(address)
        if path:
            found = address if address.version == version else None
            return _in_namespace(path, one_line(text), version, facts, found)
        raise NodeError(
            f"pod {one_line(pod)} is not on this node but on"
            f" {one_line(node) or 'another'}: run `ebpflb explain` there"
        )
    if not namespaces.sees_the_machine():
        raise NodeError(
            f"pod {one_line(text)} is no endpoint on this node, and a container sees no other pods'"
            " names: name the pod's address, as `kubectl get pod -o wide` shows it"
        )
    raise NodeError(
        f"no pod {one_line(text)} has a process or an endpoint on this node: name {FORMS}"
    )


def _in_namespace(
    path: Path, name: str, version: int, facts: MapFacts, address: Address | None = None
) -> Client:
    if namespaces.identity(path) == namespaces.identity(namespaces.OWN_NETNS):
        return _node(version, facts)
    cookie, notes = namespaces.cookie(path), list[str]()
    if cookie is None:
        notes.append("this kernel cannot show a pod's session affinity (needs 5.14)")
    if address is None:
        known = [it for it in namespaces.addresses(path) if it.version == version]
        address = known[0] if known else None
    hooked, note = _is_hooked(path, facts)
    notes += [note] if note else []
    return Client(POD_CLIENT, name, address, cookie or UNKNOWN_COOKIE, hooked, tuple(notes))


def _is_hooked(path: Path, facts: MapFacts) -> tuple[bool, str]:
    if not facts.socket_hooks:
        return False, ""
    first = next(namespaces.members(path), None)
    if first is None:
        return (
            True,
            "no process runs in this network namespace; assuming one would be in the "
            "cgroup that ebpflb serves",
        )
    return namespaces.in_cgroup(first, facts.cgroup), ""
