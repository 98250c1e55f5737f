# SPDX-License-Identifier: Apache-2.0
"""conntrack's own timeouts of UDP, in seconds: nf_conntrack_udp_timeout and ..._timeout_stream."""

KERNEL_UDP_TIMEOUT, KERNEL_UDP_STREAM_TIMEOUT = 30, 120
