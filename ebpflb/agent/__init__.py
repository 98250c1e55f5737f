# SPDX-License-Identifier: Apache-2.0
"""The agent: it keeps the maps of one node as the cluster's objects want them.

loop              takes events, applies them, plans, writes, publishes; runs as long as the agent
inbox             what other threads tell the loop
inspection        answers what commands ask about services
canary_sync       service ports of doctor's own, for a short time
canary_requests   what doctor asks of it
monitoring        what it does for `ebpflb monitor`
monitor_client    one that is connected
node_sync         writes what the datapath knows of this node: devices, addresses, settings
fresh_list        what a fresh list asks for that the maps do not hold
program_loader    loads the programs, again where that failed
service_sync      selects, plans and writes the services that changed
backlog           those that are still to be planned, of each namespace in turn
audit             compares the kernel with what is planned, and puts back what differs
audit_checks      what it compares
objects_check     likewise: what is planned, with a fresh list of the API
netfilter_check   likewise: the nft table of the engine netfilter, and its elements
host_changes      what it changes of the node, at the last moment, and undoes
write_log         the log's lines about what was written
publisher         the agent's status, where it has changed
reporter          health and metrics, from what the loop does
unreleased_sockets  forgets sockets that are gone though no program was told
ended_connections  ends counted connections that nothing remembers any more
engine_choice     which engine translates packets, by what is on the node now
netfilter_sync    keeps the nft table of the engine netfilter, an element for each backend
memory            when the garbage collector runs, and what malloc keeps
parts            what reaches beyond the process: source, datapath, history, ports
build             builds all of these, and what works beside them
"""

from ebpflb.agent.build import build_agent
from ebpflb.agent.inbox import Inbox, Stop
from ebpflb.agent.loop import Agent

__all__ = ["Agent", "Inbox", "Stop", "build_agent"]
