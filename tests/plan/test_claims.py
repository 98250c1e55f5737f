# SPDX-License-Identifier: Apache-2.0
"""If two services claim one frontend, the older one keeps it (Claims)."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from ebpflb.entries.services import WHOLE
from ebpflb.model.services import PortName
from ebpflb.plan.canary import NAMESPACE
from ebpflb.plan.desired import DesiredService
from ebpflb.plan.planner import Claims
from tests.load import scaled
from tests.plan.builders import by_name, desired, frontend, name
from tests.plan.node import PlannedNode

OLD, NEW = "2024-01-01T00:00:00Z", "2025-01-01T00:00:00Z"


def frontends_of(claims: Claims, service: str) -> set[int]:
    """Return the numbers of the frontends that a service gets."""
    return {n for n in range(10) if frontend(n) in claims.frontends_of(name(service))}


def test_an_address_as_a_whole_is_shared() -> None:
    """The oldest Service with an endpoint gets the address, and the others do not dispute it."""
    whole = frontend(1)._replace(port=0, protocol=WHOLE)

    def claimed(service: str, *backends: int, created: str, words: str = "") -> DesiredService:
        return desired(service, {whole: frozenset(words.split())}, backends, created=created)

    claims = Claims()

    def owner() -> str:
        return claims.claimants[whole][0].service

    claims.update(by_name(claimed("old", created=OLD), claimed("new", created=NEW)))
    assert owner() == "old"
    assert claims.update(by_name(claimed("new", 1, created=NEW))) == {name("old"), name("new")}
    assert owner() == "new"
    assert claims.update(by_name(claimed("old", 2, created=OLD))) == {name("old"), name("new")}
    assert owner() == "old"
    claims.update(by_name(claimed("old", 2, created=OLD, words="external local")))
    assert owner() == "new"  # the other one's endpoint is on another node
    assert not claims.contested


_ports = some.builds(
    desired,
    some.sampled_from("abcd"),
    some.sets(some.integers(1, 4), max_size=3),
    created=some.sampled_from([OLD, NEW]),
)
_events = some.lists(some.dictionaries(some.sampled_from("abcd"), some.none() | _ports), max_size=8)


def changes(event: dict[str, DesiredService | None]) -> dict[PortName, DesiredService | None]:
    return {
        name(key): port and desired(key, port.frontends, created=port.created)
        for key, port in event.items()
    }


@given(_events)
@settings(max_examples=scaled(150), deadline=None)
def test_order_of_events_does_not_matter(events: list[dict[str, DesiredService | None]]) -> None:
    """After any history each frontend's owner depends only on the final claims."""
    claims, final = Claims(), dict[PortName, DesiredService | None]()
    for event in map(changes, events):
        before = {service: frontends_of(claims, service) for service in "abcd"}
        affected = claims.update(event)
        final |= event
        for service in "abcd":
            assert name(service) in affected or frontends_of(claims, service) == before[service]
    fresh = Claims()
    fresh.update(dict(sorted(final.items(), reverse=True)))
    assert all(frontends_of(claims, service) == frontends_of(fresh, service) for service in "abcd")
    assert claims.contested == fresh.contested


@pytest.mark.parametrize("ages", [("", ""), (NEW, ""), ("", OLD)], ids=str)
def test_without_an_age_who_has_it_keeps_it(ages: tuple[str, str]) -> None:
    """A new manifest takes no frontend from another Service, whatever its name or age; also after a
    restart.
    """
    old, new = desired("z", [1], [1], created=ages[0]), desired("a", [1, 2], [2], created=ages[1])
    node = PlannedNode()
    node.change(by_name(old))
    for _ in range(2):
        node.change(by_name(new, old))
        assert node.planner.claims.contested == {frontend(1): [name("z"), name("a")]}
        assert node.planner.frontends.owners == {frontend(1): name("z"), frontend(2): name("a")}
        node.restart()
    node.change({name("z"): None})
    assert node.planner.frontends.owners[frontend(1)] == name("a")


def test_the_canary_keeps_nothing_from_a_service_without_age() -> None:
    """The canary came first and has the first name; still the Service gets the frontend."""
    canary = replace(
        desired("canary", [1], [1], created="~"), name=name("canary")._replace(namespace=NAMESPACE)
    )
    service = replace(
        desired("web", [1], [2], created=""), name=name("web")._replace(namespace="shop")
    )
    node = PlannedNode()
    node.change({canary.name: canary})
    node.change({service.name: service})
    assert node.planner.frontends.owners == {frontend(1): service.name}
