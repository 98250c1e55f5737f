# SPDX-License-Identifier: Apache-2.0
"""The working memory of the packet programs: struct scratch, and what is in it."""

from typing import NamedTuple

from ebpflb.model.addresses import Address
from ebpflb.plan import entries
from ebpflb.plan.flow_entries import Flow, Tuple


class SelectedBackend(NamedTuple):
    """C: struct selection."""

    backend: entries.Backend
    service: entries.ServiceEntry
    is_local_client: int
    is_assigned: int
    is_pending: int


class Ending(NamedTuple):
    between: Tuple
    reply_tuple: Tuple
    request_tuple: Tuple


class ReadPacket(NamedTuple):
    tuple: Tuple
    transport: int
    end: int
    second: int
    id: int
    piece: int
    v6: int
    options: int
    opens: int
    ends: int
    sequence: int
    acknowledgment: int
    bytes: int
    tag: int
    chosen: int
    reflected: int
    header: int
    control: int


class NextHop(NamedTuple):
    family: int
    address: Address


class PortSequence(NamedTuple):
    first: int
    size: int
    next: int
    step: int


class Scratch(NamedTuple):
    packet: ReadPacket
    to: Tuple
    known: Flow
    other: Flow
    selection: SelectedBackend
    request_entry: Flow
    reply_entry: Flow
    snat_entry: Flow
    reply_tuple: Tuple
    snat_tuple: Tuple
    former_request_tuple: Tuple
    source: Address
    claim: Tuple
    ending: Ending
    holder_created: int
    holder_connection: int
    oldest: int
    oldest_created: int
    oldest_port: int
    mtu: int
    device: int
    next: NextHop
    ports: PortSequence
