# SPDX-License-Identifier: Apache-2.0
"""Connections of doctor's own, through each path, to an endpoint of its own.

sockets    from a socket of the node to a virtual address: translated at the call
packets    from another network namespace to that address: translated at its device
NodePorts  from there to a NodePort at an address of the node
uplinks    frames that the agent puts into the ingress of the node's own devices

The agent puts service ports that lead to the endpoint into the maps for some seconds
(agent/canary_sync.py). From each place the endpoint itself is asked first, without a Service: if it
does not answer, the node does not forward, and the Service's translation cannot be judged.
"""

import random
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from functools import cache, partial
from itertools import product
from pathlib import Path

from ebpflb.errors import EbpflbError, NodeError, in_words
from ebpflb.files import DOCS
from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.attach.device_programs import attacher
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.netfilter.probe import Arrival
from ebpflb.kernel.node import namespaces
from ebpflb.kernel.node.scratch_namespace import ScratchNamespace
from ebpflb.kernel.node.sysctls import supported_families
from ebpflb.model.addresses import Address, Family, family, host_port
from ebpflb.model.services import Protocol
from ebpflb.options import Paths
from ebpflb.plan import canary
from ebpflb.tools import ask
from ebpflb.tools.ask import NoAnswer
from ebpflb.tools.node_checks import OK, WARNING, WRONG, CheckResult

# One canary connection; both ends are in this process. The endpoint must get the request, and the
# answer must come from the address that was asked: else only one direction was translated.

_OWN = Path("/proc/self")
_SocketAddress = tuple[str, int]
_SECONDS = 3.0  # until a connection is given up
_TIMES = 3  # that a datagram is sent in that time
_SOCKET_FAMILIES = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}
_TYPES = {Protocol.TCP: socket.SOCK_STREAM, Protocol.UDP: socket.SOCK_DGRAM}


def listening(of: Family, protocol: Protocol) -> socket.socket:
    """Return the endpoint's listening socket, in this thread's network namespace."""
    listener = socket.socket(_SOCKET_FAMILIES[of], _TYPES[protocol])
    listener.settimeout(_SECONDS / _TIMES)
    listener.bind((str(canary.ENDPOINTS[of]), canary.ENDPOINT_PORT))
    if protocol is Protocol.TCP:
        listener.listen()
    return listener


def fault(listener: socket.socket, address: Address, port: int) -> str:
    """Return what is wrong with a connection from this thread's namespace; "" if nothing is."""
    exchange = _stream if listener.type is socket.SOCK_STREAM else _datagram
    try:
        with socket.socket(listener.family, listener.type) as client:
            answered = exchange(client, listener, (str(address), port))
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return in_words(error).lower()
    if answered[:2] != (str(address), port):
        return f"the answer comes from {answered[0]}, port {answered[1]}"
    return ""


def _stream(client: socket.socket, endpoint: socket.socket, to: _SocketAddress) -> _SocketAddress:
    client.settimeout(_SECONDS)
    client.connect(to)
    try:
        accepted, _ = endpoint.accept()
    except TimeoutError:
        raise ConnectionError("something else answers") from None
    with accepted:
        accepted.sendall(b"!")
    client.recv(1)
    peer: _SocketAddress = client.getpeername()
    return peer


def _datagram(client: socket.socket, endpoint: socket.socket, to: _SocketAddress) -> _SocketAddress:
    client.settimeout(_SECONDS / _TIMES)
    for _ in range(_TIMES):
        client.sendto(b"?", to)
        with suppress(TimeoutError):
            endpoint.sendto(b"!", endpoint.recvfrom(1)[1])
            answer: tuple[bytes, _SocketAddress] = client.recvfrom(1)
            return answer[1]
    raise TimeoutError


SERVED_SECONDS = 10.0  # until the agent has to serve a new device
_UPLINK_SECONDS = 30.0  # another probe may run, and frames that are lost are sent three times
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


def canary_results(state: StateDir, paths: Paths, maps: Mapping[str, Map]) -> Iterator[CheckResult]:
    """Yield the result of each path. This thread must be in the agent's network namespace."""
    with ExitStack() as stack:
        try:
            yield from _Canary(state, paths, maps, stack).results()
        except (NoAnswer, EbpflbError) as why:
            yield _not_tried("canary", why, "no connection was tried; --no-canary skips this check")
    yield from uplink_results(paths)


def _not_tried(what: str, why: object, remedy: str = "") -> CheckResult:
    return CheckResult(what, WARNING, f"not tried: {why}", remedy)


def uplink_results(paths: Paths) -> Iterator[CheckResult]:
    """Yield what happens to frames that the agent puts into the ingress of the node's devices."""
    what = "canary: uplinks"
    try:
        found = ask.get(paths, "/v1/canary/uplinks", dict[str, Arrival], _UPLINK_SECONDS)
    except NoAnswer as why:
        yield _not_tried(what, why)
        return
    for name, arrival in found.items():
        if arrival:
            result = WRONG if arrival.is_loss else WARNING
            yield CheckResult(what, result, f"{name}: {arrival}", _LOST)
    if not any(found.values()):
        text = ", ".join(found) or "not needed: the flow tables translate at the device"
        yield CheckResult(what, OK, text)


def _free_nodeport(used: Collection[int], families: Collection[Family]) -> int:
    """Return a port that neither a Service nor a socket of the node uses. Raises NodeError."""
    for port in random.sample(_NODEPORTS, _DRAWS):
        if port not in used and _can_bind(port, families):
            return port
    raise NodeError(f"no port of {_NODEPORTS[0]}-{_NODEPORTS[-1]} is free")


def _can_bind(port: int, families: Collection[Family]) -> bool:
    for of, kind in product(families, _TYPES.values()):
        with socket.socket(_SOCKET_FAMILIES[of], kind) as trying:
            try:
                trying.bind(("", port))
            except OSError:
                return False
    return True


def _direct(fault: Fault, protocol: Protocol, of: Family) -> str:
    """What is wrong with a connection to the endpoint itself, without a Service."""
    return fault(protocol, canary.ENDPOINTS[of], canary.ENDPOINT_PORT)


class _Canary:
    """Two network namespaces, and the canary in the agent's maps, while connections are tried."""

    def __init__(
        self, state: StateDir, paths: Paths, maps: Mapping[str, Map], stack: ExitStack
    ) -> None:
        """Create the namespaces, which ``stack`` removes. Raises NoAnswer or NodeError."""
        self._state, self._paths, self._maps = state, paths, maps
        used = {family(address) for address, _ in maps["cluster_ips"].items()}
        self._families = sorted(used & supported_families())
        if not self._families:
            raise NodeError("there are no Services yet")
        self._client, self._endpoint = (
            stack.enter_context(closing(ScratchNamespace([each[of] for of in self._families])))
            for each in (canary.CLIENTS, canary.ENDPOINTS)
        )
        self._listeners = {
            key: stack.enter_context(self._endpoint.call(partial(listening, *key)))
            for key in product(self._families, canary.CANARY_PROTOCOLS)
        }
        used_ports = {frontend.port for frontend, _ in maps["services"].items()}
        self._nodeport = _free_nodeport(used_ports, supported_families())
        self._lease = self._hold()
        stack.callback(self._end)
        self._direct = cache(_direct)

    def results(self) -> Iterator[CheckResult]:
        """Yield the result of each path. Raises NoAnswer if the agent has withdrawn the canary."""
        targets = [(canary.CANARY_IPS[of], canary.CANARY_PORT) for of in self._families]
        yield from self._from_node(targets)
        if not_served := self._not_served():
            yield not_served
            return
        yield from self._tried("packets", self._from_client, targets)
        yield from self._tried("NodePorts", self._from_client, list(self._nodeports()))

    def _hold(self) -> canary.CanaryLease:
        """Have the canary in the maps for some seconds from now on. Raises NoAnswer."""
        return ask.get(
            self._paths, f"/v1/canary/hold?nodeport={self._nodeport}", canary.CanaryLease
        )

    def _renew(self) -> None:
        if self._hold() != self._lease:
            raise NoAnswer("the agent has withdrawn the canary meanwhile: try again")

    def _end(self) -> None:
        """Withdraw the canary now. If that fails, the agent soon withdraws it by itself."""
        with suppress(NoAnswer):
            ask.get(self._paths, "/v1/canary/end", canary.CanaryLease)

    def _from_node(self, targets: list[tuple[Address, int]]) -> Iterator[CheckResult]:
        cgroup = cgroup_links.cgroup_of(self._state)
        if namespaces.in_cgroup(_OWN, cgroup):
            yield from self._tried("sockets", self._fault, targets)
        else:
            why = f"doctor is outside of the cgroup {cgroup}, whose sockets are served"
            yield _not_tried("canary: sockets", why, "run doctor in this cgroup")

    def _not_served(self) -> CheckResult | None:
        """Wait until both devices have programs; return an error if the agent attaches none."""
        until = time.monotonic() + SERVED_SECONDS
        names = {it.index: it.name for it in (self._client, self._endpoint)}
        while lacking := names.keys() - attacher(self._state).attached():
            if time.monotonic() > until or self._lease.devices:
                break
            self._renew()
            time.sleep(0.02)
        if not lacking:
            return None
        what, devices = "canary: packets", self._lease.devices
        if devices:
            return _not_tried(what, f"--devices={devices} leaves out doctor's own device")
        text = f"{names[min(lacking)]}, which doctor created, got no programs"
        return CheckResult(what, WRONG, text, "see the agent's log, and `ebpflb status`")

    def _nodeports(self) -> Iterator[tuple[Address, int]]:
        """Yield an address at which NodePorts are served, and the NodePort, for each family."""
        serving = [address for address, _ in self._maps["node_addresses"].items()]
        usable = [it for it in serving if not (it.is_loopback or it.is_link_local)]
        for of in self._families:
            at = next((it for it in usable if family(it) is of), None)
            if at:
                yield at, self._nodeport

    def _fault(self, protocol: Protocol, address: Address, port: int) -> str:
        return fault(self._listeners[family(address), protocol], address, port)

    def _from_client(self, protocol: Protocol, address: Address, port: int) -> str:
        return self._client.call(partial(self._fault, protocol, address, port))

    def _tried(
        self, path: str, fault: Fault, targets: list[tuple[Address, int]]
    ) -> Iterator[CheckResult]:
        """Try each target with each protocol; yield one result if all results are equal."""
        what, bad, untried = f"canary: {path}", list[str](), list[str]()
        for (address, port), protocol in product(targets, canary.CANARY_PROTOCOLS):
            self._renew()
            if why := self._direct(fault, protocol, family(address)):
                untried.append(f"{protocol.name} to {canary.ENDPOINTS[family(address)]} ({why})")
            elif why := fault(protocol, address, port):
                bad.append(f"{protocol.name} to {host_port(address, port)}: {why}")
        if bad:
            yield CheckResult(what, WRONG, "; ".join(bad), _NOT_TRANSLATED)
        if untried:
            yield _not_tried(what, "; ".join(untried), _NOT_FORWARDED)
        if targets and not bad and not untried:
            yield CheckResult(what, OK, ", ".join(host_port(*target) for target in targets))
        if not targets:
            yield _not_tried(what, "no address of this node serves them (--nodeport-addresses)")
