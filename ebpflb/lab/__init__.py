# SPDX-License-Identifier: Apache-2.0
"""A small cluster on one machine, of network namespaces and cgroups: for demo, tests and bench.

hosts    namespaces, cgroups and processes, all gone at the end
traffic  what runs in them: servers that say their name, clients that count the answers
sockets  sockets on a host, used from here
agents   `ebpflb run` on a node of the lab
objects  Services and EndpointSlices as manifests
demo     the story that `ebpflb demo` tells
"""
