# SPDX-License-Identifier: Apache-2.0
"""A node with the agent's maps, and the two programs at its devices.

Every packet that a program passes on is checked: only addresses, ports and checksums may change,
and a correct checksum must stay correct.
"""

import functools
import os
from collections.abc import Mapping
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any, NamedTuple

from ebpflb.entries import services
from ebpflb.entries.flows import STREAM_AFTER, Flow, Hook, Timeouts, Tuple
from ebpflb.entries.services import Prefix, Settings
from ebpflb.errors import KernelError
from ebpflb.kernel import bpf
from ebpflb.kernel.map_writer import NoFrontends
from ebpflb.kernel.maps.bpf_map import Counters, Map, MappedArray
from ebpflb.kernel.maps.layout import VERDICTS
from ebpflb.kernel.programs import loader
from ebpflb.kernel.programs.loader import DROP, PASS, REDIRECT, run_program
from tests.packet import wire
from tests.packet.frames import Ether, Packet, at, forwarded
from tests.packet.places import V4, V6
from tests.publishing import Publisher, frontend

ACTIONS = {PASS: "pass", DROP: "drop", REDIRECT: "redirect"}
HOOKS = {1: "ingress", 2: "egress"}
COUNTED_IDS = 64  # of services and backends; tests have smaller ones
FIRST_PORT, LAST_PORT = 40_000, 44_999


def bits(cidr: str) -> int:
    """Return the length of a prefix, in bits of the 128-bit form of its addresses."""
    network = ip_network(cidr)
    return network.prefixlen + (96 if network.version == 4 else 0)


def prefix(cidr: str) -> Prefix:
    mask = (1 << 128) - (1 << (128 - bits(cidr)))
    return Prefix(ip_network(cidr).network_address, IPv6Address(mask))


class Outcome(NamedTuple):
    """The result of a program: action, resulting frame, and the verdicts that it counted."""

    action: str
    frame: bytes
    verdicts: dict[str, int]

    @property
    def packet(self) -> Packet:
        return Ether(self.frame)


class PacketNode(Publisher):
    """Maps filled as the agent does; devices are real devices in a separate namespace."""

    def __init__(self, maps: Mapping[str, Map], hooks: Mapping[str, int], devices: dict[str, int]):
        super().__init__()
        self.maps, self.hooks, self.devices = maps, hooks, devices
        self.complete = False  # whether devices sum packets up
        self.priority = 0  # skb->priority, as the last program left it
        for opened in maps.values():
            _empty(opened)
        no_frontends = maps["no_frontends"]
        assert isinstance(no_frontends, MappedArray)
        self.no_frontends = NoFrontends(no_frontends)
        self.no_frontends.repair()
        self.counted = self._verdicts()
        self.settings()
        self.device("uplink", V4.node, V6.node, "host_only")
        self.device("pods", V4.bridge, V6.bridge)
        for key, timeout in Timeouts().table.items():
            self.put("timeouts", key, timeout)
        for places in (V4, V6):
            self.owns(places.node)
            self.reserve(places.service_range)

    def put(self, name: str, key: Any, value: Any) -> None:
        self.write(name, [(key, value)])

    def write(self, name: str, rows: list[tuple[Any, Any]]) -> None:
        if name == "services":
            self.no_frontends.before_writing(at for at, _ in rows)
        self.maps[name].write(rows)

    def delete(self, name: str, keys: list[Any]) -> None:
        self.maps[name].delete(keys)
        if name == "services":
            self.no_frontends.after_removing(keys)

    def settings(self, *words: str, **fields: Any) -> None:
        """Set flags, and other differences from the default; pods are recognized by address."""
        usual = {
            "flags": frozenset(words or ("detect_local",)),
            "first_port": FIRST_PORT,
            "last_port": LAST_PORT,
            "pods_v4": prefix(V4.pods),
            "pods_v6": prefix(V6.pods),
            "span_v4": prefix(V4.service_range),
            "span_v6": prefix(V6.service_range),
            "stream_after": STREAM_AFTER,
        }
        self.put("settings", 0, Settings(0, 0, **{**usual, **fields}))

    def device(self, name: str, v4: str = "0.0.0.0", v6: str = "::", *words: str) -> None:
        device = services.DeviceEntry(ip_address(v4), ip_address(v6), frozenset(words))
        self.put("devices", self.devices[name], device)

    def forget_recent(self) -> None:
        """Forget all recent choices, so that no packet is handled by them."""
        table = self.maps["recent_choices"]
        assert isinstance(table, MappedArray)
        table.memory[:] = bytes(len(table.memory))

    def reserve(self, cidr: str) -> None:
        """Reserve these addresses for services."""
        address = ip_network(cidr).network_address
        self.put("service_ranges", services.ServiceRange(bits(cidr), address), 1)

    def admit(self, service: int, *cidrs: str, nodeport: int = 0) -> None:
        """Set the clients that a service's restricted frontends admit."""
        for cidr in cidrs:
            address = ip_network(cidr).network_address
            key = services.SourceRange(64 + bits(cidr), service, nodeport, address)
            self.put("source_ranges", key, 1)

    def withdraw(self, *frontends: str) -> None:
        self.delete("services", [frontend(text) for text in frontends])

    def ingress(self, packet: Packet | bytes, device: str = "uplink", priority: int = 0) -> Outcome:
        """Let the packet come in from a device."""
        return self._run("ingress", bytes(packet), device, device, priority)

    def egress(
        self,
        packet: Packet | bytes,
        device: str = "uplink",
        into: str | None = "uplink",
        priority: int = 0,
    ) -> Outcome:
        """Let the packet leave by a device; it came in by another device, or is the node's own
        (None).
        """
        return self._run("egress", bytes(packet), device, into, priority)

    def through(self, packet: Packet, into: str = "uplink", out: str = "uplink") -> Packet:
        """Return the packet as it leaves, after ingress, the stack's forwarding and egress."""
        came = self.ingress(packet, into)
        assert came.action == "pass", came
        left = self.egress(forwarded(came.packet), out, into)
        assert left.action == "pass", left
        return left.packet

    def exchange(self, table: str) -> None:
        """Swap the flows' entries of one hook, including their checks."""
        flows = self.maps[table]
        entries = list(flows.packed_items())
        for hook in Hook:
            found = [pair for pair in entries if flows.key.unpack(pair[0]).hook == hook]
            values = [value for _, value in found]
            for (key, _), value in zip(found, [*values[1:], *values[:1]], strict=True):
                bpf.map_update(flows.fd, key, value)

    def flows(self, protocol: str = "tcp") -> dict[str, Flow]:
        """Return the entries of a map of flows, by hook and addresses: "ingress 10.1.0.1:5 >
        10.2.0.1:80".
        """
        table = self.maps["tcp_flows" if protocol == "tcp" else "other_flows"]
        return {spelled(key): flow for key, flow in table.items()}

    def flow_counters(self, protocol: str = "tcp") -> tuple[int, ...]:
        """Return the numbers of entries made, ended and refused, and of half-open flows
        displaced.
        """
        return tuple(self.maps["flow_stats"].get(0 if protocol == "tcp" else 1))

    def _run(
        self, hook: str, frame: bytes, device: str, into: str | None, priority: int
    ) -> Outcome:
        before = self.counted
        came_by = self.devices[into] if into and hook == "egress" and knows_ingress_device() else 0
        index = self.devices[device]
        ran = run_program(
            self.hooks[hook],
            frame,
            ifindex=index,
            ingress_ifindex=came_by,
            priority=priority,
            complete=self.complete,
        )
        self.priority = ran.priority
        self.counted = self._verdicts()
        moved = {word: count - before[word] for word, count in self.counted.items()}
        verdicts = {word: count for word, count in moved.items() if count}
        outcome = Outcome(ACTIONS[ran.retval], ran.packet, verdicts)
        _examine(wire.without_priority(frame) if hook == "ingress" else frame, outcome)
        return outcome

    def _verdicts(self) -> dict[str, int]:
        table = self.maps["verdicts"]
        return {word: table.get(number) for number, word in VERDICTS.items() if word != "s"}


@functools.cache
def knows_ingress_device() -> bool:
    """Whether a test run can set the device where its packet came in; not on 5.10."""
    (attach,) = set(loader.PACKET_SECTIONS.values())
    code = bytes.fromhex("b7000000000000009500000000000000")
    probe = loader.load_one("probe", attach, code)
    try:
        run_program(probe, bytes(64), ifindex=1, ingress_ifindex=1)
    except KernelError:
        return False
    finally:
        os.close(probe)
    return True


def _examine(frame: bytes, outcome: Outcome) -> None:
    """Check the properties of every packet.

    An answer's own checksums are right, whatever it quotes.
    """
    is_shadow = "refused" in outcome.verdicts and outcome.frame == frame
    if "refused" in outcome.verdicts and not is_shadow and "reject_limited" not in outcome.verdicts:
        assert wire.faults(outcome.frame) <= {f"quoted {fault}" for fault in wire.faults(frame)}
    elif outcome.action == "pass":
        assert len(outcome.frame) == len(frame)
        assert wire.untouchable(outcome.frame) == wire.untouchable(frame)
        assert wire.faults(outcome.frame) <= wire.faults(frame)


def spelled(key: Tuple) -> str:
    source = at(str(key.source), key.source_port)
    return f"{HOOKS[key.hook]} {source} > {at(str(key.destination), key.destination_port)}"


def _empty(table: Map) -> None:
    if table.spec.name == "no_frontends" or table.spec.kind == "RINGBUF":
        return
    if isinstance(table, MappedArray):
        table.memory[:] = bytes(len(table.memory))
    elif isinstance(table, Counters):
        table.zero(range(min(table.spec.entries, COUNTED_IDS)))
    elif table.spec.kind != "ARRAY":
        table.delete([table.key.unpack(key) for key, _ in table.packed_items()])
