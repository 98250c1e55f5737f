# SPDX-License-Identifier: Apache-2.0
"""What the programs remember of packets that open no flow."""

from typing import NamedTuple

from ebpflb.model.addresses import Address


class FragmentKey(NamedTuple):
    source: Address
    destination: Address
    id: int
    protocol: int
    hook: int


class FragmentPorts(NamedTuple):
    seen: int
    source_port: int
    destination_port: int


class Forwarded(NamedTuple):
    since: int
    hops: int
    replied: int
