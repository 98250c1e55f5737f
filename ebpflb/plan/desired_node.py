# SPDX-License-Identifier: Apache-2.0
"""The desired content of the maps for this node: its devices, routes and settings."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from msgspec import Struct

from ebpflb.model import devices
from ebpflb.model.addresses import Address, Family, Network, family
from ebpflb.model.devices import AddressByFamily, Device, Devices, LocalDetector
from ebpflb.model.route_sources import RouteSource
from ebpflb.plan.entries import (
    NO_PREFIX,
    NO_V4,
    NO_V6,
    DeviceEntry,
    Prefix,
    RouteKey,
    prefix_of,
    route_key,
)

_DETECT = frozenset({"detect_local"})


class DesiredNode(Struct, frozen=True, dict=True):
    """The desired content of the maps for this node.

    ``known`` are all devices, ``served`` those with programs; ``primary`` are the Node's addresses.
    ``detector`` and ``pod_cidrs`` decide which traffic comes from this node's pods.
    """

    known: Devices
    served: Devices
    primary: AddressByFamily
    detector: LocalDetector
    pod_cidrs: tuple[Network, ...]
    route_sources: tuple[RouteSource, ...] = ()

    @cached_property
    def _masters(self) -> frozenset[int]:
        """The masters of served devices: a packet passes the program at the port first."""
        return frozenset(device.master for device in self.served)

    def devices(self) -> dict[int, DeviceEntry]:
        """The entries of map devices, by ifindex."""
        sources = devices.masquerade_addresses(self.known, self.primary)
        by_index = devices.by_index(self.known)
        return {
            device.index: DeviceEntry(
                *_both(sources[device.index]), frozenset(self._device_flags(device, by_index))
            )
            for device in self.served
        }

    def link_addresses(self) -> dict[str, int]:
        """The entries of map link_addresses."""
        return {device.mac: 1 for device in self.known if device.mac and not device.loopback}

    def sources_by_route(self, most: int) -> dict[RouteKey, Address]:
        """Return the entries of map route_sources, at most ``most``.

        The shortest prefixes are kept.

        A device without route sources, such as a bridge's port, has its master's.
        """
        if not self.route_sources:
            return {}
        found: dict[int, list[RouteSource]] = defaultdict(list)
        for each in self.route_sources:
            found[each.ifindex].append(each)
        by_index = devices.by_index(self.known)
        entries = {
            route_key(device.index, each.network): each.source
            for device in self.served
            for each in _first(found[m.index] for m in devices.with_masters(device, by_index))
        }
        return dict(sorted(entries.items(), key=lambda entry: entry[0].length)[:most])

    def settings(
        self, options: dict[str, Any], covering: Mapping[Family, Prefix]
    ) -> dict[str, Any]:
        """Return the fields of map settings; ``options`` has those that the operator sets.

        ``covering`` holds the prefixes that cover all cluster IPs (see ``ClusterIps.cover``).
        """
        pods = {family(n): prefix_of(n) for n in self.detector.networks(self.pod_cidrs)}
        active = self.detector.by_device or bool(pods)
        node_v4, node_v6 = _both(devices.node_addresses(self.known, self.primary))
        found = {"node_v4": node_v4, "node_v6": node_v6, **_fields("pods", pods)}
        flags = options["flags"] | (_DETECT if active else frozenset())
        return {**options, **found, **_fields("span", covering), "flags": flags}

    def _device_flags(self, device: Device, known: Mapping[int, Device]) -> Iterator[str]:
        if self.detector.is_pod_device(device, known):
            yield "pods"
        if devices.is_host_only(device, known):
            yield "host_only"
        if devices.is_bridged(device, known):
            yield "bridged"
        if device.index in self._masters:
            yield "master"


def _first(lists: Iterable[list[RouteSource]]) -> list[RouteSource]:
    return next(filter(None, lists), [])


def _fields(name: str, found: Mapping[Family, Prefix]) -> dict[str, Prefix]:
    return {f"{name}_v{f.value}": found.get(f, NO_PREFIX) for f in Family}


def _both(addresses: AddressByFamily) -> tuple[Address, Address]:
    return addresses.get(Family.IPV4, NO_V4), addresses.get(Family.IPV6, NO_V6)
