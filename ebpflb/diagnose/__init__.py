# SPDX-License-Identifier: Apache-2.0
"""What an operator asks, answered from the pins and the kernel alone: no agent need run.

check    can this node run it, feature by feature
dump     every map as rows, numbers joined to names
packets  those of the packet path
content  what the agent wrote, that rows refer to
flow_list    the flow_list through the packet path
"""
