# SPDX-License-Identifier: Apache-2.0
"""A Kubernetes service load balancer in eBPF.

The packages in the order in which a change of an EndpointSlice passes through them:

cluster        reads the objects: a watch of the API server, or files
model          the cluster state, and which backends a frontend has
plan           what the maps should hold, and the ordered writes that lead there
datapath       the maps and programs in the kernel
agent          the loop that calls them, event by event

Around them: ``cli`` (commands), ``configuration`` (kube-proxy's file and flags), ``serve`` (health,
metrics, status), ``node`` (the machine), ``stale_udp`` (UDP sockets of removed backends),
``diagnose`` (what the commands show), ``lab`` (a small cluster for demo, tests and benchmarks).
"""
