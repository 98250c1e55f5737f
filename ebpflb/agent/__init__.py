# SPDX-License-Identifier: Apache-2.0
"""The agent keeps the maps of one node in the state that the cluster's objects require.

loop              takes events, applies them, plans, writes, publishes; runs as long as the agent
inspection        answers the questions of commands about services
canary_sync       service ports for doctor's own check, for a short time
monitoring        serves `ebpflb monitor`
engine_choice     which engine translates new flows
node_sync         writes the facts about this node: devices, addresses, settings
program_loader    loads the programs, and tries again after a failure
backlog           the order in which namespaces' Services are planned, and their budgets
service_sync      selects, plans and writes the services that changed
audit             compares the kernel with the plan, and corrects differences
doctor_audit      compares the cluster's objects with the agent's, for doctor
reporter          health and metrics, from the loop's actions
api_servers       keeps the API servers' addresses in a file
endpoint_health   sets endpoints aside that do not answer this node
node_local        asks the listeners on this node that Services name whether they answer
node_readiness    says in the API whether Services work on this node
uplink_canary     looks at the node's own devices for filters of others that lose a choice
missed_ends       ends sockets and counted connections whose end no program saw
netfilter_sync    keeps the nft table of the netfilter engine, an element for each backend
on_removal        resets connections to removed endpoints
stale_udp         moves UDP clients away from endpoints that no longer serve
build             creates all of these objects, and the workers beside them
"""

from ebpflb.agent.build import build_agent
from ebpflb.agent.loop import Agent, Inbox, Stop

__all__ = ["Agent", "Inbox", "Stop", "build_agent"]
