# SPDX-License-Identifier: Apache-2.0
"""Measurements on a small cluster of network namespaces on this machine; needs root.

connect        what a ClusterIP costs, and what the agent costs: `make bench-connect`
latency        its first half: requests in turns, the hooks' run time
agent          its second half: memory, starts, changes
connect_lab    the nodes, pods and agents that it measures
pod_program    what runs in the pods: a server, and a client that measures the times

agent_load     the agent under many changes: `make bench-agent`
api_program    the fake API server that sends them

nodeport       NodePorts from outside, beside kube-proxy's rules: `make bench-nodeport`
node_cost      what a packet costs the node, by streams of established flows
flow_frames    the frames of these streams
packets        its last part: what a packet costs in our programs
nodeport_lab   the nodes that it measures, one for each implementation
kubeproxy      the rules that kube-proxy would write
load/          client, server and sender of streams, in C

services       thousands of Services and their endpoints, as manifests
hooks          the programs: their run time by the kernel's statistics; detaches and attaches
temporary_lab  a lab and a folder that are removed at the end
report         figures beside their targets
"""
