# SPDX-License-Identifier: Apache-2.0
"""Which endpoints answer, and which source they see: kube-proxy.md 5.3, cell by cell.

Two things differ from kube-proxy:

* Sockets of hooked pods are connected to the endpoint itself; it sees the pod, whatever the table
  of kube-proxy says about masquerading.
* An endpoint here sees an external client as it is, under the policy Cluster too; with
  --masquerade-local-backends it sees the node.
"""

import pytest

from tests.kit import cells
from tests.kit.cells import BOTH_CLIENT, BOTH_NODE, HERE_CLIENT, HERE_NODE, POLICIES
from tests.kit.parameters import both_engines, families, protocols
from tests.kit.requests import Send
from tests.kit.two_nodes import TwoNodes

pytestmark = both_engines

KINDS = {
    "cluster": ("cluster",),
    "external": ("nodeport", "balancer", "external"),
    "nodeport": ("nodeport",),
}
MIXED = "here=client there=node"
TABLE = {
    # client, kind of frontend    policy Cluster   external Local  internal Local
    ("unhooked", "cluster"): (BOTH_CLIENT, BOTH_CLIENT, HERE_CLIENT),
    ("unhooked", "external"): (BOTH_NODE, BOTH_CLIENT, BOTH_NODE),
    ("hooked", "cluster"): (BOTH_CLIENT, BOTH_CLIENT, HERE_CLIENT),
    ("hooked", "external"): (BOTH_CLIENT, BOTH_CLIENT, BOTH_CLIENT),
    ("near", "cluster"): (BOTH_NODE, BOTH_NODE, HERE_NODE),
    ("near", "external"): (BOTH_NODE, BOTH_NODE, BOTH_NODE),
    ("far", "nodeport"): (MIXED, HERE_CLIENT, MIXED),
    ("outside", "cluster"): (BOTH_NODE, BOTH_NODE, HERE_NODE),
    ("outside", "external"): (MIXED, HERE_CLIENT, MIXED),
}
CELLS = [
    (who, kind, policy, cell)
    for (who, group), of_policies in TABLE.items()
    for kind in KINDS[group]
    for policy, cell in zip(POLICIES, of_policies, strict=True)
]


@pytest.fixture(scope="module")
def services(two: TwoNodes) -> None:
    two.publish(*cells.services(two, two.here, two.there))


@pytest.mark.extended
@families
@protocols
@pytest.mark.parametrize(("who", "kind", "policy", "cell"), CELLS)
def test_cell(
    two: TwoNodes, services: None, who: str, kind: str, policy: str, cell: str, v6: bool, send: Send
) -> None:
    """Exactly the endpoints of the cell answer, and they see the source that it names."""
    cells.assert_cell(two, who, kind, policy, cell, v6=v6, send=send)
