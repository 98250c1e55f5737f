# SPDX-License-Identifier: Apache-2.0
"""Explain why a connection goes where it goes.

The datapath itself is run with recording programs (kernel/recording.py), and the recorded steps are
put into words.

asking    the client: the node, a pod, or a client outside
ways      a socket's call, and a packet from device to device: the programs' steps in sentences
answer    the complete answer
"""
