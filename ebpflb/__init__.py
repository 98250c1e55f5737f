# SPDX-License-Identifier: Apache-2.0
"""A Kubernetes service load balancer in eBPF; an EndpointSlice's way reads down this package.

cluster -> model -> plan -> datapath, with agent as the corridor between the rooms.
"""
