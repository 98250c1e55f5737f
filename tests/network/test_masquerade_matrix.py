# SPDX-License-Identifier: Apache-2.0
"""Who is masqueraded: upstream's 30 flows under its 4 settings (kube-proxy.md 5.1, 19).

Three services, of the policies Cluster, external Local and internal Local, each by ten ways. The
pod is one whose sockets no hook sees, and --masquerade-local-backends is on: so not one cell
differs from kube-proxy's. What the node sends itself is the node's, masqueraded or not. Where an
outside client is not masqueraded on its way to another node, the answers miss the node that was
asked, and the connection is lost: with kube-proxy too.
"""

from collections.abc import Iterator

import pytest

from ebpflb.lab import traffic
from ebpflb.lab.sockets import CALL_SECONDS, Sockets
from tests.kit import requests, two_nodes
from tests.kit.two_nodes import CLUSTER_CIDR, ENGINES, Frontends, TwoNodes
from tests.network.test_packets_table import (
    BOTH_CLIENT,
    BOTH_NODE,
    POLICIES,
    TIMES,
    families,
    meaning,
    services_of,
)

pytestmark = pytest.mark.parametrize("two", ENGINES, indirect=True)

HERE_CLIENT, HERE_NODE = "here=client", "here=node"
A_MOMENT = 0.3  # seconds after which a connection counts as lost
LOST = ("lost", "")
SETTINGS = {
    "base": CLUSTER_CIDR,
    "no detector": (),
    "masquerade all": (*CLUSTER_CIDR, "--masquerade-all"),
    "both": ("--masquerade-all",),
}
NODE_ALWAYS = (BOTH_NODE, BOTH_NODE, BOTH_NODE)
OUTSIDE_ALWAYS = (BOTH_NODE, HERE_CLIENT, BOTH_NODE)
PLAIN = (BOTH_CLIENT, BOTH_CLIENT, HERE_CLIENT)
REPLY_LOST = ("here=client lost", "here=client lost", HERE_CLIENT)
MASQUERADED = (BOTH_NODE, BOTH_NODE, HERE_NODE)
POD_OUT = (BOTH_NODE, BOTH_CLIENT, BOTH_NODE)
POD_OUT_UNKNOWN = (BOTH_NODE, HERE_CLIENT, BOTH_NODE)

# who -> kind: per setting, per service
MATRIX = {
    ("unhooked", "cluster"): (PLAIN, PLAIN, MASQUERADED, MASQUERADED),
    ("unhooked", "nodeport"): (POD_OUT, POD_OUT_UNKNOWN, POD_OUT, POD_OUT_UNKNOWN),
    ("unhooked", "balancer"): (POD_OUT, POD_OUT_UNKNOWN, POD_OUT, POD_OUT_UNKNOWN),
    ("near", "cluster"): (MASQUERADED,) * 4,
    ("near", "nodeport"): (NODE_ALWAYS,) * 4,
    ("near", "loopback"): (NODE_ALWAYS,) * 4,
    ("near", "balancer"): (NODE_ALWAYS,) * 4,
    ("outside", "cluster"): (MASQUERADED, REPLY_LOST, MASQUERADED, MASQUERADED),
    ("outside", "nodeport"): (OUTSIDE_ALWAYS,) * 4,
    ("outside", "balancer"): (OUTSIDE_ALWAYS,) * 4,
}
FLOWS = [(*pair, policy) for pair in MATRIX for policy in POLICIES]
assert len(FLOWS) == 30


@pytest.fixture(scope="module", params=SETTINGS)
def setting(request: pytest.FixtureRequest) -> str:
    """The name of the agents' options."""
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def two(
    setting: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoNodes]:
    """Two nodes whose agents have these options; the services are published."""
    two_nodes.require(request.param)
    options = (*SETTINGS[setting], "--masquerade-local-backends")
    folder = tmp_path_factory.mktemp("two")
    with two_nodes.running(folder, *options, engine=request.param) as made:
        made.publish(*services_of(made, made.here, made.there))
        yield made


def answers(
    two: TwoNodes, who: str, kind: str, policy: str, seconds: float, *, v6: bool
) -> set[tuple[str, str]]:
    """The backends that answered, and the source that each saw."""
    frontends, client = Frontends(POLICIES[policy][0]), two.sockets(getattr(two, who))
    where = frontends.to("nodeport" if kind == "loopback" else kind, two.near, v6=v6)
    if kind == "loopback":
        where = ("::1" if v6 else "127.0.0.1"), frontends.nodeport
    return {answer(client, *where, seconds) for _ in range(TIMES)}


def answer(client: Sockets, host: str, port: int, seconds: float) -> tuple[str, str]:
    with requests.tcp_socket(client, host) as stream:
        stream.settimeout(seconds)
        try:
            stream.connect((host, port))
            return traffic.read(stream.recv(64))
        except TimeoutError:
            return LOST


@pytest.mark.extended
@families
@pytest.mark.parametrize(("who", "kind", "policy"), FLOWS)
def test_flow(two: TwoNodes, setting: str, who: str, kind: str, policy: str, v6: bool) -> None:
    """Exactly the endpoints of the cell answer, and they see the source as with kube-proxy."""
    cell = MATRIX[who, kind][list(SETTINGS).index(setting)][list(POLICIES).index(policy)]
    lost = {LOST} if "lost" in cell else set()
    expected = meaning(two, who, cell.removesuffix(" lost"), v6=v6) | lost
    patience = A_MOMENT if lost else CALL_SECONDS
    assert answers(two, who, kind, policy, patience, v6=v6) == expected
