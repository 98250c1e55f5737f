# SPDX-License-Identifier: Apache-2.0
"""What is known of this node: its Node object and ServiceCIDRs (kube-proxy.md 5, 13.1, 17), what
it says in the API, its listeners, and whether its agent runs.
"""

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from ebpflb.model import addresses as parsing
from ebpflb.model import objects
from ebpflb.model.addresses import Address, Family, Network, number, parse_network
from ebpflb.model.events import Key
from ebpflb.model.objects import Node
from ebpflb.model.services import Protocol, ServicePort

# One ServiceCIDR -> the ranges of cluster IPs (kube-proxy.md 1.1, 6.3).


def read_service_cidrs(cidr: objects.ServiceCIDR) -> tuple[Network, ...]:
    """Return the ranges. Raises InvalidObject for an unreadable range."""
    listed = (cidr.spec and cidr.spec.cidrs) or []
    return tuple(
        objects.parsed(f"spec.cidrs[{index}]", parse_network, text)
        for index, text in enumerate(listed)
    )


ZONE_LABEL = "topology.kubernetes.io/zone"
DELETION_TAINT = "ToBeDeletedByClusterAutoscaler"

_USED_TYPES = ("InternalIP", "ExternalIP")  # in order of preference

_Parsed = TypeVar("_Parsed")


def zone(node: objects.Node) -> str:
    """Return the zone; "" means none, which turns zone hints off (kube-proxy.md 3.1)."""
    return (node.metadata.labels or {}).get(ZONE_LABEL, "")


def eligible(node: objects.Node) -> bool:
    """Whether load balancers may send traffic to the node.

    A node that is being deleted, or about to be, gets none. Only the autoscaler's taint counts,
    with any value and effect (kube-proxy.md 13.1).
    """
    taints = (node.spec and node.spec.taints) or []
    to_be_deleted = any(taint.key == DELETION_TAINT for taint in taints)
    return not node.metadata.deletion_timestamp and not to_be_deleted


def addresses(node: objects.Node) -> tuple[Address, ...]:
    """Return the readable addresses: internal before external, in the order of the status."""
    listed = (node.status and node.status.addresses) or []
    return tuple(
        address
        for used in _USED_TYPES
        for entry in listed
        if entry.type == used and (address := _readable(parsing.parse_address, entry.address))
    )


EXCLUDED_LABEL = "node.kubernetes.io/exclude-from-external-load-balancers"


def is_balanced(node: objects.Node) -> bool:
    """Whether the node may answer for load balancer addresses."""
    return eligible(node) and EXCLUDED_LABEL not in (node.metadata.labels or {})


def is_ready(node: objects.Node) -> bool:
    """Whether the Node is Ready; one that does not say so, as in a manifest, is."""
    conditions = (node.status and node.status.conditions) or []
    return all(each.status == "True" for each in conditions)


def primary_addresses(candidates: Iterable[Address]) -> dict[Family, Address]:
    """Return the first address of each family; the first family is the node's primary one."""
    first: dict[Family, Address] = {}
    for address in candidates:
        first.setdefault(parsing.family(address), address)
    return first


def pod_cidrs(node: objects.Node) -> tuple[Network, ...]:
    """Return the ranges of its pods' addresses: the first readable one of each family.

    spec.podCIDR counts only if spec.podCIDRs is empty.
    """
    spec = node.spec or objects.NodeSpec()
    first: dict[Family, Network] = {}
    for text in spec.pod_cidrs or [spec.pod_cidr]:
        if network := _readable(parsing.parse_network, text):
            first.setdefault(parsing.family(network), network)
    return tuple(first.values())


def _readable(parse: Callable[[str], _Parsed], text: str) -> _Parsed | None:
    try:
        return parse(text)
    except ValueError:
        return None


# What a node says of its Services in the API, so that no pods come before Services work.
#
# A condition of the Node, which others may act upon, or a taint that is removed
# (docs/node-readiness.md).


KINDS = (OFF, CONDITION, TAINT) = ("off", "condition", "taint")

CONDITION_TYPE = "ebpflb.io/ServicesReady"
TAINT_KEY = "ebpflb.io/agent-not-ready"

MERGE_PATCH = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"


class Said(NamedTuple):
    """The condition's state. All who may read Nodes see it, so it names nothing of tenants."""

    status: str
    reason: str
    message: str


READY = Said("True", "ServicesInPlace", "all Services are in place on this node")
NOT_READY = Said("False", "ServicesNotInPlace", "`ebpflb status` on the node says why")
STOPPED = Said("Unknown", "AgentStopped", "the agent was stopped; changes are not applied")


class Patch(NamedTuple):
    """A PATCH to the Node, below its path in the API."""

    subresource: str
    content_type: str
    body: bytes


def condition_patch(said: Said, former: Said | None, now: float) -> Patch:
    """Return the patch that makes the Node say this; ``now`` is in seconds since the epoch.

    A strategic merge patch finds the condition by its type and leaves all others alone. Without a
    transition time the Node keeps its own.
    """
    at = f"{datetime.fromtimestamp(now, UTC):%Y-%m-%dT%H:%M:%SZ}"
    condition = {"type": CONDITION_TYPE, **said._asdict(), "lastHeartbeatTime": at}
    if former is None or former.status != said.status:
        condition["lastTransitionTime"] = at
    body = {"status": {"conditions": [condition]}}
    return Patch("/status", MERGE_PATCH, msgspec.json.encode(body))


def taint_patch(node: Node) -> Patch | None:
    """Return the patch that removes our taint, whatever its effect; None if there is none.

    If the Node's taints have changed meanwhile, the patch changes nothing and fails.
    """
    taints = (node.spec and node.spec.taints) or []
    ours = [index for index, taint in enumerate(taints) if taint.key == TAINT_KEY]
    operations: list[dict[str, Any]] = []
    for index in reversed(ours):
        path = f"/spec/taints/{index}"
        operations.append({"op": "test", "path": f"{path}/key", "value": TAINT_KEY})
        operations.append({"op": "remove", "path": path})
    return Patch("", JSON_PATCH, msgspec.json.encode(operations)) if ours else None


# Listeners on this node that serve sockets instead of a Service's endpoints, while they answer.
#
# A Service names the address by its annotation (annotations.py); the port is the Service's own.


STATES = (ANSWERING, SILENT) = ("answering", "silent")
MOST = 64  # listeners that are asked whether they answer: those of the oldest Services


class Listener(NamedTuple):
    """An address, port and protocol."""

    address: Address
    port: int
    protocol: Protocol


def listener(port: ServicePort) -> Listener | None:
    """Return the listener that a service port names."""
    if port.node_local is None:
        return None
    return Listener(port.node_local, port.port, port.name.protocol)


class NodeLocalPorts:
    """The Services that name listeners; ``changed``: since the last call of ``take_wanted``."""

    def __init__(self) -> None:
        self._ports: dict[Key, tuple[ServicePort, ...]] = {}
        self.changed = True

    def name(self, key: Key, ports: Iterable[ServicePort]) -> None:
        """Note the service ports of a Service; it has none if it was deleted."""
        named = tuple(port for port in ports if port.node_local)
        self.changed |= bool(self._ports.pop(key, ()) or named)
        if named:
            self._ports[key] = named

    def naming(self, listeners: frozenset[Listener]) -> set[Key]:
        """Return the Services that name one of these listeners."""
        return {key for key, ports in self._ports.items() if listeners & set(map(listener, ports))}

    def take_wanted(self) -> frozenset[Listener]:
        """Return the listeners that are asked: at most MOST, those of the oldest Services."""
        self.changed = False
        ports = sorted(
            (port for ports in self._ports.values() for port in ports),
            key=lambda port: (port.created, port.name),
        )
        found = dict.fromkeys(filter(None, map(listener, ports)))
        return frozenset(list(found)[:MOST])


# Whether the agent's loop runs, and in time.
#
# The agent answers this without waiting for the loop.


STALLED_SECONDS = 30.0  # without a turn of the loop, until the node is not ready
DEAD_SECONDS = 60.0  # without a turn of the loop, until the agent is to be restarted
LATE_SECONDS = 10.0  # that a message waits for the loop, until this is reported


class Pulse(msgspec.Struct, frozen=True):
    """The loop's state.

    ``silent``: seconds since the loop's last turn, 0 while the agent starts. ``waiting``: seconds
    that the oldest message has waited for the loop.
    """

    silent: float = 0.0
    waiting: float = 0.0

    @property
    def stalled(self) -> Iterator[str]:
        """Yield a sentence if the loop does not run."""
        if self.silent >= STALLED_SECONDS:
            yield f"the agent's loop has not run for {self.silent:.0f} s"

    @property
    def late(self) -> Iterator[str]:
        """Yield a sentence if changes wait."""
        if self.waiting >= LATE_SECONDS:
            yield f"changes are applied late: the oldest has waited for {self.waiting:.0f} s"


# Whether established flows bypass the network stack (--fast-forward).


FAST_FORWARDS = (FORWARD_OFF, FORWARD_ON, FORWARD_AUTO) = ("off", "on", "auto")


class EachPacketRules(Struct, frozen=True):
    """The rules of this node that act on each packet of a connection, or why they are unknown.

    Established flows must not bypass them with FORWARD_AUTO. ``changes`` is a new number after each
    change of any rule that they would meet: a new one may drop them. ``invalid``: the first rule
    for segments that conntrack finds invalid, or why it is unknown; "" if there is none.
    """

    lines: tuple[str, ...] = ()
    changes: int = 0
    invalid: str = ""


def why_off(wanted: str, rules: EachPacketRules | None) -> str | None:
    """Return why flows do not bypass the stack; None if they do. ``rules``: None if not known."""
    if wanted == FORWARD_ON:
        return None
    if wanted == FORWARD_OFF:
        return "not wanted"
    if rules is None:
        return "the firewall rules have not been read yet"
    if not rules.lines:
        return None
    more = f"; {len(rules.lines) - 1} more" if len(rules.lines) > 1 else ""
    return rules.lines[0] + more


# Which destinations rules in raw exempt from conntrack, and so from kube-proxy's NAT.
#
# kube-proxy translates by conntrack, so a packet that a rule with NOTRACK matched goes where its
# destination says: to a listener at a cluster IP on this node, as NodeLocal DNSCache has one
# (docs/node-local.md). ebpflb leaves these packets alone too.


Ranges = tuple[tuple[int, int], ...]


class Condition(NamedTuple):
    """The addresses or ports that a rule asks of the destination."""

    of_address: bool
    ranges: Ranges
    negated: bool

    def holds(self, address: int, port: int) -> bool:
        value = address if self.of_address else port
        return any(first <= value <= last for first, last in self.ranges) != self.negated


class Destination(NamedTuple):
    """The destinations of one rule: one of the protocols, and all conditions hold.

    ``rule`` is for people.
    """

    protocols: frozenset[int]
    conditions: tuple[Condition, ...]
    rule: str = ""

    def has(self, address: Address, port: int, protocol: int) -> bool:
        return protocol in self.protocols and all(
            condition.holds(number(address), port) for condition in self.conditions
        )

    @property
    def only_address(self) -> int | None:
        """The one address that it can have; None: it may have several."""
        each = (it.ranges for it in self.conditions if it.of_address and not it.negated)
        return next((first for ((first, last), *more) in each if first == last and not more), None)


class Rules:
    """Finds a rule for a frontend: most rules are for one address, and a tenant may have any number
    of frontends.
    """

    def __init__(self, values: Iterable[Destination] = ()) -> None:
        self._of: dict[int | None, list[Destination]] = {}
        for each in values:
            self._of.setdefault(each.only_address, []).append(each)

    def __bool__(self) -> bool:
        return bool(self._of)

    def find(self, address: Address, port: int, protocol: int) -> Destination | None:
        """Return a rule that has this destination."""
        for at in (number(address), None):
            for each in self._of.get(at, ()):
                if each.has(address, port, protocol):
                    return each
        return None
