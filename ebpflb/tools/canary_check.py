# SPDX-License-Identifier: Apache-2.0
"""Connections of doctor's own, through each path, to an endpoint of its own.

sockets    from a socket of the node to a cluster IP: translated at the call
packets    from another network namespace to the cluster IP: translated at its device
NodePorts  from there to a NodePort at an address of the node
uplinks    frames that the agent puts into the ingress of the node's own devices

The agent puts service ports that lead to the endpoint into the maps for some seconds
(agent/canary_sync.py). From each place the endpoint itself is asked first, without a Service: if
that has no answer, the node does not forward, and nothing is known of services.
"""

import errno
import math
import os
import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from ebpflb.errors import EbpflbError, NodeError, in_words
from ebpflb.files import DOCS
from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.attach.cgroup_links import HeldLinks, cgroup_root
from ebpflb.kernel.attach.device_programs import attacher
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.node import namespaces
from ebpflb.kernel.node.scratch_namespace import ScratchNamespace, unused_address
from ebpflb.kernel.node.sysctls import supported_families
from ebpflb.model.addresses import Address, Family, family, host_port
from ebpflb.model.devices import Device
from ebpflb.model.services import Protocol
from ebpflb.options import Paths
from ebpflb.plan.canary import CANARY_PROTOCOLS, CanaryLease
from ebpflb.tools import ask
from ebpflb.tools.ask import NoAnswer
from ebpflb.tools.node_checks import CheckResult
from ebpflb.workers import DescriptorWorker

# One canary connection: a question to the endpoint, and whether its answer is that of doctor's.
#
# The endpoint answers with a word that was drawn for it, so nothing else can be taken for it. The
# answer has to come from the address that was asked: else it was translated one way only.

ENDPOINT_PORT = 8080  # of the endpoint, in a namespace where nothing else listens
_SECONDS = 3.0  # until a connection is given up
_TIMES = 3  # that a datagram is sent in that time
_OWN = Path("/proc/self")
_LONGEST = 64  # bytes of question and answer


class CanaryEndpoint(DescriptorWorker):
    """Answers on ENDPOINT_PORT with its word, in the namespace in which ``call`` calls."""

    def __init__(self, call: Callable[[Callable[[], list[socket.socket]]], list[socket.socket]]):
        super().__init__("canary")
        self.word = os.urandom(8).hex().encode()
        self._sockets = call(_listening)
        self.start()

    def close(self) -> None:
        self.stop()
        for each in self._sockets:
            each.close()

    def run(self) -> None:
        while not self.stopped.is_set():
            for asked in self.wait(self._sockets, math.inf):
                with suppress(OSError):
                    self._answer(asked)

    def _answer(self, asked: socket.socket) -> None:
        if asked.type is socket.SOCK_DGRAM:
            _, client = asked.recvfrom(_LONGEST)
            asked.sendto(self.word, client)
            return
        connection, _ = asked.accept()
        with connection:
            connection.settimeout(_SECONDS)
            if connection.recv(_LONGEST):
                connection.sendall(self.word)


def _listening() -> list[socket.socket]:
    found = []
    for socket_family, anywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            with suppress(OSError):  # a kernel without IPv6
                made = socket.socket(socket_family, kind)
                if socket_family == socket.AF_INET6:
                    made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                made.bind((anywhere, ENDPOINT_PORT))
                if kind == socket.SOCK_STREAM:
                    made.listen()
                made.setblocking(False)
                found.append(made)
    return found


def fault(protocol: Protocol, address: Address, port: int, word: bytes) -> str:
    """What is wrong with a connection of this thread's namespace; "" if nothing is."""
    socket_family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    kind = socket.SOCK_STREAM if protocol is Protocol.TCP else socket.SOCK_DGRAM
    try:
        with socket.socket(socket_family, kind) as client:
            exchange = _stream if protocol is Protocol.TCP else _datagram
            said, by = exchange(client, (str(address), port))
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return in_words(error).lower()
    if said != word:
        return "something else answers"
    if by[:2] != (str(address), port):
        return f"the answer comes from {by[0]}, port {by[1]}"
    return ""


def _stream(client: socket.socket, to: tuple[str, int]) -> tuple[bytes, tuple[str, int]]:
    client.settimeout(_SECONDS)
    client.connect(to)
    client.sendall(b"?")
    said = b""
    while part := client.recv(_LONGEST):
        said += part
    return said, client.getpeername()


def _datagram(client: socket.socket, to: tuple[str, int]) -> tuple[bytes, tuple[str, int]]:
    client.settimeout(_SECONDS / _TIMES)
    for left in reversed(range(_TIMES)):
        client.sendto(b"?", to)
        with suppress(*([TimeoutError] if left else [])):
            return client.recvfrom(_LONGEST)
    raise TimeoutError


@contextmanager
def inside(cgroup: Path) -> Iterator[None]:
    """This process is in that cgroup, as /proc/PID/cgroup has it, or below it. Raises NodeError."""
    if namespaces.in_cgroup(_OWN, cgroup):
        yield
        return
    root = cgroup_root()
    lines = (_OWN / "cgroup").read_text().splitlines()
    before = next((it[len("0::/") :] for it in lines if it.startswith("0::/")), "")
    try:
        _enter(root / cgroup.relative_to("/"))
    except OSError as error:
        text = f"doctor is outside {cgroup}, whose sockets are served, and cannot move into it"
        raise NodeError(f"{text}: {in_words(error)}") from error
    try:
        yield
    finally:
        with suppress(OSError):
            _enter(root / before)


def _enter(cgroup: Path) -> None:
    (cgroup / "cgroup.procs").write_text("0")


SERVED_SECONDS = 10.0  # until the agent has to serve a new device
_NODEPORTS = range(30000, 32768)
_DRAWS = 100
_NOT_FORWARDED = (
    "the node forwards nothing between two namespaces attached to it, even without a Service: "
    "check its FORWARD chain (iptables -S FORWARD, nft list ruleset) and forwarding sysctls. "
    "Rules that accept only the pods' addresses are fine"
)
_NOT_TRANSLATED = (
    "the endpoint itself answers, so the Service's translation fails: see the lines `audit` and "
    f"`status` above, `ebpflb monitor` and {DOCS}/runbook.md"
)

_LOST = f"look for tc filters, tc programs and rules behind ebpflb: {DOCS}/runbook.md, choices lost"

Fault = Callable[[Protocol, Address, int], str]


class Target(NamedTuple):
    """A frontend to be asked for, and the endpoint that it leads to."""

    address: Address
    port: int
    endpoint: Address

    @property
    def text(self) -> str:
        return host_port(self.address, self.port)


def canary_results(state: StateDir, paths: Paths, maps: Mapping[str, Map]) -> Iterator[CheckResult]:
    """In the network namespace of this thread, which has to be the agent's."""
    with ExitStack() as stack:
        try:
            canary = _begun(state, paths, maps, stack)
            yield from canary.results()
        except (NoAnswer, EbpflbError) as why:
            remedy = "no connection was tried; --no-canary skips this check"
            yield CheckResult("canary", False, False, f"not tried: {why}", remedy)
    yield from uplink_results(paths)


def uplink_results(paths: Paths) -> Iterator[CheckResult]:
    """What becomes of frames that the agent puts into the ingress of each of the node's devices."""
    what = "canary: uplinks"
    try:
        report = ask.uplinks(paths)
    except NoAnswer as why:
        yield CheckResult(what, False, False, f"not tried: {why}", "")
        return
    bad = {name: text for name, text in report.uplinks.items() if text}
    for name, text in bad.items():
        yield CheckResult(what, False, name in report.lost, f"{name}: {text}", _LOST)
    if not bad:
        text = ", ".join(report.uplinks) or "not needed: the flow tables translate at the device"
        yield CheckResult(what, True, True, text, "")


def _begun(state: StateDir, paths: Paths, maps: Mapping[str, Map], stack: ExitStack) -> "_Canary":
    """Raises NoAnswer or NodeError; the stack removes what was made."""
    settings = maps["settings"].get(0)
    taken = {backend.address for _, backend in maps["slots"].items() if backend.service}
    used = {frontend.port for frontend, _ in maps["services"].items()}
    of = sorted(supported_families())
    client, endpoint = (
        stack.enter_context(closing(ScratchNamespace([unused_address(it, taken) for it in of])))
        for _ in range(2)
    )
    server = CanaryEndpoint(endpoint.call)
    stack.callback(server.close)
    node = {Family.IPV4: settings.node_v4, Family.IPV6: settings.node_v6}
    addresses = [(client.addresses[it], endpoint.addresses[it], node[it]) for it in of]
    nodeport = _free_nodeport(used)
    lease = ask.canary(paths, addresses, ENDPOINT_PORT, nodeport)
    stack.callback(_end, paths, lease)
    return _Canary(state, paths, maps, client, endpoint, server, lease, nodeport)


def _end(paths: Paths, lease: CanaryLease) -> None:
    with suppress(NoAnswer, NodeError):
        ask.end_canary(paths, lease)


def _free_nodeport(used: set[int]) -> int:
    """One that no Service has, and that no socket of the node is bound to. Raises NodeError."""
    for port in random.sample(_NODEPORTS, _DRAWS):
        if port not in used and _can_bind(port):
            return port
    raise NodeError(f"no port of {_NODEPORTS[0]}-{_NODEPORTS[-1]} is free")


def _can_bind(port: int) -> bool:
    for socket_family, anywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            try:
                with socket.socket(socket_family, kind) as trying:
                    trying.bind((anywhere, port))
            except OSError as error:
                if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):  # IPv6
                    return False
    return True


class _Canary:
    """What is there while connections are tried."""

    def __init__(
        self,
        state: StateDir,
        paths: Paths,
        maps: Mapping[str, Map],
        client: ScratchNamespace,
        endpoint: ScratchNamespace,
        server: CanaryEndpoint,
        lease: CanaryLease,
        nodeport: int,
    ) -> None:
        self._state, self._paths, self._maps = state, paths, maps
        self._client, self._endpoint, self._server = client, endpoint, server
        self._lease, self._nodeport = lease, nodeport
        self._direct: dict[tuple[Any, ...], str] = {}

    def results(self) -> Iterator[CheckResult]:
        """Raises NoAnswer where the agent has withdrawn the canary."""
        yield from self._missing_families()
        cluster_ips = [
            Target(it, ENDPOINT_PORT, self._endpoint.addresses[family(it)])
            for it in map(ip_address, self._lease.cluster_ips)
        ]
        yield from self._from_node(cluster_ips)
        not_served = self._not_served()
        if not_served:
            yield not_served
            return
        yield from self._tried("packets", self._from_client, cluster_ips)
        yield from self._tried("NodePorts", self._from_client, list(self._nodeports(cluster_ips)))

    def _missing_families(self) -> Iterator[CheckResult]:
        """Of whose cluster IPs the maps have some."""
        found = {family(ip_address(it)) for it in self._lease.cluster_ips}
        used = {family(address) for address, _ in self._maps["cluster_ips"].items()}
        for each in sorted(used - found):
            text = "no unused one is known: there is neither a ServiceCIDR nor enough cluster IPs"
            yield CheckResult(f"canary: {each}", False, False, f"not tried: {text}", "")

    def _from_node(self, targets: list[Target]) -> Iterator[CheckResult]:
        try:
            with inside(cgroup_links.cgroup_of(self._state)):
                yield from self._tried("sockets", self._fault, targets)
        except NodeError as error:
            yield CheckResult("canary: sockets", False, False, f"not tried: {error}", "")

    def _not_served(self) -> CheckResult | None:
        """A new device gets programs as soon as the agent sees it."""
        until = time.monotonic() + SERVED_SECONDS
        while lacking := [it for it in (self._client, self._endpoint) if not self._is_served(it)]:
            if time.monotonic() > until or self._lease.devices:
                break
            ask.renew_canary(self._paths, self._lease)
            time.sleep(0.02)
        if not lacking:
            return None
        what = "canary: packets"
        if self._lease.devices:
            text = f"not tried: --devices={self._lease.devices} leaves out doctor's own device"
            return CheckResult(what, False, False, text, "")
        text = f"{lacking[0].name}, which doctor created, got no programs"
        return CheckResult(what, False, True, text, "see the agent's log, and `ebpflb status`")

    def _is_served(self, namespace: ScratchNamespace) -> bool:
        device = Device(namespace.index, namespace.name, False, True, 0, (), ())
        return not any(attacher(self._state).faults(device, {}, HeldLinks(), {}))

    def _nodeports(self, cluster_ips: list[Target]) -> Iterator[Target]:
        """At one address of each family at which NodePorts are served."""
        serving = [address for address, _ in self._maps["node_addresses"].items()]
        usable = [it for it in serving if not (it.is_loopback or it.is_link_local)]
        for each in cluster_ips:
            at = next((it for it in usable if it.version == each.address.version), None)
            if at:
                yield Target(at, self._nodeport, each.endpoint)

    def _fault(self, protocol: Protocol, address: Address, port: int) -> str:
        return fault(protocol, address, port, self._server.word)

    def _from_client(self, protocol: Protocol, address: Address, port: int) -> str:
        return self._client.call(partial(self._fault, protocol, address, port))

    def _tried(self, path: str, fault: Fault, targets: list[Target]) -> Iterator[CheckResult]:
        """Of each target by each protocol, in as few lines as say it."""
        what, bad, untried = f"canary: {path}", list[str](), list[str]()
        for target in targets:
            for protocol in CANARY_PROTOCOLS:
                ask.renew_canary(self._paths, self._lease)
                if why := self._without_service(fault, protocol, target):
                    untried.append(f"{protocol.name} to {target.endpoint} ({why})")
                elif why := fault(protocol, target.address, target.port):
                    bad.append(f"{protocol.name} to {target.text}: {why}")
        if bad:
            yield CheckResult(what, False, True, "; ".join(bad), _NOT_TRANSLATED)
        if untried:
            text = f"not tried: {'; '.join(untried)}"
            yield CheckResult(what, False, False, text, _NOT_FORWARDED)
        if targets and not bad and not untried:
            yield CheckResult(what, True, True, ", ".join(it.text for it in targets), "")
        if not targets:
            text = "not tried: no address of this node serves them (--nodeport-addresses)"
            yield CheckResult(what, False, False, text, "")

    def _without_service(self, fault: Fault, protocol: Protocol, target: Target) -> str:
        key = fault, protocol, target.endpoint
        if key not in self._direct:
            self._direct[key] = fault(protocol, target.endpoint, ENDPOINT_PORT)
        return self._direct[key]
