# SPDX-License-Identifier: Apache-2.0
"""Whose requests a Service's NodePorts admit: by its annotation, else by --nodeport-source-ranges.

kube-proxy has neither; it leaves NodePorts to firewalls in PREROUTING, which do not see a
NodePort that is translated before them.
"""

from ebpflb.model import addresses, field_checks, objects
from ebpflb.model.addresses import Network
from ebpflb.model.annotations import annotation_field

ANNOTATION = objects.NODEPORT_SOURCE_RANGES


def of(service: objects.Service, default: tuple[Network, ...]) -> tuple[Network, ...]:
    """The networks; a family without any admits everybody, as with loadBalancerSourceRanges.

    Raises InvalidObject: an annotation that cannot be read must not open what it was to close.
    """
    text = service.metadata.annotation(ANNOTATION)
    if text is None:
        return default
    return field_checks.parsed(annotation_field(ANNOTATION), parse, text)


def parse(text: str) -> tuple[Network, ...]:
    """CIDRs of both families, separated by commas; "" admits everybody. Raises ValueError."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    return tuple(addresses.parse_network(part) for part in parts)


def show(ranges: tuple[Network, ...]) -> str:
    """As ``parse`` takes it."""
    return ",".join(map(str, ranges))
