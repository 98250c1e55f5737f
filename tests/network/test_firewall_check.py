# SPDX-License-Identifier: Apache-2.0
"""`ebpflb doctor` and `check` name a rule that drops requests to a Service, and no other rule."""

from collections.abc import Iterator

import pytest

from tests.kit import answers, requests
from tests.kit.parameters import both_engines
from tests.kit.two_nodes import Frontends, TwoNodes

WEB = Frontends(10)
TABLE = "table inet lab_case {{ chain c {{ type filter hook prerouting priority {}; {}; }}; }}"
MATCH = f"tcp dport {WEB.nodeport}"

pytestmark = both_engines


@pytest.fixture(scope="module", autouse=True)
def services(two: TwoNodes) -> None:
    two.publish(two.service("web", 10, two.here, externalTrafficPolicy="Local"))


@pytest.fixture
def no_rules(two: TwoNodes) -> Iterator[None]:
    yield
    two.near.nft("delete table inet lab_case")


def named(two: TwoNodes, *words: str) -> list[str]:
    found = answers.results(two.ebpflb(*words, "-o", "json").stdout)
    return [it["detail"] for it in found if it["feature"] == "firewall rule"]


def is_served(two: TwoNodes) -> bool:
    try:
        requests.tcp(two.sockets(two.outside), *WEB.to("nodeport", two.near))
    except TimeoutError:
        return False
    return True


@pytest.mark.usefixtures("no_rules")
@pytest.mark.parametrize(
    ("priority", "rule"),
    [
        (-300, f"{MATCH} drop"),
        (-150, f"{MATCH} drop"),
        (0, f"{MATCH} drop"),
        (-300, f"{MATCH} counter accept"),
        (-300, f"ip saddr 198.18.0.0/15 {MATCH} drop"),
    ],
)
def test_a_rule_is_named_if_it_drops_requests(two: TwoNodes, priority: int, rule: str) -> None:
    """Rules in raw and mangle are named only on netfilter: with the flow tables requests already
    have their endpoint there.
    """
    two.near.nft(TABLE.format(priority, rule))
    found = named(two, "check")
    assert bool(found) == (not is_served(two))
    for line in found:
        assert line.startswith("table inet lab_case, chain c: handle ")
        assert f": drops requests to NodePort {WEB.nodeport} (" in line
        assert named(two, "doctor", "--no-canary") == found
