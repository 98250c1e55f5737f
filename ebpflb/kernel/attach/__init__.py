# SPDX-License-Identifier: Apache-2.0
"""Attach the programs to the cgroup and to every device.

cgroup_links     at the cgroup, by links; the cookie of our network namespace
device_programs  at devices, in the way that this kernel supports:
tcx              tcx links
clsact           filters, on kernels without tcx
uplink_program   one more program at uplinks, while a part of the agent needs it, such as the one
                 that answers for load balancer addresses
"""
