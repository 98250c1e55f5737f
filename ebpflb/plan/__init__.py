# SPDX-License-Identifier: Apache-2.0
"""Compute what has to change in the maps: desired state against actual state, as pure values.

How the endpoints of a service port become slots:

desired          a service port and its selection -> what the maps should hold
map_contents     the actual state at start, read back from the maps
planner          desired state against actual state -> a plan: allocates slots and ids;
                 kernel/map_writer.py writes it

The parts of the planner:

space            where a service port's slots are, and how much of it fits; shares of namespaces
allocators       which slots and ids are free, and which are in quarantine
service_entries  the map entries of one service port
frontends        the entries of map services: which service port has which frontend
stale            which connections lead to endpoints that no longer serve

rebalance        how many connections leave an endpoint for a new one

comparison       compares the maps with the plan

tables           the tables from which a service draws instead of its slots: Maglev, and weights

handing          the maps of hand-overs: to which nodes requests are handed

canary           the service ports that `ebpflb doctor` adds for its own check
"""
