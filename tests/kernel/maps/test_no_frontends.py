# SPDX-License-Identifier: Apache-2.0
"""The bits of the map no_frontends while frontends are added and removed."""

from collections.abc import Iterator
from ipaddress import ip_address

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from ebpflb.entries.services import Frontend
from ebpflb.kernel.map_writer import WORDS, NoFrontends, bit_of
from ebpflb.kernel.maps.bpf_map import MappedArray
from tests.kernel.maps.small import small_maps
from tests.kernel.variants import needs_root

pytestmark = needs_root

WEB, OTHER = (Frontend(ip_address(f"172.30.0.{n}"), 80, 6) for n in (1, 2))
NODEPORTS = [
    Frontend(ip_address(any), 30080, protocol) for any in ("0.0.0.0", "::") for protocol in (6, 17)
]
addresses = some.sampled_from(["0.0.0.0", "::", "172.30.0.1", "172.30.0.2", "fd00::1"])
frontends = some.builds(
    Frontend, addresses.map(ip_address), some.sampled_from([80, 443]), some.sampled_from([6, 17])
)


@pytest.fixture
def opened() -> Iterator[MappedArray]:
    with small_maps(["no_frontends"], most=WORDS) as maps:
        array = maps["no_frontends"]
        assert isinstance(array, MappedArray)
        yield array


def is_none(opened: MappedArray, frontend: Frontend) -> bool:
    """Whether the bit says that there is no such frontend."""
    bit = bit_of(frontend)
    return bool(opened.get(bit // 64) >> bit % 64 & 1)


def test_a_new_map_says_nothing(opened: MappedArray) -> None:
    """Until the agent has written the map, programs look everything up."""
    made = NoFrontends(opened)
    assert not is_none(opened, WEB)
    made.repair()
    assert is_none(opened, WEB) and not made.wrong()


def test_a_frontend_of_an_earlier_agent(opened: MappedArray) -> None:
    """Bits of frontends that are in map services are not set when the agent starts."""
    made = NoFrontends(opened)
    made.load([WEB, *NODEPORTS])
    made.repair()
    assert not is_none(opened, WEB) and not is_none(opened, NODEPORTS[0])
    assert is_none(opened, OTHER)


def test_changed_by_others(opened: MappedArray) -> None:
    """The audit finds each wrong word of the map and corrects it."""
    made = NoFrontends(opened)
    made.before_writing([WEB])
    made.repair()
    at = bit_of(WEB) // 64
    opened.write([(at, 2**64 - 1), (7, 0)])
    assert made.wrong() == sorted([at, 7])
    made.repair()
    assert not made.wrong() and not is_none(opened, WEB)


@given(changes=some.lists(some.tuples(some.booleans(), some.sets(frontends))))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_changes(opened: MappedArray, changes: list[tuple[bool, set[Frontend]]]) -> None:
    """The map always matches the existing frontends."""
    made, there = NoFrontends(opened), set[Frontend]()
    made.repair()
    for written, some_frontends in changes:
        if written:
            made.before_writing(some_frontends)
            there |= some_frontends
        else:
            made.after_removing(some_frontends)
            there -= some_frontends
        assert all(not is_none(opened, each) for each in there)
        fresh = NoFrontends(opened)
        fresh.load(there)
        assert not fresh.wrong()
