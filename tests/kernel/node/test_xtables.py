# SPDX-License-Identifier: Apache-2.0
"""Chains of iptables-legacy, read from the kernel without its tools."""

from errno import EAGAIN
from socket import AF_INET, AF_INET6

import pytest

from ebpflb.errors import NodeError
from ebpflb.kernel.netfilter import firewall
from tests.kernel.node import rules
from tests.kernel.node.nodes import TOOLS, Tool, load, run

pytestmark = pytest.mark.usefixtures("fresh_netns")
FAMILIES = {"iptables": AF_INET, "ip6tables": AF_INET6}
legacy = pytest.mark.parametrize(
    "tool", [t for t in TOOLS if t.variant == "legacy"], ids=lambda tool: tool.name
)


@legacy
def test_a_chain_is_found_by_its_whole_name(tool: Tool) -> None:
    """A chain is found only in its own family and table, by its whole name."""
    family = FAMILIES[tool.family]
    load(tool, rules.IPTABLES_MODE)
    assert firewall.legacy_has_chain(family, "nat", "KUBE-SERVICES")
    assert firewall.legacy_has_chain(family, "filter", "KUBE-FORWARD")
    assert not firewall.legacy_has_chain(family, "nat", "KUBE-FORWARD")
    assert not firewall.legacy_has_chain(family, "nat", "KUBE-SERVICE")
    assert not firewall.legacy_has_chain(family, "nat", "UBE-SERVICES")
    assert not any(
        firewall.legacy_has_chain(other, "nat", "KUBE-SERVICES") for other in others(family)
    )


@legacy
def test_a_large_table_is_read_completely(tool: Tool) -> None:
    """A table of many rules is read completely."""
    chains = [f"CHAIN-{number}" for number in range(2000)]
    lines = ["*nat", *(f":{chain} - [0:0]" for chain in chains), "COMMIT", ""]
    run(f"{tool.command}-restore", said="\n".join(lines))
    assert firewall.legacy_has_chain(FAMILIES[tool.family], "nat", "CHAIN-1999")


@legacy
def test_asking_makes_no_tables(tool: Tool) -> None:
    """Only existing tables are returned, and asking makes none."""
    family = FAMILIES[tool.family]
    assert not firewall.legacy_has_chain(family, "nat", "PREROUTING")
    assert firewall.legacy_tables(family) == set()
    load(tool, rules.IPTABLES_MODE)
    assert firewall.legacy_tables(family) == {"nat", "filter", "mangle"}


@legacy
def test_a_table_that_changes_meanwhile(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that cannot be read is an error, not a "no"."""

    def disturbed(family: int, table: str) -> bytes:
        raise OSError(EAGAIN, "Resource temporarily unavailable")

    load(tool, rules.IPTABLES_MODE)
    monkeypatch.setattr(firewall, "read_table", disturbed)
    with pytest.raises(NodeError, match="table nat of iptables-legacy: Resource temporarily"):
        firewall.legacy_has_chain(FAMILIES[tool.family], "nat", "KUBE-SERVICES")


def others(family: int) -> set[int]:
    return {int(AF_INET), int(AF_INET6)} - {family}
