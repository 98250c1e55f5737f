# SPDX-License-Identifier: Apache-2.0
"""An agent on a node with three devices that knows one Service and its Node."""

from dataclasses import replace
from ipaddress import ip_address
from typing import Any

from ebpflb.kernel.node.device_watch import DevicesChanged
from ebpflb.lab import manifests
from ebpflb.model.devices import Device
from ebpflb.model.events import Kind
from tests.agent.fakes import Harness, listed, service, slices

V4, POD = ip_address("192.0.2.1"), ip_address("192.0.2.2")
LO = Device(1, "lo", True, True, 0, (ip_address("127.0.0.1"),), ())
ETH = Device(2, "eth0", False, True, 0, (V4,), (V4,))
BRIDGE = Device(3, "cni0", False, True, 0, (POD,), (POD,))
PORT = Device(4, "veth1", False, True, 3, (), (), kind="veth")
SERVICES = listed(Kind.SERVICE, service("a", "10.96.0.1"))
SLICES = listed(Kind.ENDPOINT_SLICE, slices("a", "10.1.0.1"))
NODE = manifests.node("node-1", str(V4)) | {"spec": {"podCIDRs": ["10.244.1.0/24"]}}
NODES = listed(Kind.NODE, NODE)


def here(*devices: Device) -> DevicesChanged:
    return DevicesChanged((LO, *devices))


def start(harness: Harness, **chosen: Any) -> Harness:
    """Return a started harness for which everything has been listed."""
    harness.options = replace(harness.options, **chosen)
    harness.start()
    harness.send(here(ETH, BRIDGE), SERVICES, SLICES, NODES)
    return harness
