# SPDX-License-Identifier: Apache-2.0
"""A configuration is checked against the node's families: warnings and fatal errors (kube-proxy.md
15).
"""

from ipaddress import ip_network
from typing import Any

import pytest
import yaml

from ebpflb.config import config_file, validation
from ebpflb.config.validation import NodeFamilies
from ebpflb.model.addresses import Family
from tests.config.files import DECISIONS, HEAD

V4, V6 = Family.IPV4, Family.IPV6
BOTH = frozenset(Family)


def check(node: NodeFamilies, **values: Any) -> dict[str, bool]:
    """Return the lines, and whether each is fatal."""
    found = config_file.to_configuration(HEAD | values)
    return dict(validation.check_families(found, node))


def test_all_is_well() -> None:
    """There is no warning if everything fits."""
    values = {"clusterCIDR": "10.0.0.0/8,fd00::/8", "nodePortAddresses": ["10.0.0.0/8", "fd00::/8"]}
    assert check(NodeFamilies(V4, BOTH, (ip_network("10.1.0.0/24"),)), **values) == {}
    assert check(NodeFamilies(V4, frozenset({V4}))) == {}
    assert check(NodeFamilies(V6, BOTH)) == {}


@pytest.mark.parametrize("supported", [BOTH, {V4}])
def test_what_no_mode_goes_by(supported: set[Family]) -> None:
    """Any valid configuration can be checked, also if a field that the mode ignores is not a
    CIDR.
    """
    for row in DECISIONS:
        if "fields" in row and "case" not in row and isinstance(row["decision"], dict):
            values = yaml.safe_load(row["fields"]) or {}
            assert all(check(NodeFamilies(V4, frozenset(supported)), **values))


def test_primary_family_unsupported() -> None:
    """A kernel without the primary family is a fatal error."""
    lines = check(NodeFamilies(V6, frozenset({V4})))
    assert lines["the node's primary family is IPv6, which the kernel does not support"] is True


@pytest.mark.parametrize(
    ("supported", "mode", "fatal"),
    [(BOTH, "ClusterCIDR", False), ({V4}, "ClusterCIDR", True), ({V4}, "NodeCIDR", False)],
)
def test_cluster_cidr_of_the_other_family(supported: set[Family], mode: str, fatal: bool) -> None:
    """A cluster CIDR of the other family is fatal only if the node is single-stack and the mode
    uses the field.
    """
    node = NodeFamilies(V4, frozenset(supported))
    lines = check(node, clusterCIDR="fd00::/8", detectLocalMode=mode)
    (text,) = lines
    assert text.startswith("clusterCIDR: the node is IPv4-")
    assert lines[text] is fatal


@pytest.mark.parametrize(("mode", "fatal"), [("NodeCIDR", True), ("ClusterCIDR", False)])
def test_pod_cidrs_of_the_other_family(mode: str, fatal: bool) -> None:
    """Pod CIDRs of the other family are fatal in the mode that uses them."""
    lines = check(NodeFamilies(V4, BOTH, (ip_network("fd00::/64"),)), detectLocalMode=mode)
    assert lines == {
        "the Node's podCIDRs: the node is IPv4-primary, but there is no IPv4 CIDR": fatal
    }


@pytest.mark.parametrize(
    ("choice", "cluster", "missing"),
    [
        (["10.0.0.0/8"], "", set()),
        (["fd00::/8"], "", {"IPv4"}),
        (["10.0.0.0/8"], "10.0.0.0/8,fd00::/8", {"IPv6"}),
        (["10.0.0.0/8", "fd00::/8"], "10.0.0.0/8,fd00::/8", set()),
        (["primary"], "10.0.0.0/8,fd00::/8", set()),
        (["10.0.0.0/8", "localhost"], "10.0.0.0/8,fd00::/8", set()),
        ([], "10.0.0.0/8,fd00::/8", set()),
    ],
)
def test_nodeport_addresses_of_one_family(
    choice: list[str], cluster: str, missing: set[str]
) -> None:
    """If nodePortAddresses has no CIDR of a family in use, all addresses are served, with a
    warning.
    """
    lines = check(NodeFamilies(V4, BOTH), nodePortAddresses=choice, clusterCIDR=cluster)
    assert {line.split("there is no ")[1].split()[0] for line in lines} == missing
    assert not any(lines.values())
