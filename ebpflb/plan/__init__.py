# SPDX-License-Identifier: Apache-2.0
"""What has to change in the maps: desired state against actual state, as pure values.

How the endpoints of a service port become slots:

desired          a service port and its selection, and the node -> what the maps should hold
map_contents     the actual state at start: what is read back from the maps
planner          desired state against actual state -> a plan: allocates slots and ids

What the planner is made of:

allocators       ids and ranges of slots: which are free, which are in quarantine
space            how much of a service port fits, and the shares of namespaces
service_entries  the map entries of one service port
frontends        the entries of map services: which service port has which frontend
removed_endpoints  which endpoints have gone, and since when

comparison       what the maps hold against what is planned

service_page     a Service as the operator sees it, as far as the maps hold it
tables           what a service draws from instead of its slots: Maglev's, and by weight

canary           the service ports of `ebpflb doctor`'s own

Apart from services:

entries          the map entries, as values
flow_entries     which entries of the packet path are one flow, and how it stands
"""
