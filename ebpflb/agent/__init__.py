# SPDX-License-Identifier: Apache-2.0
"""The agent: it keeps the maps of one node as the cluster's objects want them.

loop          takes events, applies them, plans, writes, publishes; runs as long as the agent
node_sync     writes what the datapath knows of this node: devices, addresses, settings
service_sync  selects, plans and writes the services that changed
reporter      health and metrics, from what the loop does
engine_choice  which engine opens flows, by what is on the node now
memory        when the garbage collector runs
build         builds all of these, and what works beside them
"""

from ebpflb.agent.build import build_agent
from ebpflb.agent.loop import Agent

__all__ = ["Agent", "build_agent"]
