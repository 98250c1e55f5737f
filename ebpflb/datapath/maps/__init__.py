# SPDX-License-Identifier: Apache-2.0
"""What lives in the maps, and where the maps live.

layout     bpf/layout.h and bpf/maps.h as Python sees them
records    how each map's keys and values read
bpf_map    the maps as collections of values
pins       the state directory: what stays when no agent runs
sweep      idle flows go
occupancy  how full the LRU maps are
"""
