# SPDX-License-Identifier: Apache-2.0
"""Chains of iptables-legacy, asked of the kernel without its tools."""

from errno import EAGAIN, EMFILE
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
def test_chain(tool: Tool) -> None:
    """A chain is there in its own family and table only, by its whole name."""
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
def test_large(tool: Tool) -> None:
    """A table of many rules is read as a whole."""
    chains = [f"CHAIN-{number}" for number in range(2000)]
    lines = ["*nat", *(f":{chain} - [0:0]" for chain in chains), "COMMIT", ""]
    run(f"{tool.command}-restore", said="\n".join(lines))
    assert firewall.legacy_has_chain(FAMILIES[tool.family], "nat", "CHAIN-1999")


@legacy
def test_tables(tool: Tool) -> None:
    """Only what there is is a table, and asking makes none."""
    family = FAMILIES[tool.family]
    assert not firewall.legacy_has_chain(family, "nat", "PREROUTING")
    assert firewall.legacy_tables(family) == set()
    load(tool, rules.IPTABLES_MODE)
    assert firewall.legacy_tables(family) == {"nat", "filter", "mangle"}


@legacy
def test_changes_meanwhile(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that others change meanwhile is read again; one that is not told is no "no"."""
    load(tool, rules.IPTABLES_MODE)
    refusals = [OSError(EAGAIN, "Resource temporarily unavailable")] * 3
    read = firewall.read_table

    def disturbed(family: int, table: str) -> bytes:
        if refusals:
            raise refusals.pop()
        return read(family, table)

    monkeypatch.setattr(firewall, "read_table", disturbed)
    assert firewall.legacy_has_chain(FAMILIES[tool.family], "nat", "KUBE-SERVICES")
    refusals.append(OSError(EMFILE, "Too many open files"))
    with pytest.raises(NodeError, match="table nat of iptables-legacy: Too many open files"):
        firewall.legacy_has_chain(FAMILIES[tool.family], "nat", "KUBE-SERVICES")


def others(family: int) -> set[int]:
    return {int(AF_INET), int(AF_INET6)} - {family}
