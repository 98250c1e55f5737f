# SPDX-License-Identifier: Apache-2.0
"""The events of the monitoring programs, which a running agent loads while someone watches."""

import errno
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import NamedTuple

import msgspec

from ebpflb import unix_socket
from ebpflb.entries.services import BackendName, Frontend, protocol_name, service_name, service_of
from ebpflb.errors import NodeError, in_words
from ebpflb.kernel import monitoring
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.layout import VERDICTS
from ebpflb.kernel.maps.records import MonitorEvent
from ebpflb.kernel.node import namespaces
from ebpflb.model.addresses import Address, host_port
from ebpflb.options import Paths
from ebpflb.tools.snapshot import Snapshot, services_at
from ebpflb.workers import readable

# Names for events: services and backends by their ids, pods by namespace and address.
#
# Names of ids are read for each event, because ids are given away again. Slow searches have a
# pause.

SEARCH_SECONDS = 2.0  # between two searches through all namespaces
PODS_SECONDS = 30.0  # between two searches through all endpoints
NODE = "node"


class NetnsOwner(NamedTuple):
    """The pod that owns a network namespace, "" if unknown, and the addresses in the namespace."""

    pod: str
    addresses: tuple[Address, ...]


_UNKNOWN = NetnsOwner("", ())


class EventNames:
    """Names for the ids in events of a node. This process must be in its network namespace."""

    def __init__(self, maps: Mapping[str, Map]) -> None:
        self._maps = maps
        self._host = maps["settings"].get(0).host_netns
        self._owners: dict[int, NetnsOwner] = {
            self._host: NetnsOwner(NODE, namespaces.own_addresses())
        }
        self._paths: dict[int, Path] = {}  # of namespaces, by their cookies, at the last search
        self._pods: dict[Address, str] = {}
        self._next_search = self._next_pods = 0.0

    def service(self, number: int, frontend: Frontend | None) -> str:
        """Return the service port with this id, or the frontend's if the id is 0; "" if unknown."""
        if frontend and not number:
            number = next((it.id for it in services_at(self._maps, frontend)), 0)
        return service_name(self._maps["service_names"].get(number), number)

    def target(self, backend: int) -> str:
        """Return the pod of this backend."""
        named: BackendName | None = self._maps["backend_names"].get(backend)
        return named.target if named else ""

    def place(self, netns: int, process: int) -> NetnsOwner:
        """Return the owner of a socket's network namespace, by its cookie and the socket's
        process.
        """
        if netns not in self._owners:
            found = self._of_process(netns, process) or self._search(netns)
            if not found:
                return _UNKNOWN
            self._owners[netns] = found
        return self._owners[netns]

    def pods(self) -> Iterator[NetnsOwner]:
        """Yield the owners of the node's network namespaces. This thread must be in the node's
        own.
        """
        names = {place: name for place, _, name in namespaces.host_names() if name}
        for path in namespaces.linked():
            with suppress(NodeError):
                yield self._owner_at(path, names.get(namespaces.identity(path), ""))

    def pod_at(self, address: Address) -> str:
        """Return the pod with this address if it is an endpoint; "node" for the node's own
        addresses.
        """
        if address in self._owners[self._host].addresses:
            return NODE
        if address not in self._pods and time.monotonic() > self._next_pods:
            self._next_pods = time.monotonic() + PODS_SECONDS
            snapshot = Snapshot(self._maps)
            self._pods = {
                backend.address: snapshot.backend_names[number].target
                for number, backend in snapshot.backends.items()
                if number in snapshot.backend_names
            }
        return self._pods.get(address, "")

    def _of_process(self, netns: int, process: int) -> NetnsOwner | None:
        """Find the owner through its process; None if this has ended or its PID was reused."""
        folder = Path("/proc", str(process))
        with suppress(NodeError):
            if process and namespaces.cookie(folder / "ns/net") in (None, netns):
                return self._owner_at(folder / "ns/net", namespaces.host_name(folder))
        return None

    def _search(self, netns: int) -> NetnsOwner | None:
        if netns not in self._paths and time.monotonic() >= self._next_search:
            self._next_search = time.monotonic() + SEARCH_SECONDS
            self._paths = namespaces.by_cookies()
        with suppress(NodeError):
            if path := self._paths.get(netns):
                return self._owner_at(path, "")
        return None

    def _owner_at(self, path: Path, name: str) -> NetnsOwner:
        found = namespaces.addresses(path)
        named = next((pod for it in found if (pod := self.pod_at(it))), "")
        return NetnsOwner(named or name or _given_name(path), found)


def _given_name(path: Path) -> str:
    """Return the name given by ip(8); names given by container runtimes mean nothing to a user."""
    wanted = namespaces.identity(path)
    for folder in namespaces.NAMED if wanted else ():
        for entry in folder.iterdir() if folder.is_dir() else ():
            if namespaces.identity(entry) == wanted and not entry.name.startswith("cni-"):
                return entry.name
    return ""


# Events of the datapath in words, and the filter for them.

_CALLS = {"connect", "sendmsg", "recvmsg", "getpeername", "bind"}


class Told(msgspec.Struct):
    """A decision of the datapath. "" means unknown or not applicable; ``ns`` is the duration in
    nanoseconds.
    """

    time: str  # RFC 3339
    hook: str  # a call of a socket, or ingress or egress of a device
    verdict: str
    protocol: str
    process: str
    pid: int
    pod: str  # the client's
    client: str
    service: str
    frontend: str
    backend: str
    backend_pod: str
    device: str
    ns: int


class EventFilter(NamedTuple):
    """The wanted events. ``service`` is NAMESPACE/NAME, or None for all; ``namespace`` is that of
    the Service, or "" for all.
    """

    service: str | None = None
    client: IPv4Network | IPv6Network | None = None
    namespace: str = ""


class _Ends(NamedTuple):
    """The addresses and ports in an event; None if unknown."""

    client: tuple[Address, int] | None
    frontend: tuple[Address, int] | None
    backend: tuple[Address, int] | None


class Teller:
    """Describes in words the events that pass the filter."""

    def __init__(self, names: EventNames, wanted: EventFilter) -> None:
        self._names, self._wanted = names, wanted
        self._begun = time.time_ns() - time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        self._devices: dict[int, str] = {}

    def tell(self, event: MonitorEvent) -> Told | None:
        hook = monitoring.HOOKS[event.hook]
        ends = _ends_of_call(event) if hook in _CALLS else _ends_of_packet(event)
        frontend = Frontend(*ends.frontend, event.tuple.protocol) if ends.frontend else None
        service = self._names.service(event.service, frontend)
        if self._wanted.service not in (None, service_of(service)):
            return None
        if self._wanted.namespace not in ("", service.partition("/")[0]):
            return None
        pod, addresses = self._client(event, ends)
        if self._wanted.client and not any(it in self._wanted.client for it in addresses):
            return None
        same = [it for it in addresses if it.version == event.tuple.destination.version]
        client = host_port(*ends.client) if ends.client else str(same[0]) if same else ""
        when = datetime.fromtimestamp((self._begun + event.time) / 1e9).astimezone()
        return Told(
            time=when.isoformat(timespec="milliseconds"),
            hook=hook,
            verdict=VERDICTS[event.verdict],
            protocol=protocol_name(event.tuple.protocol),
            process=event.comm,
            pid=event.process,
            pod=pod,
            client=client,
            service=service,
            frontend=host_port(*ends.frontend) if ends.frontend else "",
            backend=host_port(*ends.backend) if ends.backend else "",
            backend_pod=self._names.target(event.backend) if event.backend else "",
            device=self._device(event.ifindex) if event.ifindex else "",
            ns=event.took,
        )

    def _client(self, event: MonitorEvent, ends: _Ends) -> tuple[str, tuple[Address, ...]]:
        """Return the client's pod and the addresses that the client may have."""
        if ends.client:
            return self._names.pod_at(ends.client[0]), (ends.client[0],)
        if event.netns:
            return self._names.place(event.netns, event.process)
        return "", ()

    def _device(self, index: int) -> str:
        """Return the device's name in the node's network namespace, or its number if it is gone."""
        if index not in self._devices:
            try:
                self._devices[index] = socket.if_indextoname(index)
            except OSError:
                return str(index)
        return self._devices[index]


def _ends_of_call(event: MonitorEvent) -> _Ends:
    """Return the addresses and ports of a socket's call. The event's address is a backend's only if
    it has a backend.
    """
    to = event.tuple.destination, event.tuple.destination_port
    return _Ends(None, to, (event.address, event.port) if event.backend else None)


def _ends_of_packet(event: MonitorEvent) -> _Ends:
    """Return the addresses and ports of a packet's flow (bpf/layout/flow.h), or else of the
    packet.
    """
    source = event.tuple.source, event.tuple.source_port
    destination = event.tuple.destination, event.tuple.destination_port
    entry = event.address, event.port
    match monitoring.FLOW_KINDS.get(event.kind):
        case "dnat":
            return _Ends(source, destination, entry)
        case "un_dnat":
            return _Ends(destination, entry, source)
        case "snat" | "snat_pending" | "direct":
            return _Ends(source, None, destination)
        case "un_snat":
            return _Ends(entry, None, source)
        case "un_direct":
            return _Ends(destination, None, source)
        case _:
            return _Ends(source, destination, entry if event.backend else None)


READ_SECONDS = 0.05  # between two looks at the ring buffer
BEGIN_SECONDS = 300.0  # if the programs have to be compiled first
_LONGEST = 1 << 16  # bytes of an answer
_NO_AGENT = (
    "no agent is running: start `ebpflb run`, because the agent loads the monitor's programs"
)


class EventBatch(NamedTuple):
    """Events in order, and how many have been lost since the stream began."""

    events: Iterator[MonitorEvent]
    lost: int


class EventStream:
    """The events of a running agent's programs, until the agent ends."""

    def __init__(self, paths: Paths, verdicts: int) -> None:
        """Wait until the agent has attached the programs. Raises NodeError that says what to do."""
        self._socket = _connect(paths)
        try:
            self._reader = monitoring.EventReader(self._ask(verdicts))
        except BaseException:
            self._socket.close()
            raise

    def _ask(self, verdicts: int) -> list[int]:
        """Return the descriptors of the maps that hold the events."""
        try:
            question = monitoring.MonitorQuestion(monitoring.format_hash(), verdicts)
            self._socket.sendall(msgspec.json.encode(question) + b"\n")
            said, descriptors, *_ = socket.recv_fds(
                self._socket, _LONGEST, len(monitoring.HANDED_OVER), socket.MSG_CMSG_CLOEXEC
            )
            answer = msgspec.json.decode(said, type=monitoring.MonitorAnswer)
        except TimeoutError:
            raise NodeError("the agent does not answer: see its log and `ebpflb status`") from None
        except (OSError, msgspec.MsgspecError):
            raise NodeError("the agent has stopped: see its log and `ebpflb status`") from None
        if answer.error:
            raise NodeError(f"no monitor can be started: {answer.error}")
        return descriptors

    def parts(self) -> Iterator[EventBatch]:
        """Yield new events, until the agent ends."""
        told = 0
        while not readable([self._socket], READ_SECONDS):
            events, lost = self._reader.take(), self._reader.lost()
            if events or lost != told:
                told = lost
                yield EventBatch(iter(events), lost)

    def end(self) -> None:
        """End ``parts``. Any thread may call it, unlike ``close``."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._reader.close()
        self._socket.close()


def _connect(paths: Paths) -> socket.socket:
    try:
        return unix_socket.connect(paths.monitor_socket, BEGIN_SECONDS)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ECONNREFUSED):
            raise NodeError(_NO_AGENT) from None
        raise NodeError(f"{paths.monitor_socket}: {in_words(error)}") from error
