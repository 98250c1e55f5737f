# SPDX-License-Identifier: Apache-2.0
"""Two services, one frontend: the older one keeps it (claims.py)."""

from hypothesis import given, settings
from hypothesis import strategies as some

from ebpflb.model.services import PortName
from ebpflb.plan.claims import Claims
from ebpflb.plan.wanted import Wanted
from tests.plan.builders import by_name, frontend, name, wanted

OLD, NEW = "2024-01-01T00:00:00Z", "2025-01-01T00:00:00Z"


def granted(claims: Claims, service: str) -> set[int]:
    """The numbers of the frontends that a service gets."""
    return {n for n in range(10) if frontend(n) in claims.granted(name(service))}


def test_older_wins() -> None:
    """A newcomer takes nothing away, whatever its name; what nobody else claims it gets."""
    claims = Claims()
    claims.update(by_name(wanted("web", [1, 2], created=OLD)))
    claims.update(by_name(wanted("a", [2, 3], created=NEW)))
    assert (granted(claims, "web"), granted(claims, "a")) == ({1, 2}, {3})


def test_older_wins_when_it_comes_later() -> None:
    """The age counts, not the order in which we heard of them."""
    claims = Claims()
    claims.update(by_name(wanted("a", [1], created=NEW)))
    affected = claims.update(by_name(wanted("web", [1], created=OLD)))
    assert affected == {name("a"), name("web")}
    assert (granted(claims, "web"), granted(claims, "a")) == ({1}, set())


def test_name_decides_a_tie() -> None:
    """Of equally old ones the first by name wins."""
    claims = Claims()
    claims.update(by_name(wanted("b", [1]), wanted("a", [1]), wanted("c", [1])))
    assert [granted(claims, service) for service in "abc"] == [{1}, set(), set()]


def test_loser_gets_it_when_the_winner_goes() -> None:
    """The next one moves up, and is named as affected."""
    claims = Claims()
    claims.update(by_name(wanted("a", [1]), wanted("b", [1]), wanted("c", [1])))
    assert claims.update({name("a"): None}) == {name("a"), name("b")}
    assert (granted(claims, "b"), granted(claims, "c")) == ({1}, set())


def test_loser_gets_what_the_winner_gives_up() -> None:
    """A winner that changes its mind about one frontend keeps the others."""
    claims = Claims()
    claims.update(by_name(wanted("a", [1, 2]), wanted("b", [1, 2])))
    assert claims.update(by_name(wanted("a", [2]))) == {name("a"), name("b")}
    assert (granted(claims, "a"), granted(claims, "b")) == ({2}, {1})


def test_unrelated_services_are_not_affected() -> None:
    """Work is proportional to what changed."""
    claims = Claims()
    claims.update(by_name(wanted("a", [1]), wanted("b", [2])))
    assert claims.update(by_name(wanted("b", [2, 3]))) == {name("b")}
    assert claims.update({name("x"): None}) == {name("x")}


def test_disputes() -> None:
    """Disputed frontends are listed with all who claim them, the winner first."""
    claims = Claims()
    claims.update(by_name(wanted("b", [1, 2], created=OLD), wanted("a", [2, 3], created=NEW)))
    assert list(claims.disputes()) == [(frontend(2), [name("b"), name("a")])]
    claims.update({name("b"): None})
    assert list(claims.disputes()) == []


_ports = some.builds(
    wanted,
    some.sampled_from("abcd"),
    some.sets(some.integers(1, 4), max_size=3),
    created=some.sampled_from([OLD, NEW]),
)
_events = some.lists(some.dictionaries(some.sampled_from("abcd"), some.none() | _ports), max_size=8)


def changes(event: dict[str, Wanted | None]) -> dict[PortName, Wanted | None]:
    return {
        name(key): port and wanted(key, port.frontends, created=port.created)
        for key, port in event.items()
    }


@given(_events)
@settings(max_examples=150, deadline=None)
def test_order_of_events_does_not_matter(events: list[dict[str, Wanted | None]]) -> None:
    """After any history each frontend is where the final wishes alone would put it."""
    claims, final = Claims(), dict[PortName, Wanted | None]()
    for event in map(changes, events):
        before = {service: granted(claims, service) for service in "abcd"}
        affected = claims.update(event)
        final |= event
        for service in "abcd":
            assert name(service) in affected or granted(claims, service) == before[service]
    fresh = Claims()
    fresh.update(dict(sorted(final.items(), reverse=True)))
    assert all(granted(claims, service) == granted(fresh, service) for service in "abcd")
    assert sorted(claims.disputes(), key=str) == sorted(fresh.disputes(), key=str)
