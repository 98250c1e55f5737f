# SPDX-License-Identifier: Apache-2.0
"""Whether iptables' FORWARD drops requests of clients outside to pods of this node, by its rules.

kube-proxy's chains accept the traffic that it masquerades, in its modes by iptables and ipvs.
ebpflb has no such rule, and does not masquerade traffic that stays on the node. If no other rule
accepts requests to pods, they time out as soon as ebpflb serves; with --masquerade-local-backends,
when kube-proxy's rules are gone. Any rule that may accept such a request counts as accepting it,
whatever rules before it do.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from ebpflb.errors import EbpflbError, NodeError, in_words
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.netfilter.firewall_reader import read_iptables
from ebpflb.kernel.netfilter.firewall_rules import Rule, Table
from ebpflb.kernel.netfilter.iptables import Tool, tools
from ebpflb.kernel.node import device_watch, routes
from ebpflb.model.addresses import Address, Network, number, parse_address, parse_network
from ebpflb.model.kube_proxy import Option, is_chain, read_options
from ebpflb.model.services import Protocol
from ebpflb.tools import pins

_MOST_SLOTS, _MOST_PODS = 4096, 8  # limits of the search
_DROPS = {"DROP", "REJECT"}
_SILENT = {"-j", "-m", "--comment", "--reject-with"}
_KUBE_MARK = "0x4000/0x4000"

Endpoint = tuple[Address, int]


class Request(Struct, frozen=True):
    """A new TCP connection of a client outside to a pod, by the devices ``came_by`` and ``leaves``.

    ``near`` are the addresses of the node at the first device; ``inside`` those at other devices,
    and the pod's: networks with them have no clients outside. ``marked``: with the mark that
    kube-proxy's chains test.
    """

    pod: Address
    port: int
    leaves: str
    came_by: str
    near: frozenset[Address]
    inside: frozenset[Address]
    marked: bool = True


class Dropping(NamedTuple):
    """The traffic that one tool's rules drop.

    ``now``: already now; otherwise ebpflb may cause the drop, or it is unknown.
    """

    tool: str
    now: bool
    says: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.tool}: {self.says}: {self.remedy}"


def dropping(state_directory: Path) -> list[Dropping]:
    """Return the traffic that FORWARD drops, or may drop, in this thread's network namespace."""
    found = list[Dropping]()
    for tool in tools():
        try:
            if read := tool.table("filter"):
                found += _judged(tool, read_iptables(read, tool.name), state_directory)
        except (EbpflbError, OSError) as error:
            says = f"unknown whether FORWARD drops requests to pods: {in_words(error)}"
            found.append(Dropping(tool.name, False, says, f"look at `{tool.family} -S FORWARD`"))
    return found


def _judged(tool: Tool, table: Table, state_directory: Path) -> Iterator[Dropping]:
    """Yield at most one result, for the first pod whose requests are dropped."""
    if not drops_by_default(table):
        return
    for request in _requests(tool, state_directory):
        if accepts(table, request, with_kube_proxy=False):
            continue
        held = accepts(table, request, with_kube_proxy=True)
        who = "only kube-proxy's chains accept" if held else "no rule accepts"
        says = f"FORWARD drops by default, and {who} requests from outside to pods"
        rule = f"{tool.family} -I FORWARD -d PODS -j ACCEPT"
        then = "they time out with ebpflb" if held else "NodePorts time out"
        remedy = f"{then}: {rule}, and the same with -s (PODS: the pods' network)"
        yield Dropping(tool.name, not held, f"{says}, such as {request.pod}", remedy)
        return


def drops_by_default(table: Table) -> bool:
    """Whether the policy or an unconditional rule drops what no rule accepts."""
    forward = table.chains.get("FORWARD")
    return forward is not None and (
        forward.policy == "DROP"
        or any(
            rule.targets & _DROPS and _SILENT.issuperset(rule.names)
            for chain in table.chains.values()
            for rule in chain.rules
        )
    )


def accepts(table: Table, request: Request, *, with_kube_proxy: bool) -> bool:
    """Whether FORWARD may accept a request, if also kube-proxy's chains count or not."""
    reached = table.reached_from(
        table.chains["FORWARD"],
        lambda rule: _may_match(rule, request),
        with_kube_proxy=with_kube_proxy,
    )
    return any("ACCEPT" in rule.targets for _, rule in reached)


def _may_match(rule: Rule, request: Request) -> bool:
    """Whether the rule may match the request; a rule that cannot be read may."""
    try:
        return rule.matches(Protocol.TCP, number(request.pod), request.port) and all(
            _may_hold(option, request) for option in rule.options
        )
    except ValueError:
        return True


def _may_hold(option: Option, request: Request) -> bool:
    """Whether a condition, other than on the destination, may hold. Raises ValueError."""
    if option.name == "-s":
        return option.negated or _has_clients(parse_network(option.value), request)
    if option.name == "-i":
        holds = _is_device(request.came_by, option.value)
    elif option.name == "-o":
        holds = _is_device(request.leaves, option.value)
    elif option.name == "--mark":
        holds = request.marked or option.value != _KUBE_MARK
    elif option.name in ("--ctstate", "--state"):
        holds = not {"NEW", "DNAT"}.isdisjoint(option.value.split(","))
    else:
        return True
    return holds != option.negated


def _has_clients(network: Network, request: Request) -> bool:
    """Whether clients outside may be in this network."""
    is_inside = any(address in network for address in request.inside)
    return not is_inside or any(address in network for address in request.near)


def _is_device(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("+") else name == pattern


def _requests(tool: Tool, state_directory: Path) -> Iterator[Request]:
    """Yield requests to some pods with a Service for clients outside.

    Raises NodeError if the pods are unknown.
    """
    version = 6 if tool.family == "ip6tables" else 4
    devices = device_watch.list_devices().devices
    own = {address for device in devices for address in device.addresses}
    uplink = next(routes.default_devices(version), 0)
    near = {a for device in devices if device.index == uplink for a in device.addresses}
    came_by = next((device.name for device in devices if device.index == uplink), "")
    endpoints, marked = _endpoints(tool, state_directory)
    pods = sorted(each for each in endpoints if each[0].version == version and each[0] not in own)
    for address, port in islice(pods, _MOST_PODS):
        route = routes.route_to(address)
        if came_by and route.ifindex not in (0, uplink):
            inside = frozenset(own - near | {address})
            yield Request(address, port, route.device, came_by, frozenset(near), inside, marked)


def _endpoints(tool: Tool, state_directory: Path) -> tuple[set[Endpoint], bool]:
    """Return the endpoints for clients outside, and whether requests to them are masqueraded.

    Raises NodeError.
    """
    with pins.maps_if_any(state_directory) as maps:
        if maps is None:
            return _endpoints_of_kube_proxy(tool), True
        flags = maps["settings"].get(0).flags
        marked = "shadow" in flags or {"netfilter", "masquerade_here"} <= flags
        return _endpoints_in_maps(maps), marked


def _endpoints_in_maps(maps: Mapping[str, Map]) -> set[Endpoint]:
    """Return the endpoints on this node."""
    blocks = {
        entry.block
        for frontend, entry in maps["services"].items()
        if "external" in entry.flags and frontend.protocol == Protocol.TCP
    }
    slots = (slot for block in blocks for slot in maps["slots"].get_range(*block))
    return {(s.address, s.port) for s in islice(slots, _MOST_SLOTS) if "here" in s.flags}


def _endpoints_of_kube_proxy(tool: Tool) -> set[Endpoint]:
    """Return kube-proxy's endpoints, in its mode by iptables. Raises NodeError."""
    table = tool.table("nat")
    if table is None or "KUBE-NODEPORTS" not in table.chains:
        raise NodeError("pods are only known while an agent runs")
    if all(rule.chain != "KUBE-NODEPORTS" for rule in table.rules):
        return set()
    options = [
        {option.name: option.value for option in read_options(rule.text)}
        for rule in table.rules
        if is_chain(rule.chain)
    ]
    destinations = [it.get("--to-destination", "") for it in options if it.get("-p") == "tcp"]
    pairs = [destination.rpartition(":") for destination in destinations if destination]
    return {(parse_address(host.strip("[]")), int(port)) for host, _, port in pairs}
