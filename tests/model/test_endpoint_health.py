# SPDX-License-Identifier: Apache-2.0
"""Which endpoints are set aside, for how long, and how many."""

from ipaddress import ip_address
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpflb.model.addresses import Family
from ebpflb.model.endpoint_health import EndpointHealth, Place, most_set_aside
from ebpflb.model.services import PortName, Protocol

WEB = PortName("default", "web", "tcp", Protocol.TCP, Family.IPV4)
PLACES: list[Place] = [(ip_address(f"10.1.0.{n}"), 8080) for n in range(1, 9)]
ONE, TWO, THREE = PLACES[:3]


def test_the_time_doubles_up_to_five_minutes() -> None:
    health, now, seconds = EndpointHealth(), 0.0, []
    for _ in range(8):
        seconds.append(health.fails(WEB, ONE, PLACES, now))
        now += seconds[-1]
        health.keep(WEB, PLACES, now - 0.1)
        assert health.set_aside(WEB) == {ONE}
        health.keep(WEB, PLACES, now)
        assert not health.set_aside(WEB)
    assert seconds == [10, 20, 40, 80, 160, 300, 300, 300]


def test_a_success_brings_it_back_with_a_clean_record() -> None:
    health = EndpointHealth()
    health.fails(WEB, ONE, PLACES, 0.0)
    health.opens(WEB, ONE)
    assert (WEB in health.ports, health.set_aside(WEB)) == (False, frozenset())
    assert health.fails(WEB, ONE, PLACES, 1.0) == 10


@pytest.mark.parametrize(
    ("ready", "most"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (6, 2), (7, 3), (100, 34)]
)
def test_a_third_rounded_up_and_never_the_only_one(ready: int, most: int) -> None:
    assert most_set_aside(ready) == most


EVENTS = st.one_of(
    st.tuples(st.just("fails"), st.sampled_from(PLACES)),
    st.tuples(st.just("opens"), st.sampled_from(PLACES)),
    st.tuples(st.just("keep"), st.sets(st.sampled_from(PLACES))),
    st.tuples(st.just("wait"), st.floats(0, 400)),
)


@given(st.lists(EVENTS, max_size=50))
def test_any_sequence_keeps_the_bounds(sequence: list[tuple[str, Any]]) -> None:
    """At most a third of the endpoints is set aside, only ready ones, and for at most five
    minutes.
    """
    health, now, ready = EndpointHealth(), 0.0, set(PLACES)
    since: dict[Place, float] = {}
    for event, what in sequence:
        match event:
            case "fails":
                if health.fails(WEB, what, ready, now):
                    since[what] = now
            case "opens":
                health.opens(WEB, what)
                assert what not in health.set_aside(WEB)
            case "keep":
                ready = what
                health.keep(WEB, ready, now)
            case "wait":
                now += what
                health.keep(WEB, ready, now)
        aside = health.set_aside(WEB)
        assert aside <= ready
        assert len(aside) <= most_set_aside(len(ready))
        assert all(now < since[place] + 300 for place in aside)
