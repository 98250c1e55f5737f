# SPDX-License-Identifier: Apache-2.0
"""ebpflb's annotations of Services and EndpointSlices: their values, and warnings about them.

A person or a controller writes an annotation by hand, so an error in one also becomes an Event. A
message about an annotation is recognized by its beginning (``is_about_one``).
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from ipaddress import ip_address
from typing import NamedTuple, TypeVar

from ebpflb.errors import quoted
from ebpflb.model import addresses, objects
from ebpflb.model.addresses import Address, Network

_PREFIX = "metadata.annotations["


def annotation_field(annotation: str) -> str:
    return f"{_PREFIX}{annotation}]"


def is_about_one(message: str) -> bool:
    return message.startswith(_PREFIX)


_Value = TypeVar("_Value")


def _read(
    metadata: objects.Annotated,
    annotation: str,
    parse: Callable[[str], _Value],
    default: _Value,
    instead: str,
    warnings: list[str],
) -> _Value:
    """Return the annotation's value, or ``default`` without one.

    A value that ``parse`` refuses, by ValueError, counts as ``default`` too, and adds a warning
    that says what happens ``instead``.
    """
    text = metadata.annotation(annotation)
    if text is None:
        return default
    try:
        return parse(text)
    except ValueError as error:
        warnings.append(f"{annotation_field(annotation)}: {error}, so {instead}")
        return default


def _word(
    service: objects.Service,
    annotation: str,
    known: Collection[str],
    default: str,
    warnings: list[str],
) -> str:
    """Return the annotation's word, one of ``known``."""

    def parse(text: str) -> str:
        if text not in known:
            raise ValueError(f"{quoted(text)} is not one of {', '.join(known)}")
        return text

    return _read(service.metadata, annotation, parse, default, f"it is {default}", warnings)


def _seconds(text: str) -> float:
    """Parse a duration of at most LONGEST seconds."""
    seconds = addresses.parse_duration(text).seconds
    if not 0 <= seconds <= LONGEST:
        raise ValueError(f"{quoted(text)} is not between 0s and 1h")
    return seconds


LONGEST = 3600.0  # seconds, of a slow start and of a grace


# Annotations of former versions.

_WAS_REMOVED = "was removed"
_REMOVED = {"ebpflb.io/ports": "list each port in spec.ports"}  # annotation -> what to do


def is_about_removed(message: str) -> bool:
    return is_about_one(message) and _WAS_REMOVED in message


# How a new connection gets its endpoint: by a Service's annotation, else by --scheduler.
#
# kube-proxy has schedulers only in mode ipvs, and there for the whole node: ``BY_IPVS`` maps the
# names of the kernel's schedulers to ours; "" is kube-proxy's default, rr.

SCHEDULER_ANNOTATION = "ebpflb.io/scheduler"
SCHEDULERS = (RANDOM, ROUND_ROBIN, LEAST_CONNECTIONS, MAGLEV, SOURCE_HASH) = (
    "random",
    "round-robin",
    "least-connections",
    "maglev",
    "source-hash",
)
HASHING = frozenset({MAGLEV, SOURCE_HASH})
BY_IPVS = {
    "": ROUND_ROBIN,
    "rr": ROUND_ROBIN,
    "wrr": ROUND_ROBIN,
    **dict.fromkeys(("lc", "wlc", "sed", "nq"), LEAST_CONNECTIONS),
    "sh": SOURCE_HASH,
    "mh": SOURCE_HASH,
}


# The weight of a slice's endpoints, relative to those of other slices: by a slice's annotation.
#
# Thus a person or a canary controller can give an extra slice a part of the traffic. 0 means no new
# connections; existing connections continue.

WEIGHT_ANNOTATION = "ebpflb.io/weight"
DEFAULT_WEIGHT, HIGHEST_WEIGHT = 100, 1000


def read_weight(slice: objects.EndpointSlice, warnings: list[str]) -> int:
    """Return the weight of each endpoint; an unreadable one counts as DEFAULT_WEIGHT."""
    instead = f"it is {DEFAULT_WEIGHT}"
    return _read(
        slice.metadata, WEIGHT_ANNOTATION, _parse_weight, DEFAULT_WEIGHT, instead, warnings
    )


def _parse_weight(text: str) -> int:
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(HIGHEST_WEIGHT))
    if not (is_number and int(text) <= HIGHEST_WEIGHT):
        raise ValueError(f"{quoted(text)} is not a number from 0 to {HIGHEST_WEIGHT}")
    return int(text)


# The time in which the weight of a new endpoint grows to its full value: a Service's annotation.
#
# A process that has just started is slow: its caches are empty, its code is not compiled. So it
# gets few connections at first.

SLOW_START_ANNOTATION = "ebpflb.io/slow-start"


# What happens to established connections when their endpoint is removed: a Service's annotation.
#
# An endpoint is removed when no EndpointSlice of the Service lists it any more. An endpoint that is
# terminating or not ready is still listed, and may continue to serve its existing connections.

ON_REMOVAL_ANNOTATION = "ebpflb.io/on-removal"
KEEP, RESET = "keep", "reset"
DEFAULT_GRACE = 10.0  # seconds: a controller may move an endpoint from one slice to another
BY_SOCKETS, BY_CONNTRACK = RESET_KINDS = "sockets", "conntrack"  # of connections
_ON_REMOVAL_VALUES = "keep, reset or reset=DURATION"


def _read_reset_after(service: objects.Service, warnings: list[str]) -> float | None:
    """Return after how many seconds connections to a removed endpoint are reset; None: never."""

    def parse(text: str) -> float | None:
        if text == KEEP:
            return None
        reset, _, terminating = text.partition(",terminating=")
        if terminating:
            where = annotation_field(ON_REMOVAL_ANNOTATION)
            instead = "connections end with their endpoint"
            warnings.append(f"{where}: terminating {_WAS_REMOVED}: {instead}")
        kind, is_given, grace = reset.partition("=")
        if kind != RESET:
            raise ValueError(f"{quoted(text)} is not {_ON_REMOVAL_VALUES}")
        return _seconds(grace) if is_given else DEFAULT_GRACE

    meta, instead = service.metadata, "connections are kept"
    return _read(meta, ON_REMOVAL_ANNOTATION, parse, None, instead, warnings)


def show_on_removal(reset_after: float | None) -> str:
    """Return the annotation's text, with its duration."""
    if reset_after is None:
        return KEEP
    return f"{RESET}={addresses.Duration(reset_after * 10**9)}"


# Whether idle connections move to new endpoints: a Service's annotation.
#
# Only of ports that say that they speak HTTP: there a connection is between two requests when the
# server has sent last. With others, an idle connection may hold a transaction or a lock.

REBALANCE_ANNOTATION = "ebpflb.io/rebalance"
REBALANCED_PROTOCOLS = ("http", "https", "kubernetes.io/h2c", "grpc")  # appProtocol
SHORTEST_IDLE = 1.0  # seconds
_REBALANCE = re.compile(r"idle=([^,]+),above=([1-9]\d{0,2})%")


class Rebalance(NamedTuple):
    """``idle``: seconds for which a connection is idle; ``above``: the part of an endpoint's share
    that it may hold beyond it.
    """

    idle: float
    above: float


def _parse_rebalance(text: str) -> Rebalance:
    found = _REBALANCE.fullmatch(text)
    if not found:
        raise ValueError(f"{quoted(text)} is not like idle=5s,above=20%")
    idle = _seconds(found[1])
    if idle < SHORTEST_IDLE:
        raise ValueError(f"{quoted(text)}: idle is not between 1s and 1h")
    return Rebalance(idle, int(found[2]) / 100)


def _read_rebalanced(
    service: objects.Service, scheduler: str, warnings: list[str]
) -> dict[int, Rebalance]:
    """Return what each TCP port gets, by its number in the Service; for others add warnings."""
    meta, spec, instead = service.metadata, service.spec, "connections stay"
    wanted = _read(meta, REBALANCE_ANNOTATION, _parse_rebalance, None, instead, warnings)
    if wanted is None:
        return {}
    where, found = annotation_field(REBALANCE_ANNOTATION), {}
    if spec.session_affinity == "ClientIP" or scheduler == SOURCE_HASH:
        warnings.append(f"{where}: has no effect: a client's connections go to one endpoint")
        return {}
    for index, port in enumerate(spec.ports or ()):
        if port.protocol != "TCP":
            continue
        if port.app_protocol in REBALANCED_PROTOCOLS:
            found[port.port] = wanted
        else:
            known = ", ".join(REBALANCED_PROTOCOLS)
            text = f"spec.ports[{index}].appProtocol is not one of {known}"
            warnings.append(f"{where}: {text}, so its connections stay")
    return found


# Whether endpoints that do not answer are set aside: by a Service's annotation, else by
# --endpoint-health. The rules: endpoint_health.py.

HEALTH_ANNOTATION = "ebpflb.io/endpoint-health"
ENDPOINT_HEALTH = (HEALTH_OFF, HEALTH_PASSIVE) = ("off", "passive")


# The addresses of a listener on the node itself, one of each family, that serves a Service's
# sockets while it answers: by a Service's annotation.
#
# The operator allows the addresses (--node-local-addresses). Otherwise whoever may write a Service
# could lead its clients to any listener of the node, as to one that gives them credentials.

NODE_LOCAL_ANNOTATION = "ebpflb.io/node-local"
NODE_LOCAL_DNS = (ip_address("169.254.20.10"),)  # the usual address of NodeLocal DNSCache


def parse_node_local(text: str, allowed: tuple[Address, ...]) -> tuple[Address, ...]:
    """Parse addresses, at most one of each family. Raises ValueError for one not ``allowed``."""
    found = tuple(addresses.parse_address(part.strip()) for part in text.split(","))
    for each in found:
        if each not in allowed:
            raise ValueError(f"--node-local-addresses does not allow {each}")
    if len({each.version for each in found}) < len(found):
        raise ValueError(f"{quoted(text)} has two addresses of one family")
    return found


def parse_addresses(text: str) -> tuple[Address, ...]:
    """Parse addresses of both families, separated by commas, or ``none``. Raises ValueError."""
    if text == "none":
        return ()
    return tuple(addresses.parse_address(part.strip()) for part in text.split(","))


def show_addresses(found: tuple[Address, ...]) -> str:
    """The inverse of ``parse_addresses``."""
    return ",".join(map(str, found)) or "none"


# What happens to packets for an external address that find no endpoint here under policy Local: by
# a Service's annotation, else by the field spec.externalFailoverPolicy (KEP-6272), which has the
# same values. With Passthrough the network leads them to an endpoint elsewhere.

FAILOVER_ANNOTATION = "ebpflb.io/external-failover-policy"
FAILOVER_POLICIES = (FAILOVER_NONE, PASSTHROUGH) = ("None", "Passthrough")


def read_passthrough(service: objects.Service, warnings: list[str]) -> bool:
    """Whether packets without an endpoint go on to the router.

    An unknown word, and Passthrough without externalTrafficPolicy Local, add a warning and count as
    None.
    """
    field = "spec.externalFailoverPolicy"
    policy = service.spec.external_failover_policy or FAILOVER_NONE
    if policy not in FAILOVER_POLICIES:
        known = ", ".join(FAILOVER_POLICIES)
        warnings.append(f"{field}: {quoted(policy)} is not one of {known}, so it is None")
        policy = FAILOVER_NONE
    if service.metadata.annotation(FAILOVER_ANNOTATION) is not None:
        field = annotation_field(FAILOVER_ANNOTATION)
        policy = _word(service, FAILOVER_ANNOTATION, FAILOVER_POLICIES, policy, warnings)
    if policy != PASSTHROUGH or service.spec.external_traffic_policy == "Local":
        return policy == PASSTHROUGH
    warnings.append(f"{field}: has no effect without externalTrafficPolicy Local")
    return False


# Whether requests are handed to nodes with endpoints, so that these see the client's address: by a
# Service's annotation, else by --hand-over (hand_over.py).

FORWARDING_ANNOTATION = "ebpflb.io/forwarding"
FORWARDINGS = (MASQUERADE, KEEP_CLIENT) = ("masquerade", "keep-client")
HAND_OVER = (HAND_OVER_OFF, HAND_OVER_AUTO, HAND_OVER_KEEP_CLIENT) = ("off", "auto", KEEP_CLIENT)


def _read_hands_over(service: objects.Service, mode: str, warnings: list[str]) -> bool:
    """Return whether requests may be handed over; ``mode`` is one of HAND_OVER."""
    default = KEEP_CLIENT if mode == HAND_OVER_KEEP_CLIENT else MASQUERADE
    wanted = _word(service, FORWARDING_ANNOTATION, FORWARDINGS, default, warnings)
    is_local = service.spec.external_traffic_policy == "Local"
    if wanted == KEEP_CLIENT and mode == HAND_OVER_OFF and not is_local:
        where = annotation_field(FORWARDING_ANNOTATION)
        warnings.append(f"{where}: has no effect: the nodes run with --hand-over=off")
    return mode != HAND_OVER_OFF and (is_local or wanted == KEEP_CLIENT)


# Which clients a Service's NodePorts admit: by its annotation, else by --nodeport-source-ranges.
#
# kube-proxy has neither option; it leaves NodePorts to firewalls in PREROUTING. These do not see a
# NodePort that is translated before them.

NODEPORT_RANGES_ANNOTATION = "ebpflb.io/nodeport-source-ranges"


def read_nodeport_ranges(
    service: objects.Service, default: tuple[Network, ...]
) -> tuple[Network, ...]:
    """Return the networks.

    A family without any admits every client, as with loadBalancerSourceRanges.

    Raises InvalidObject: an unreadable annotation must not open what it was meant to close.
    """
    text = service.metadata.annotation(NODEPORT_RANGES_ANNOTATION)
    if text is None:
        return default
    return objects.parsed(annotation_field(NODEPORT_RANGES_ANNOTATION), parse_networks, text)


def parse_networks(text: str) -> tuple[Network, ...]:
    """Parse CIDRs of both families, separated by commas; "" admits every client.

    Raises ValueError.
    """
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    return tuple(addresses.parse_network(part) for part in parts)


def show_networks(ranges: tuple[Network, ...]) -> str:
    """The inverse of ``parse_networks``."""
    return ",".join(map(str, ranges))


# The names of all annotations of Services and of slices.

OF_SERVICES = frozenset(
    {
        NODEPORT_RANGES_ANNOTATION,
        SCHEDULER_ANNOTATION,
        ON_REMOVAL_ANNOTATION,
        SLOW_START_ANNOTATION,
        HEALTH_ANNOTATION,
        NODE_LOCAL_ANNOTATION,
        FAILOVER_ANNOTATION,
        FORWARDING_ANNOTATION,
        objects.REQUESTED[0],
        objects.SHARING[0],
        REBALANCE_ANNOTATION,
    }
)
OF_SLICES = frozenset({WEIGHT_ANNOTATION})


class ServiceAnnotations(NamedTuple):
    """What a Service's annotations set; ``reset_after`` and ``slow_start`` in seconds.

    ``rebalanced`` is by port.
    """

    scheduler: str
    reset_after: float | None
    slow_start: float
    endpoint_health: str
    node_local: tuple[Address, ...]
    passthrough: bool
    rebalanced: Mapping[int, Rebalance]
    hands_over: bool


def read(
    service: objects.Service,
    scheduler: str,
    endpoint_health: str,
    node_local_addresses: tuple[Address, ...],
    hand_over: str,
    warnings: list[str],
) -> ServiceAnnotations:
    """Return what the Service sets; ``scheduler`` and ``endpoint_health`` are the defaults.

    ``node_local_addresses`` are those that it may name.

    There is a warning for each invalid value, for each annotation that only a slice can have, and
    for the first unknown one.
    """
    warnings += _without_effect(service.metadata, OF_SERVICES, "a Service", "its EndpointSlices")
    meta = service.metadata
    node_local = partial(parse_node_local, allowed=node_local_addresses)
    at_once = "new endpoints get their whole weight at once"
    scheduler = _word(service, SCHEDULER_ANNOTATION, SCHEDULERS, scheduler, warnings)
    return ServiceAnnotations(
        scheduler,
        _read_reset_after(service, warnings),
        _read(meta, SLOW_START_ANNOTATION, _seconds, 0.0, at_once, warnings),
        _word(service, HEALTH_ANNOTATION, ENDPOINT_HEALTH, endpoint_health, warnings),
        _read(meta, NODE_LOCAL_ANNOTATION, node_local, (), "sockets get endpoints", warnings),
        read_passthrough(service, warnings),
        _read_rebalanced(service, scheduler, warnings),
        _read_hands_over(service, hand_over, warnings),
    )


def slice_warnings(slice: objects.EndpointSlice) -> Iterator[str]:
    """Yield warnings for annotations of a slice.

    There is one for each annotation that only a Service can have, and one for the first unknown
    one.
    """
    yield from _without_effect(slice.metadata, OF_SLICES, "an EndpointSlice", "the Service")


def _without_effect(
    metadata: objects.Annotated, its: frozenset[str], kind: str, owner: str
) -> Iterator[str]:
    """Yield a warning for each annotation of another kind, and for the first unknown one."""
    if not metadata.annotations:
        return
    others = sorted(metadata.annotations.keys() - its - objects.OF_OTHERS)
    ours = OF_SERVICES | OF_SLICES
    for name in others:
        if name in ours:
            yield f"{annotation_field(name)}: has no effect on {kind}: set it on {owner}"
        if name in _REMOVED:
            yield f"{annotation_field(name)}: {_WAS_REMOVED}: {_REMOVED[name]}"
    for name in [name for name in others if name not in {*ours, *_REMOVED}][:1]:
        known = ", ".join(sorted(its))
        yield f"{annotation_field(name)}: has no effect: it is not one of {known}"
