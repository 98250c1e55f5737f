# SPDX-License-Identifier: Apache-2.0
"""--shadow: decisions are counted, and kube-proxy's rules on the same node serve everything."""

import pytest

from ebpflb.kernel.maps.layout import VERDICTS
from tests.kit import both_proxies, requests
from tests.kit.both_proxies import EBPFLB, KUBE_PROXY, NEW, OLD, Both

protocols = pytest.mark.parametrize("send", [requests.tcp, both_proxies.udp], ids=["tcp", "udp"])


@pytest.fixture
def shadow(both: Both) -> Both:
    if "--shadow" not in both.agent.options:
        both.serve("--shadow")
    return both


def counted(both: Both) -> dict[str, int]:
    """Return how often the node's programs have counted each verdict."""
    return {name: sum(both.maps["verdicts"].get(number)) for number, name in VERDICTS.items()}


@protocols
def test_all_is_served_by_kube_proxy_and_counted(shadow: Both, send: requests.Send) -> None:
    """Each client's request, by NodePort or cluster IP, socket or packet, counts once."""
    before = counted(shadow)
    for service in (NEW, OLD):
        for host, where in shadow.ways(service):
            assert send(shadow.sockets(host), *where).name == "web-3"
    after = counted(shadow)
    assert after["translated"] - before["translated"] == 8
    assert after["masqueraded"] == before["masqueraded"]


@pytest.mark.extended
def test_there_and_back_while_clients_ask(both: Both) -> None:
    """When the mode changes between shadow and service, no connection fails or ends, whoever opened
    it.
    """
    shadow = ("--shadow",), KUBE_PROXY, KUBE_PROXY
    both.go_through([shadow, ((), EBPFLB, EBPFLB), shadow])
