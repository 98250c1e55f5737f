# SPDX-License-Identifier: Apache-2.0
"""The state of the cluster, and kube-proxy's decisions about it, as pure functions.

How objects become the endpoints that a service port uses:

objects          the API's objects, with only the fields that are used here
events           reports of a source and of the audit: what has changed, what differs
cluster_state    the state of the cluster: apply an event, read which services changed
services         one Service -> its service ports, per family     (kube-proxy.md 1)
endpoint_slices  an EndpointSlice as it is stored, read once      (kube-proxy.md 2)
endpoints        the EndpointSlices of a Service -> its endpoints (kube-proxy.md 2)
endpoint_health  which endpoints are set aside, by what clients on this node have seen
facts            what this node observes, and what each fact changes in the plan

annotations      the annotations of ebpflb, and warnings about them

pools            pools of load balancer addresses, and which Service gets which of them
claims           this agent's copy of what Services ask of the pools
hand_over        which requests are handed to another node, and to which nodes

Other facts from the objects:

api_servers         the endpoints of default/kubernetes, which are kept
nodes               a Node -> its zone, addresses, and eligibility     (kube-proxy.md 13.1, 17);
                    what it says of its Services, its listeners, and whether its agent runs

The node's devices and addresses:

devices             which devices are served, and the addresses that traffic is masqueraded to
packet_path         which engine translates packets, and why

Leftovers of kube-proxy on a node (kube-proxy.md 17):

kube_proxy       the names that kube-proxy uses, and what was detected of a kube-proxy

Parsing:

addresses     addresses, networks, durations, sizes and lists of numbers, as they are written
"""
