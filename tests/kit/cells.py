# SPDX-License-Identifier: Apache-2.0
"""Which endpoints answer a client on two nodes, and whom they see, as cells of a table.

A cell such as "here=client there=node" names the endpoints that answer, each with whom it sees: the
client, or the node, by the address of the device that leads to the endpoint. With "lost" some
requests are not answered.
"""

from ebpflb.lab import traffic
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from ebpflb.lab.sockets import CALL_SECONDS, Sockets
from tests.kit import requests
from tests.kit.requests import Send
from tests.kit.two_nodes import Frontends, TwoNodes, address

# A service for each policy: its number, and what its spec says.
POLICIES = {
    "cluster": (10, {}),
    "external local": (20, {"externalTrafficPolicy": "Local"}),
    "internal local": (30, {"internalTrafficPolicy": "Local"}),
}
BOTH_CLIENT, BOTH_NODE = "here=client there=client", "here=node there=node"
HERE_CLIENT, HERE_NODE = "here=client", "here=node"

TIMES = 24  # misses one of two endpoints once in 8 million times
A_MOMENT = 0.3  # seconds after which a request counts as lost
LOST = ("lost", "")


def services(two: TwoNodes, *pods: Host) -> list[list[Manifest]]:
    """A service for each policy."""
    return [two.service(f"s{n}", n, *pods, **spec) for n, spec in POLICIES.values()]


def assert_cell(
    two: TwoNodes, who: str, kind: str, policy: str, cell: str, *, v6: bool, send: Send
) -> None:
    """Exactly the endpoints of the cell answer, and they see the source that it names."""
    client, frontends = two.sockets(getattr(two, who)), Frontends(POLICIES[policy][0])
    where = frontends.to("nodeport" if kind == "loopback" else kind, two.near, v6=v6)
    if kind == "loopback":
        where = ("::1" if v6 else "127.0.0.1"), frontends.nodeport
    patience = A_MOMENT if "lost" in cell else CALL_SECONDS
    found = {_answer(client, where, send, patience) for _ in range(TIMES)}
    assert found == _meaning(two, who, cell, v6=v6)


def _answer(client: Sockets, where: tuple[str, int], send: Send, seconds: float) -> tuple[str, str]:
    """The backend that answers in so many seconds and the source that it sees, or LOST."""
    with requests.socket_of(send, client, where[0]) as opened:
        opened.settimeout(seconds)
        try:
            if send is requests.tcp:
                opened.connect(where)
                return traffic.read(opened.recv(64))
            answer = requests.exchange(opened, *where)
        except TimeoutError:
            return LOST
        return answer.name, answer.source


def _meaning(two: TwoNodes, who: str, cell: str, *, v6: bool) -> set[tuple[str, str]]:
    """What ``_answer`` returns, by the cell."""
    host = getattr(two, who)
    client = host.v6 if v6 else host.v4
    bridge = "fd00:244:1::1" if v6 else "10.244.1.1"
    node = {"here": bridge, "there": address(two.near, client)}
    words = [word.partition("=") for word in cell.split()]
    seen = {(name, client if whom == "client" else node[name]) for name, _, whom in words if whom}
    return seen | ({LOST} if "lost" in cell else set())
