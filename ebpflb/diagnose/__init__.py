# SPDX-License-Identifier: Apache-2.0
"""What the commands `check`, `maps` and `flows` show, from the pins and the kernel: no agent has to
run.

check      whether this node can run ebpflb, feature by feature
dump       every map as rows, with names instead of ids
packets    the rows of the maps of the packet path
snapshot   the maps that the agent writes, which those rows refer to
flow_list  the flows of the flow tables, to list and to delete
connection_list  the same of the flows that conntrack keeps
"""
