# SPDX-License-Identifier: Apache-2.0
"""Programs, rules and routes on this node that matter to the same traffic, for `ebpflb check`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from ebpflb.errors import EbpflbError, NodeError, in_words
from ebpflb.files import DOCS
from ebpflb.kernel.attach import cgroup_links, device_programs
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.netfilter import flowtable, nft
from ebpflb.kernel.netfilter.each_packet import marked_routes
from ebpflb.kernel.node import namespaces, routes
from ebpflb.kernel.node.device_watch import list_devices
from ebpflb.kernel.node.routes import FAR_CLIENTS, ReplyRoute
from ebpflb.model.addresses import Address
from ebpflb.tools import kube_proxy, pins
from ebpflb.tools.firewall import forwarding
from ebpflb.tools.firewall.survey import survey
from ebpflb.tools.node_checks import CheckResult
from ebpflb.tools.snapshot import Snapshot

_REPLIES = "replies of endpoints"
_EACH_PACKET, _MOST = "rules for each packet", 3
_BY_HAND = f"compare them by hand with {DOCS}/firewalls.md"
_IF_NOT_WANTED = "if clients outside shall reach the Service, remove the rule"


def results(state_directory: Path, cgroup: Path | None) -> Iterator[CheckResult]:
    """Yield a result for each kind of them."""
    yield _other_hooks(state_directory, cgroup)
    yield from _other_filters(state_directory)
    yield _kube_proxy(state_directory)
    yield from _forwarding(state_directory)
    yield from _firewall(state_directory)
    yield from _reply_result(state_directory)


def _forwarding(state_directory: Path) -> Iterator[CheckResult]:
    """Yield whether pods get requests of clients outside to NodePorts, with and without
    kube-proxy's rules.
    """
    found = forwarding.dropping(state_directory)
    for each in found:
        yield CheckResult(
            "forwarded packets", False, False, f"{each.tool}: {each.says}", each.remedy
        )
    if not found:
        yield CheckResult("forwarded packets", True, False, "accepted for pods of this node", "")


def _firewall(state_directory: Path) -> Iterator[CheckResult]:
    """Yield the rules of netfilter that drop requests to Services (docs/firewalls.md)."""
    try:
        surveyed = survey(state_directory)
    except (EbpflbError, OSError) as error:
        yield CheckResult(
            "firewall rules", False, False, f"cannot be read: {in_words(error)}", _BY_HAND
        )
        return
    for rule in surveyed.dropping or ():
        yield CheckResult("firewall rule", False, False, rule, _IF_NOT_WANTED)
    for line in surveyed.unread:
        yield CheckResult("firewall rules", False, False, line, _BY_HAND)
    if surveyed.dropping is None:
        unknown = "are compared with Services once an agent has run"
        yield CheckResult("firewall rules", True, False, unknown, "")
    elif not (surveyed.dropping or surveyed.unread):
        yield CheckResult("firewall rules", True, False, "none drops requests to Services", "")
    yield _each_packet(surveyed.each_packet)


def _each_packet(rules: list[str]) -> CheckResult:
    """Return the rules for each packet and the routing by marks, which a flowtable bypasses.

    They are a fault only if there is a flowtable.
    """
    try:
        found, bypassed = rules + marked_routes(), nft.exists(flowtable.TABLE)
    except EbpflbError as error:
        return CheckResult(_EACH_PACKET, False, False, str(error), "")
    more = f"; {len(found) - _MOST} more" if len(found) > _MOST else ""
    detail = "; ".join(found[:_MOST]) + more if found else "none"
    if not bypassed:
        detail += "; --fast-forward, which is off, would bypass them" if found else ""
        return CheckResult(_EACH_PACKET, True, False, detail, "")
    remedy = "established flows bypass them: set --fast-forward=off or auto" if found else ""
    return CheckResult(_EACH_PACKET, not found, False, detail, remedy)


def _reply_result(state_directory: Path) -> Iterator[CheckResult]:
    """Yield the endpoints that answer only their node (docs/limits.md)."""
    try:
        found = misled(state_directory)
    except (EbpflbError, OSError) as error:
        yield CheckResult(
            _REPLIES, False, False, in_words(error), "grant CAP_SYS_ADMIN to see them"
        )
        return
    for line in found:
        yield CheckResult("replies of an endpoint", False, False, line, REMEDY)
    if not found:
        yield CheckResult(_REPLIES, True, False, "none leaves by another device", "")


def _other_hooks(state_directory: Path, cgroup: Path | None) -> CheckResult:
    """Return the other programs at the socket hooks.

    Of two load balancers at the same hook the second one sees only the first one's choice. What
    such a program does is unknown.
    """

    def foreign() -> Mapping[str, list[str]]:
        ours = StateDir(state_directory).map_ids()
        return cgroup_links.foreign_programs(cgroup_links.cgroup_root(cgroup), ours)

    remedy = "check what they do: a filter may refuse connections; run only one load balancer"
    return _foreign("other programs at the hooks", foreign, remedy)


def _other_filters(state_directory: Path) -> Iterator[CheckResult]:
    """Yield the other programs at the devices, which run before ours or after them.

    Such a program may drop or redirect requests and replies.
    """

    @cache
    def others() -> device_programs.OthersPrograms:
        return device_programs.others_programs(StateDir(state_directory))

    remedy = "they run {} ebpflb and may drop or redirect packets: check what they do"
    for part, programs in (("before", lambda: others().before), ("after", lambda: others().after)):
        feature = f"programs {part} ebpflb's at devices"
        yield _foreign(feature, programs, remedy.format(part))


def _foreign(
    feature: str, list_programs: Callable[[], Mapping[str, list[str]]], remedy: str
) -> CheckResult:
    try:
        found = list_programs()
    except (EbpflbError, OSError) as error:
        return CheckResult(feature, False, False, in_words(error), "")
    names = ", ".join(f"{where} ({', '.join(programs)})" for where, programs in found.items())
    return CheckResult(feature, not found, False, names or "none", remedy if found else "")


def _kube_proxy(state_directory: Path) -> CheckResult:
    """Return whether kube-proxy runs, as it may during a migration."""
    try:
        found = kube_proxy.detect(state_directory)
    except EbpflbError as error:
        return CheckResult("kube-proxy", False, False, str(error), "")
    return CheckResult("kube-proxy", not found.advice, False, found.state, found.advice)


# Endpoints on this node whose replies to clients outside do not come back to the node.
#
# Clients outside keep their address if the endpoint is on this node, where kube-proxy masquerades
# them. A pod with several networks may send its replies by another one (docs/limits.md).

REMEDY = "--masquerade-local-backends"
_MOST_SHOWN = 20


def misled(state_directory: Path) -> list[str]:
    """Return a line for each such endpoint; none if no agent has run. Raises NodeError."""
    endpoints = _asked_from_outside(state_directory)
    if not endpoints:
        return []
    clients = {*FAR_CLIENTS, *routes.gateways()}
    lines = list(_lines(endpoints, _replies(endpoints, sorted(clients, key=str))))
    more = len(lines) - _MOST_SHOWN
    return lines[:_MOST_SHOWN] + ([f"{more} more endpoints like these"] if more > 0 else [])


def _replies(endpoints: dict[Address, str], clients: list[Address]) -> Iterator[ReplyRoute]:
    """Yield the routes of replies in all pods of the node; a pod that ends meanwhile is
    left out.
    """

    def asked() -> list[ReplyRoute]:
        return routes.replies(list_devices().devices, endpoints.keys(), clients)

    for path in namespaces.linked():
        try:
            found = namespaces.call_in(path, asked)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise NodeError(f"pods' routes cannot be read: {error.strerror}") from error
        yield from found


def _lines(endpoints: dict[Address, str], replies: Iterable[ReplyRoute]) -> Iterator[str]:
    """Yield a line for each endpoint, with the first client that it does not answer."""
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
    """Return the endpoints, by address, that see the addresses of clients outside under policy
    Cluster.

    With policy Local kube-proxy does not masquerade either.
    """
    with pins.maps_if_any(state_directory) as maps:
        if maps is None or "masquerade_here" in maps["settings"].get(0).flags:
            return {}
        snapshot = Snapshot(maps)
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
