# SPDX-License-Identifier: Apache-2.0
"""The cases run against a proxy that serves, and against a proxy that does not."""

import pytest

from tests.conformance.__main__ import play
from tests.conformance.cases import CASES
from tests.conformance.targets import TARGETS, named
from tests.kit.cells import REFUSED, UNANSWERED, Row

pytestmark = pytest.mark.extended


@pytest.mark.parametrize("target", ["ebpflb-netfilter", "ebpflb-flows"])
def test_ours_pass(target: str) -> None:
    """Each client of these cases has the same result as with kube-proxy."""
    cases = {name: CASES[name] for name in ("no endpoint", "affinity", "zones")}
    results = list(play(target, cases))
    assert {result.case for result in results} == set(cases)
    assert not [result for result in results if result.seen]


@pytest.mark.parametrize("target", ["ebpflb-hand-over", "ebpflb-hand-over-flows"])
def test_hand_over_serves_policy_local_everywhere(target: str) -> None:
    """By load balancer and external addresses, with the client's address; NodePorts as ever."""
    cases = {name: CASES[name] for name in ("zones", "endpoints elsewhere")}
    results = [it for it in play(target, cases) if it.seen]
    assert {it.asked.split()[2] for it in results} == {"balancer", "external"}
    assert len(results) == 8 and all(it.on_purpose for it in results)


def test_a_difference_is_told() -> None:
    """An endpoint here sees an outside client itself; kube-proxy's sees the node."""
    results = list(play("ebpflb-netfilter", {"policies": CASES["policies"]}))
    asked = "outside asks nodeport 10 by TCP, IPv4"
    (told,) = [result for result in results if result.asked == asked]
    assert told.wanted == "here=node there=node"
    assert told.seen == "here 198.51.100.1, there 192.0.2.1"
    assert [result for result in results if result.seen and not result.on_purpose] == []


def test_no_other_difference_is_on_purpose() -> None:
    """Differences are known for each target; a proxy that is given as a command has none."""
    kube_proxy, ours = TARGETS["kube-proxy-iptables"], TARGETS["ebpflb-flows"]
    refused, seen = Row("near outside", 10, "external cluster", REFUSED), Row("a", 1, "b", "c", "d")
    known = kube_proxy.differs(refused, "near", "external"), ours.differs(seen, "a", "b")
    assert known == (UNANSWERED, "c")
    assert kube_proxy.differs(refused, "outside", "external") == ""
    assert ours.differs(refused, "near", "external") == ""
    assert named("another {node}").differs(seen, "a", "b") == ""


def test_a_proxy_that_does_nothing_fails() -> None:
    """The only result of a case is that the proxy has not followed a change."""
    (result,) = play("sleep 60", {"zones": CASES["zones"]}, patience=1.0)
    assert "follows a change" in result.seen


def test_a_proxy_that_cannot_start_is_told_at_once() -> None:
    """The proxy's status and output are reported at once, without waiting until its time is
    over.
    """
    (result,) = play("sh -c 'echo no licence; exit 3'", {"zones": CASES["zones"]}, patience=1e6)
    assert "near's proxy has ended with status 3" in result.seen and "no licence" in result.seen
