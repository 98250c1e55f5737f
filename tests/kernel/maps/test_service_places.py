# SPDX-License-Identifier: Apache-2.0
"""The copies of map services while frontends are added, changed and removed."""

from collections.abc import Iterator
from ipaddress import ip_address
from itertools import chain

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from ebpflb.entries.services import Frontend, Range, ServiceEntry
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.service_places import PROBES, ServicePlaces, first_place
from tests.kernel.maps.small import small_maps
from tests.kernel.variants import needs_root

pytestmark = needs_root

PLACES = 24  # few, so that frontends meet
WEB = Frontend(ip_address("172.30.0.1"), 80, 6)
Maps = dict[str, Map]
frontends = some.builds(
    Frontend,
    some.sampled_from(["0.0.0.0", "::", "172.30.0.1", "172.30.0.2", "fd00::1"]).map(ip_address),
    some.integers(80, 90),
    some.sampled_from([6, 17]),
)


@pytest.fixture
def maps() -> Iterator[Maps]:
    with small_maps(["services", "service_places", "secret"], PLACES) as made:
        yield made


def entry(id: int) -> ServiceEntry:
    return ServiceEntry(id, frozenset(), 0, 1, Range(id, 1), Range(id, 1))


def write(maps: Maps, places: ServicePlaces, rows: dict[Frontend, int]) -> None:
    """Write the services and then their copies, as an agent does."""
    pairs = [(each, entry(id)) for each, id in rows.items()]
    maps["services"].write(pairs)
    places.write(pairs)


def copied(maps: Maps) -> dict[bytes, bytes]:
    """Return key and value of each copy; check that it is where programs look."""
    found = {}
    for at, copy in maps["service_places"].items():
        key = copy[:20]
        assert 0 <= at - first_place(key, maps["secret"].get(0), PLACES) < PROBES
        assert key not in found, "one frontend has two copies"
        found[key] = copy[24:108]
    return found


@given(
    changes=some.lists(
        some.tuples(some.booleans(), some.dictionaries(frontends, some.integers(1, 99)))
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_changes(maps: Maps, changes: list[tuple[bool, dict[Frontend, int]]]) -> None:
    """Each copy equals the frontend's entry, where programs look. After a start a frontend lacks
    one only if other copies have its places.
    """
    maps["services"].delete([each for each, _ in list(maps["services"].items())])
    places = ServicePlaces(maps)
    places.load()
    for written, rows in changes:
        if written and len({*rows, *dict(maps["services"].items())}) <= PLACES:
            write(maps, places, rows)
        elif not written:
            places.remove(rows)
            maps["services"].delete(list(rows))
        assert copied(maps).items() <= dict(maps["services"].packed_items()).items()
        assert not list(chain.from_iterable(places.wrong()))
    places.load()
    taken = {at for at, _ in maps["service_places"].items()}
    for key in dict(maps["services"].packed_items()).keys() - copied(maps).keys():
        first = first_place(key, 0, PLACES)
        assert taken >= {*range(first, min(first + PROBES, PLACES))}


def test_what_others_left(maps: Maps) -> None:
    """A starting agent gives each entry its copy, and removes copies of anything else."""
    write(maps, ServicePlaces(maps), {WEB: 1, WEB._replace(port=81): 2})
    maps["services"].delete([WEB])
    maps["services"].write([(WEB._replace(port=82), entry(3))])
    maps["service_places"].write([(at, bytes([at]) * 128) for at in range(3)])
    ServicePlaces(maps).load()
    assert copied(maps) == dict(maps["services"].packed_items())


def test_changed_by_others(maps: Maps) -> None:
    """The audit finds each place that others have changed, and corrects it."""
    places = ServicePlaces(maps)
    write(maps, places, {WEB: 1})
    ((at, copy),) = maps["service_places"].items()
    other = (at + 1) % PLACES
    maps["service_places"].write([(at, bytes(128)), (other, copy)])
    assert sorted(chain.from_iterable(places.wrong())) == sorted([at, other])
    places.load()
    assert dict(maps["service_places"].items()) == {at: copy}
