# SPDX-License-Identifier: Apache-2.0
"""A small cluster on one machine, of network namespaces and cgroups: for demo, tests and bench.

hosts       nodes, pods and outside hosts, with their processes; all gone at the end
namespaces  a network namespace, and what one does in it
router      what nodes and outside hosts are plugged into
cni         three ways to connect pods
traffic     what runs on hosts: servers that say their name, clients that count the answers
sockets     sockets on a host, used from here
agents      `ebpflb run` on a node of the lab
objects     Services and EndpointSlices as manifests
demo        the story that `ebpflb demo` tells
"""
