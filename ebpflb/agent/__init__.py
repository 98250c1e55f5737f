# SPDX-License-Identifier: Apache-2.0
"""The agent: it keeps the maps of one node as the cluster's objects want them.

loop              takes events, applies them, plans, writes, publishes; runs as long as the agent
inspection        answers what commands ask about services
canary_sync       service ports of doctor's own, for a short time
monitoring        what it does for `ebpflb monitor`
node_sync         writes what the datapath knows of this node: devices, addresses, settings
fresh_list        what a fresh list asks for that the maps do not hold
program_loader    loads the programs, again where that failed
service_sync      selects, plans and writes the services that changed
audit             compares the kernel with what is planned, and puts back what differs
reporter          health and metrics, from what the loop does
due_worker        a thread that does something whenever it is due
missed_ends       ends sockets and counted connections whose end no program saw
netfilter_sync    keeps the nft table of the engine netfilter, an element for each backend
on_removal        resets connections to endpoints that have gone
stale_udp         moves UDP clients off endpoints that serve no longer
build             builds all of these, and what works beside them
"""

from ebpflb.agent.build import build_agent
from ebpflb.agent.loop import Agent, Inbox, Stop

__all__ = ["Agent", "Inbox", "Stop", "build_agent"]
