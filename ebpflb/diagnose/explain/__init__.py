# SPDX-License-Identifier: Apache-2.0
"""Why a connection goes where it goes: asks the datapath itself (datapath/recording), and says in
words what its programs have noted.

question  ADDRESS:PORT/PROTOCOL as it is typed
asking    who asks: the node, a pod, or a client outside
facts     the rows of maps that steps refer to
words     steps -> sentences
ways      a socket's call, and a packet from device to device and its reply back
answer    all of it
"""
