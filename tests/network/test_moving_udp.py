# SPDX-License-Identifier: Apache-2.0
"""UDP clients keep their endpoint as long as it serves, and follow every change.

When flows must move, tests wait for conntrack (tests.kit.moved_flows); the flow tables move them
with the change itself. Unconnected sockets are tested in tests/native/test_datagrams, connected
sockets in test_stale_udp.
"""

import pytest

from tests.kit import requests
from tests.kit.moved_flows import wait_until_only
from tests.kit.parameters import both_engines, families
from tests.kit.sockets import CALL_SECONDS
from tests.kit.two_nodes import Frontends, TwoNodes

pytestmark = both_engines

FRONTENDS = Frontends(10)
LEAVING = {"ready": False, "terminating": True}
NEVER = {"ready": False, "serving": False}
A_MOMENT = 0.3  # seconds after which no one is going to answer
CLIENT_PORT = 12345  # as `nc -u -p 12345`

everybody = pytest.mark.parametrize("who", ["hooked", "unhooked", "near", "outside"])
ways = pytest.mark.parametrize("kind", ["cluster", "nodeport"])


@pytest.fixture(autouse=True)
def afresh(two: TwoNodes) -> None:
    two.delete_flows("other_flows")


def from_one_port(
    two: TwoNodes, who: str, kind: str, seconds: float = CALL_SECONDS, *, v6: bool
) -> str:
    """Return the backend that answers a datagram from CLIENT_PORT in time. It is "" if no answer
    comes from the Service's address: while conntrack's entry is deleted, an answer in transit keeps
    the endpoint's address, as with kube-proxy.
    """
    where = FRONTENDS.to(kind, two.near, v6=v6)
    with requests.udp_socket(two.sockets(getattr(two, who)), where[0]) as client:
        client.settimeout(seconds)
        client.bind(("::" if v6 else "0.0.0.0", CLIENT_PORT))
        try:
            said = requests.exchange(client, *where)
        except (TimeoutError, ConnectionRefusedError):
            return ""
        return said.name if said.peer == where else ""


@families
@everybody
@ways
@pytest.mark.parametrize("policy", ["Cluster", "Local"])
def test_udp_when_the_server_pod_cycles(
    two: TwoNodes, who: str, kind: str, policy: str, v6: bool
) -> None:
    """The client reaches the new pod from the same port, whether it is added at once or after a
    while without endpoints.
    """
    for pod in (two.here, two.twin, two.here):
        two.publish(two.service("web", 10, pod, internalTrafficPolicy=policy))
        wait_until_only(two.near, CLIENT_PORT, pod)
        assert from_one_port(two, who, kind, v6=v6) == pod.name
        two.publish(two.service("web", 10, pod, conditions=LEAVING, internalTrafficPolicy=policy))
        assert from_one_port(two, who, kind, v6=v6) == pod.name
    two.publish(two.service("web", 10, internalTrafficPolicy=policy))
    two.publish(two.service("web", 10, two.twin, internalTrafficPolicy=policy))
    wait_until_only(two.near, CLIENT_PORT, two.twin)
    assert from_one_port(two, who, kind, v6=v6) == "twin"


@families
@everybody
@ways
def test_udp_when_an_unready_endpoint_gets_ready(
    two: TwoNodes, who: str, kind: str, v6: bool
) -> None:
    """A client that was refused before the service was there or ready is served afterwards."""
    two.publish()
    two.delete_flows("other_flows")  # no one deletes those of a Service that went
    assert from_one_port(two, who, kind, A_MOMENT, v6=v6) == ""
    two.publish(two.service("web", 10, two.here, conditions=NEVER))
    assert from_one_port(two, who, kind, A_MOMENT, v6=v6) == ""
    two.publish(two.service("web", 10, two.here))
    wait_until_only(two.near, CLIENT_PORT, two.here)
    assert from_one_port(two, who, kind, v6=v6) == "here"
