# SPDX-License-Identifier: Apache-2.0
"""What commands show from the pins and the kernel: no agent has to run.

pins             a node's directories and pinned maps, and whether a command can see them
node_status      what `ebpflb status` says about this node; whether kube-proxy is overruled there
check            whether this node can run ebpflb, feature by feature
node_checks      sysctls, maps, whose sockets the hooks see, and routes to endpoints
canary_check     connections of doctor's own through each path
firewall         which netfilter rules may not see Services, or may drop requests to pods
ask              what the running agent answers
events           the events that the agent sends on for `ebpflb monitor`
dump             every map as rows, with names instead of ids
snapshot         the maps that the agent writes, to which the rows of `dump` refer
explain          why a connection goes where it goes, by asking the programs themselves
report           one archive of all this, for somebody else
flow_list        the flows of the flow tables and of conntrack, to list and to delete
"""
