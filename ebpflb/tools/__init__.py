# SPDX-License-Identifier: Apache-2.0
"""What commands show from the pins and the kernel: no agent has to run.

pins             a node's directories and pinned maps, and whether a command can see them
node_status      what `ebpflb status` says of this node
check            whether this node can run ebpflb, feature by feature
node_checks      sysctls, maps, whose sockets the hooks see, and routes to endpoints
canary_check     connections of doctor's own through each path
neighbours       what it says of others' programs, rules and routes that matter to the same traffic
kube_proxy       a kube-proxy beside programs that no agent updates
firewall         which rules of netfilter may not see Services, or drop what pods are sent
ask              what the running agent answers
events           the events that the agent sends on for `ebpflb monitor`
dump             every map as rows, with names instead of ids
snapshot         the maps that the agent writes, which those rows refer to
map_fill         how full the maps are
explain          why a connection goes where it goes: asks the programs themselves
report           one archive of all that, for somebody else
pseudonyms       other names and addresses there
flow_list        the flows of the flow tables and of conntrack, to list and to delete
"""
