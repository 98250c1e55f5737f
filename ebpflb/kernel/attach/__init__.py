# SPDX-License-Identifier: Apache-2.0
"""Attaches the programs to the cgroup and to every device.

cgroup_links     at the cgroup, by links
device_programs  at devices, by the way that this kernel has:
tcx              tcx links
clsact           filters, on kernels without tcx
netns_cookie     the cookie of our network namespace
"""
