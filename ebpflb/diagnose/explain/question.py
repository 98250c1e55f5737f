# SPDX-License-Identifier: Apache-2.0
"""What a connection is to: ADDRESS:PORT, and a protocol."""

import re

from ebpflb.errors import one_line
from ebpflb.model.addresses import parse_address
from ebpflb.model.services import PROTOCOLS
from ebpflb.plan.entries import Frontend

_FORM = re.compile(r"(?:\[(?P<v6>[^\]]*)\]|(?P<v4>[^:\[\]]*)):(?P<port>\d{1,5})(?:/(?P<name>\w+))?")
EXAMPLE = "such as 10.96.0.10:80, [fd00::a]:53/udp or 192.0.2.1:30080/sctp"


def parse_question(text: str) -> Frontend:
    """Raises ValueError with a message for the operator."""
    found = _FORM.fullmatch(text)
    if not found:
        raise ValueError(f'"{one_line(text)}" is not ADDRESS:PORT[/tcp|udp|sctp], {EXAMPLE}')
    protocol, port = (found["name"] or "tcp").upper(), int(found["port"])
    if protocol not in PROTOCOLS:
        raise ValueError(f'"{one_line(protocol.lower())}" is not tcp, udp or sctp')
    if not 0 < port < 65536:
        raise ValueError(f"port {port} is not from 1 to 65535")
    address = parse_address(found["v6"] or found["v4"] or "")
    if address.is_unspecified or address.is_multicast:
        raise ValueError(f"{address} is no address of one host: no connection goes there")
    return Frontend(address, port, PROTOCOLS[protocol])
