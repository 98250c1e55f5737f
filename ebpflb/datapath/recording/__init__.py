# SPDX-License-Identifier: Apache-2.0
"""Runs the datapath once more, beside the one in force, to see what it decides and why.

recording_programs  loads that variant, and asks what becomes of a call or packet

Nothing on the node changes by it and no packet is sent: programs run by BPF_PROG_TEST_RUN.
"""
