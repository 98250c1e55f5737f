# SPDX-License-Identifier: Apache-2.0
"""A Kubernetes service load balancer in eBPF.

The packages in the order in which a change of an EndpointSlice passes through them:

cluster  reads the objects: a watch of the API server, or files
model    the cluster state, and which backends a frontend has
plan     what the maps should hold, and the ordered writes that lead there
entries  the entries of the maps, as values
kernel   the maps and programs in the kernel, netfilter, and the node's devices
agent    the loop that calls them, event by event

Around them: ``config`` (kube-proxy's file and flags), ``serve`` (health, metrics, status),
``history`` (what was written, and why), ``tools`` (what the commands show), ``cli`` (the commands),
``lab`` (a small cluster for demo, tests and benchmarks).
"""
