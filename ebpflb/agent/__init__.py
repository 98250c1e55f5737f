# SPDX-License-Identifier: Apache-2.0
"""The agent keeps the maps of one node in the state that the cluster's objects require.

loop              messages, the inbox, what a part is, and the loop over the parts
build             creates all of these objects: the list of parts, and the workers beside them
sync              applies events to the cluster's state, and lets the next two write
service_sync      which Services are planned next, and how they are planned and written
node_sync         loads the programs; writes the facts about this node: devices, settings
engine            which engine translates new flows; the nft table of the netfilter engine
audit             compares the kernel with the plan; for doctor the cluster's objects too
reporter          the parts that only observe: health, metrics, Events, history, status
inspection        answers the questions of commands about Services
canary_sync       service ports for doctor's own check, and for a probe of each uplink
monitoring        serves `ebpflb monitor`
endpoint_health   sets endpoints aside that do not answer this node
rebalance         moves idle connections to endpoints that came later
node_local        asks the listeners on this node that Services name whether they answer
node_readiness    says in the API whether Services work on this node
address_owner     answers for the load balancer addresses that this node owns
address_writer    gives Services load balancer addresses from the pools
hand_over         hands requests to other nodes that have their endpoints
hand_over_test    tests which nodes these may be
missed_ends       ends sockets and counted connections whose end no program saw
stale             ends connections that lead to endpoints which no longer serve
"""

from ebpflb.agent.build import build_agent
from ebpflb.agent.loop import Agent, Inbox, Stop

__all__ = ["Agent", "Inbox", "Stop", "build_agent"]
