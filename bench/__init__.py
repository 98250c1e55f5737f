# SPDX-License-Identifier: Apache-2.0
"""Measurements on a small cluster of network namespaces on this machine; needs root.

connect   what a ClusterIP costs, and what the agent costs: `make bench-connect`
latency   its first half: requests in turns, the hooks' run time
agent     its second half: memory, starts, changes
stage     the nodes, pods and agents that it measures
services  thousands of Services and their endpoints, as manifests
pods      what runs in the pods: a server, and a client that takes the times
hooks     the programs: their run time by the kernel's own statistics; off, and on again
report    figures beside their targets
"""
