# SPDX-License-Identifier: Apache-2.0
"""ebpflb serves some Services, and kube-proxy's rules on the same node serve the others."""

from ipaddress import ip_address

import pytest

from ebpflb.entries.services import Frontend
from ebpflb.lab.agents import wait_until
from tests.kit import both_proxies, requests
from tests.kit.both_proxies import EBPFLB, KUBE_PROXY, LABELS, NEW, OLD, Both
from tests.kit.lab_cluster import PORT
from tests.kit.on_removal import is_reset
from tests.kit.requests import lives

BY_NAMESPACE, BY_LABEL = ("--namespaces", "new"), ("--services", "stage in (canary,test),!legacy")
DELETED_IP = "10.96.0.12"
NEITHER = ("--namespaces", "nowhere")

protocols = pytest.mark.parametrize("send", [requests.tcp, both_proxies.udp], ids=["tcp", "udp"])


@pytest.fixture(scope="module", params=[BY_NAMESPACE, BY_LABEL], ids=["namespace", "label"])
def some(both: Both, request: pytest.FixtureRequest) -> Both:
    both.serve(*request.param)
    return both


@protocols
def test_others_are_left_to_kube_proxy(some: Both, send: requests.Send) -> None:
    """All other Services are left to kube-proxy: NodePorts and cluster IPs, sockets and packets, in
    the cluster's range.
    """
    assert some.answers(NEW, send) == [EBPFLB] * 4
    assert some.answers(OLD, send) == [KUBE_PROXY] * 4


def test_rules_that_others_need_are_not_removed(some: Both) -> None:
    """Cleanup refuses to remove rules while the agent leaves Services to kube-proxy."""
    done = some.ebpflb("cleanup", "--kube-proxy")
    assert done.returncode == 1
    assert "Services outside of --" in done.stderr
    assert "need kube-proxy's rules" in done.stderr
    assert some.answers(OLD, requests.tcp) == [KUBE_PROXY] * 4


@pytest.mark.extended
def test_services_go_over_and_back_while_clients_ask(both: Both) -> None:
    """When none, one, all, and again fewer Services are served, no connection fails or ends,
    whoever opened it.
    """
    none = NEITHER, KUBE_PROXY, KUBE_PROXY
    one = BY_NAMESPACE, EBPFLB, KUBE_PROXY
    both.go_through([none, one, ((), EBPFLB, EBPFLB), one, none])


def test_connections_live_on_where_a_service_goes_over_by_its_label(both: Both) -> None:
    """The agent is not restarted. The test deletes another Service to see that all resets are
    done.
    """
    both.serve(*BY_LABEL)
    deleted = both.service("deleted", DELETED_IP, 30082, labels=LABELS)
    both.write(both.service(*NEW, labels=LABELS), both.service(*OLD), deleted)
    frontend = Frontend(ip_address(DELETED_IP), PORT, 6)
    wait_until("it is served", lambda: both.maps["services"].get(frontend) is not None)
    clients = [both.connected(*way) for way in both.ways(NEW)]
    reset = both.connected(both.client, (DELETED_IP, PORT))
    both.write(both.service(*NEW), both.service(*OLD))
    assert is_reset(reset)
    assert all(map(lives, clients))
    assert both.answers(NEW, requests.tcp) == [KUBE_PROXY] * 4
