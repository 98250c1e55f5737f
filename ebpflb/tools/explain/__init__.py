# SPDX-License-Identifier: Apache-2.0
"""Why a connection goes where it goes: asks the datapath itself (datapath/recording), and says in
words what its programs have noted.

asking    who asks: the node, a pod, or a client outside
words     steps -> sentences
ways      a socket's call, and a packet from device to device and its reply back
answer    all of it
"""
