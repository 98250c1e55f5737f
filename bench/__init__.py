# SPDX-License-Identifier: Apache-2.0
"""Measurements on a small cluster of network namespaces on this machine; needs root.

connect    what a ClusterIP costs, and what the agent costs: `make bench-connect`
latency    its first half: requests in turns, the hooks' run time
agent      its second half: memory, starts, changes
stage      the nodes, pods and agents that it measures
pods       what runs in the pods: a server, and a client that takes the times

nodeport   NodePorts from outside, beside kube-proxy's rules: `make bench-nodeport`
packets    its second half: what a packet costs
field      the nodes that it measures, one for each way to serve
kubeproxy  the rules that kube-proxy would write
load/      client and server, in C

services   thousands of Services and their endpoints, as manifests
hooks      the programs: their run time by the kernel's own statistics; off, and on again
report     figures beside their targets
"""
