# SPDX-License-Identifier: Apache-2.0
"""The state of the cluster and the decisions that kube-proxy makes of it, as pure functions.

How objects become the endpoints that a service port uses:

objects          the API's objects, with only the fields that are used here
events           what a source reports: an object was added, changed or removed
cluster_state    the state of the cluster: apply an event, read which services changed
applied          what an event has changed in it
services         one Service -> its service ports, per family     (kube-proxy.md 1)
endpoint_slices  an EndpointSlice as it is stored, read once      (kube-proxy.md 2)
endpoints        the EndpointSlices of a Service -> its endpoints (kube-proxy.md 2)
unused           why an endpoint is not among them
route_sources    for which destinations the kernel is asked for its source
selection        which of the endpoints a service port uses       (kube-proxy.md 3)

drift            what differs from what is planned
agreement        whether the state of the cluster is what a fresh list says
admission        what the operator lets Services do on this node
scheduler        how a new connection gets its endpoint
on_removal       what becomes of connections to an endpoint that has gone
slow_start       in which time the weight of a new endpoint grows
address_fields   the addresses that a Service lists
annotations      how messages name an annotation
service_choices  what a Service's annotations choose
weights        how many connections endpoints get, by their slice
served_services  which Services are served; the others are left to kube-proxy
external_ips     which of a Service's external IPs are served
nodeport_ranges  whose requests a Service's NodePorts admit
new_warnings     what is wrong with an object, told once

What else follows from the objects:

nodes               a Node -> its zone, addresses, and eligibility     (kube-proxy.md 13.1, 17)
service_cidrs       a ServiceCIDR -> the ranges of cluster IPs         (kube-proxy.md 6.3)
health_check        what a health-check node port answers              (kube-proxy.md 10)
no_local_endpoints  service ports without endpoint under policy Local  (kube-proxy.md 14)
trigger_times       when the changes happened that wait for a sync     (kube-proxy.md 16.4)

The node's devices and addresses:

devices             which devices are served, and the addresses that traffic is masqueraded to
nodeport_addresses  on which of its addresses NodePorts are served     (kube-proxy.md 8)
local_detector      which traffic comes from pods                      (kube-proxy.md 5.2)
packet_path         which engine translates packets, and why
packet_mark         how netfilter recognizes translated packets
bridged_pods        whether a bridge keeps pods from what netfilter translates for them
udp_timeouts        how long conntrack keeps a silent flow of UDP      (kube-proxy.md 11.3)

The agent itself:

pulse  whether its loop runs, and in time

What kube-proxy leaves on a node (kube-proxy.md 17):

kube_proxy       the names of it, and what was detected of a kube-proxy
iptables_rules   its chains and rules in the output of iptables-save
virtual_servers  its virtual servers of IPVS

Parsing:

field_checks  checks of single fields; they raise InvalidObject
addresses     addresses and networks as Kubernetes reads them
kernel_lists  the kernel's lists of numbers, of CPUs or ports
durations     values such as "1h0m0s"
"""
