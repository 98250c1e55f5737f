# SPDX-License-Identifier: Apache-2.0
"""From bpf/ to programs and maps in the kernel.

datapath    one node's maps and programs, as the agent uses them
probe       what this kernel can do, by trying
kernel      bpf(2), a function a command
attributes  and its structs

attach      programs in force at the cgroup and at devices
programs    compiled and loaded
maps        what lives in the maps, and where the maps live
"""
