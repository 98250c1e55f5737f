# SPDX-License-Identifier: Apache-2.0
"""How names and addresses are written for the operator, the same way everywhere."""

from ebpflb.model.addresses import Address
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.entries import Flags, Frontend

NODE_PORT = "NodePort"
_PROTOCOLS = frozenset(Protocol)


def service_name(name: PortName | None, number: int) -> str:
    """NAMESPACE/NAME:PORT/PROTOCOL, or #ID if the id has no name; "" for the id 0, no service."""
    return f"{name}/{protocol_name(name.protocol)}" if name else f"#{number}" if number else ""


def protocol_name(number: int) -> str:
    """Its number where no agent writes such a protocol, and no program."""
    return Protocol(number).name if number in _PROTOCOLS else f"protocol {number}"


def host_port(address: Address, port: int) -> str:
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def frontend_kind(frontend: Frontend, flags: Flags) -> str:
    """The kind of the frontend's address, in Kubernetes' words."""
    if frontend.address.is_unspecified:
        return NODE_PORT
    if "load_balancer" in flags:
        return "LoadBalancer"
    return "ExternalIP" if "external" in flags else "ClusterIP"
