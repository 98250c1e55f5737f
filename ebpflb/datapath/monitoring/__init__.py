# SPDX-License-Identifier: Apache-2.0
"""Events of the datapath's decisions, while somebody looks.

variant    the monitoring variant of the programs, and its maps
ring       the ring buffer in which they write events
protocol   what an agent and `ebpflb monitor` say to each other
decisions  what is asked for, and events as values
"""
