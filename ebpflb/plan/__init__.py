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
service_entries  the map entries of one service port
frontends        the entries of map services: which service port has which frontend
cluster_ips      the entries of map cluster_ips
source_ranges    the entries of map source_ranges: which clients restricted frontends admit
prefixes         networks as keys of the maps, and prefixes that cover many of them

Apart from services:

entries          the map entries, as values
desired_node     what the maps should hold about this node: settings and devices
flow_entries     which entries of the packet path are one flow, and how it stands
connections      the entries of conntrack, and how a connection stands
expiry           when a flow has been idle for too long
"""
