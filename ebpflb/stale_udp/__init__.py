# SPDX-License-Identifier: Apache-2.0
"""Connected UDP sockets whose backend serves no more (kube-proxy.md 11.1).

worker        the thread that looks for them when a plan says that there may be some
find          which they may be, by the maps
untranslated  and those that were here before us
resolve       ends them by netlink
rebind        or has the packet path take them elsewhere
"""
