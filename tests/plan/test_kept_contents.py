# SPDX-License-Identifier: Apache-2.0
"""What an agent that stops leaves: compared without being decoded, by all that a backend has."""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address
from typing import Any

import pytest
from msgspec import structs

from ebpflb.model.addresses import Address, Family
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan import kept_contents
from ebpflb.plan.desired import IN_LISTS, DesiredBackend
from ebpflb.plan.entries import BackendName, Range
from ebpflb.plan.map_contents import MapContents
from ebpflb.plan.service_entries import ServiceEntries

LOCAL = frozenset({"local"})


def address(family: Family, number: int) -> Address:
    return IPv4Address(number) if family is Family.IPV4 else IPv6Address(number)


def backends(family: Family, *, alike: bool) -> tuple[DesiredBackend, ...]:
    """Three; where they are not ``alike`` each column has several values."""
    return tuple(
        DesiredBackend(
            address(family, 7 + n),
            80 if alike else 80 + n,
            IN_LISTS if alike or n else LOCAL,
            BackendName("node" if alike else f"node-{n}", f"pod-{n}", "" if alike else f"z{n}"),
            100 if alike else n,
        )
        for n in range(3)
    )


def left(family: Family, those: tuple[DesiredBackend, ...]) -> Sequence[DesiredBackend]:
    name = PortName("default", "web", "", Protocol.TCP, family)
    entries = ServiceEntries(1, Range(0, len(those)), {}, those, tuple(range(1, 1 + len(those))))
    contents = MapContents(entries={name: entries})
    return kept_contents.decode(kept_contents.encode(contents)).entries[name].backends


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("alike", [True, False])
def test_they_equal_what_was_left_and_are_it(family: Family, *, alike: bool) -> None:
    """However often they are compared, before and after they are decoded."""
    those = backends(family, alike=alike)
    found = left(family, those)
    for _ in range(2):
        assert found == those and those == found
    assert tuple(found) == those
    assert found == those and found == left(family, those)


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("address", 99),
        ("port", 9),
        ("flags", frozenset({"cluster"})),
        ("weight", 9),
        ("node", "other"),
        ("target", "other"),
        ("zone", "other"),
    ],
)
def test_any_difference_is_seen(
    family: Family, which: int, field: str, value: Any, *, alike: bool
) -> None:
    """Of any backend, also after equal ones were compared; and other numbers of them."""
    those = backends(family, alike=alike)
    former = those[which]
    if field in BackendName._fields:
        changed = structs.replace(former, name=former.name._replace(**{field: value}))
    elif field == "address":
        changed = structs.replace(former, address=address(family, value))
    else:
        changed = structs.replace(former, **{field: value})
    other = (*those[:which], changed, *those[which + 1 :])
    found = left(family, those)
    assert found != other
    assert found == those and found != other
    assert found != those[:2] and found != (*those, those[0])
    assert found != those[::-1]
