# SPDX-License-Identifier: Apache-2.0
"""A small cluster of network namespaces and cgroups on one machine, for demo, tests and bench.

hosts       nodes, pods and outside hosts, with their processes; all are removed at the end
netns       a network namespace: devices, routes, sysctls, packet filters
router      the network that connects nodes and outside hosts
cni         a pod network, as the CNI plugin bridge builds it
traffic     runs on hosts: servers that send their name, clients that count the replies
agents      `ebpflb run` on a node of the lab
manifests   Services and EndpointSlices as manifests
demo        the steps of `ebpflb demo`
"""
