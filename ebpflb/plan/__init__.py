# SPDX-License-Identifier: Apache-2.0
"""What has to change in the maps: desired state against actual state, as pure values.

How the endpoints of a service port become slots:

desired_service  a service port and its selection -> the frontends and backends it should have
claims           which service port gets a frontend that several of them claim
map_contents     the actual state at start: what is read back from the maps
planner          desired state against actual state -> a plan: allocates slots and ids
plan             what to write into the maps, in which order

What the planner is made of:

allocators       ids and ranges of slots: which are free, which are in quarantine
totals           what all of them have together
space            how much of a service port fits, and the shares of namespaces
waiting          the service ports of which something does not fit, and when they are tried again
scheduling       a scheduler as flags of frontends
service_entries  the map entries of one service port
frontends        the entries of map services: which service port has which frontend
cluster_ips      the entries of map cluster_ips
removed_endpoints  which endpoints have gone, and since when
watched_ports    the service ports of which that matters, and what the next agent has to know
source_ranges    the entries of map source_ranges: which clients restricted frontends admit
prefixes         networks as keys of the maps, and prefixes that cover many of them

comparison       what the maps hold against what is planned

service_page     a Service as the operator sees it, as far as the maps hold it
service_facts    what the agent knows of a Service: also why an endpoint is not used
slow_starts      the weights of new endpoints, as time goes on
tables           what a service draws from instead of its slots: Maglev's, and by weight
wording          how names and addresses are written

canary           the service ports of `ebpflb doctor`'s own

Apart from services:

entries          the map entries, as values
desired_node     what the maps should hold about this node: settings and devices
flow_entries     which entries of the packet path are one flow, and how it stands
connections      the entries of conntrack, and how a connection stands
expiry           when a flow has been idle for too long
"""
