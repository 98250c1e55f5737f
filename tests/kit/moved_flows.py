# SPDX-License-Identifier: Apache-2.0
"""Waits for moved UDP flows: the flow tables move them at once, netfilter soon after.

Like kube-proxy (kube-proxy.md 11.1), the agent deletes UDP entries that lead elsewhere once the
change is in force.
"""

from ipaddress import ip_address

from ebpflb.kernel.netfilter import conntrack
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from tests.kernel.node import nodes
from tests.kit.lab_cluster import TARGET


def wait_until_only(node: Host, source_port: int, *backends: Host) -> None:
    """Wait until no entry with this client port leads to other endpoints than these.

    Entries to an endpoint's own address, as from hooked sockets, do not count.
    """
    allowed = {ip_address(address) for host in backends for address in (host.v4, host.v6)}

    def is_so() -> bool:
        with nodes.entered(node.netns):
            entries = [
                entry
                for entry in conntrack.connections(lambda _, __, port: port != TARGET)
                if entry.original.source_port == source_port
            ]
        return all(entry.is_translated and entry.reply.source in allowed for entry in entries)

    wait_until(f"flows of port {source_port} lead to endpoints of now", is_so)
