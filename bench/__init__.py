# SPDX-License-Identifier: Apache-2.0
"""Measurements on a small cluster of network namespaces on this machine; needs root.

__main__       runs all parts: `make bench`
parts          what these are, with their options and what is drawn of each
page           writes the figures into the pages that show them
plot           draws them: the one door to matplotlib
result         what a benchmark has measured, as JSON; how each begins and ends
report         figures beside their targets
histogram      quantiles of a Prometheus histogram, as ClusterLoader2 reads them
targets        what these are

connect        what a ClusterIP costs, and what the agent costs: `make bench-connect`
latency        its first half: requests in turns, the hooks' run time
agent          its second half: memory, starts, changes
connect_lab    the nodes, pods and agents that it measures
pod_program    what runs in the pods: a server, and a client that measures the times

agent_load     the agent under many changes: `make bench-agent`
api_program    the fake API server that sends them
api_lab        a node with an agent beside such a server

programming    network programming latency as ClusterLoader2 reads it, beside kube-proxy's

agents         many agents at one API server: what each costs, and the server
agents_program runs the agents of tests/simulation, which need no kernel

devices        a first start on a node with many devices, and what they cost afterwards

moved_datagrams  for how long a removed endpoint gets datagrams: flows, by entries of conntrack
ended_sockets  the same of a pod's connected socket, by pods
dns            what a DNS endpoint that dies costs, beside kube-proxy's clean-up

tenant         what 1.5 MB of each list that a tenant may write cost

growth         more services, endpoints, flows: `make bench-growth`
flow_growth    its last part: packets amid other flows
flow_program   a packet's cost by test runs; established: also beside another commit's

schedulers     what each scheduler means for clients: `make bench-schedulers`
queue_program  its client and servers
draws          what a draw costs: `make bench-draws`
shares         the share of an endpoint with long connections, on many nodes
held_program   its clients and servers

rebalance      connections that move to new endpoints: spread, and requests that fail
http_program   its clients and servers
zones          whether a zone preference could spill over, simulated

nodeport       NodePorts from outside, beside kube-proxy's rules: `make bench-nodeport`
node_cost      what a packet costs the node, by streams of established flows
flow_frames    the frames of these streams
node_parts     what each part of the engine netfilter costs such a packet
packets        its last part: what a packet costs in our programs
nodeport_lab   the nodes that it measures, one for each implementation
kubeproxy      the rules that kube-proxy would write
load/          client, server and sender of streams, in C

services       thousands of Services and their endpoints, as manifests
hooks          the programs: their run time by the kernel's statistics; detaches and attaches
temporary_lab  a lab and a folder that are removed at the end
"""
