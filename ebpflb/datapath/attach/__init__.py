# SPDX-License-Identifier: Apache-2.0
"""Programs in force: at the cgroup, and at every device.

cgroup_links     at the cgroup, by links
device_programs  at devices, by whichever of the two this kernel has:
tcx              tcx links
clsact           filters, where there is no tcx
netns_cookie     the cookie of our network namespace
removal          everything is taken off and unpinned
hook_stats       how often and how long the hooks run
"""
