# SPDX-License-Identifier: Apache-2.0
"""All leftovers of a kube-proxy are removed, in every mode and variant, and nothing else.

See kube-proxy.md 17.
"""

import os
import re
from collections.abc import Callable, Iterator
from socket import AF_INET, AF_INET6

import pytest

from ebpflb.errors import NodeError
from ebpflb.kernel.netfilter import firewall
from ebpflb.kernel.netfilter.firewall import Tool
from ebpflb.kernel.node import kube_proxy
from tests.kernel.node import nodes, rules
from tests.kernel.node.nodes import (
    TOOLS,
    everything,
    load,
    load_nft,
    make_sets,
    remove,
    run,
    send,
)

NAME = f"ebpflb-test-{os.getpid()}-leftovers"
every_tool = pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)


@pytest.fixture(autouse=True)
def netns() -> Iterator[None]:
    with nodes.fresh(NAME):
        yield


def iptables_mode(tool: Tool) -> None:
    load(tool, rules.IPTABLES_MODE)


def ipvs_mode(tool: Tool) -> None:
    make_sets(tool)
    load(tool, rules.IPVS_MODE)


every_mode = pytest.mark.parametrize("mode", [iptables_mode, ipvs_mode])


def test_this_machine_has_all_tools() -> None:
    """This machine has all four tools, so every case in this file runs."""
    assert [tool.name for tool in TOOLS] == [
        f"{family}-{variant}"
        for family in ("iptables", "ip6tables")
        for variant in ("legacy", "nft")
    ]


@every_tool
@every_mode
def test_cleanup_leaves_neighbours(tool: Tool, mode: Callable[[Tool], None]) -> None:
    """After the cleanup the rules of kubelet, CNIs and firewalls are the same, byte for byte."""
    load(tool, *rules.NEIGHBOURS)
    send()
    before = everything()
    assert re.search(r"\[[1-9]\d*:\d+] -A ufw-before-input", before), "counters are compared too"
    mode(tool)
    assert everything() != before
    assert remove()
    assert everything() == before
    assert not kube_proxy.ipsets()


@every_tool
@every_mode
def test_cleanup_leaves_marks_of_others(tool: Tool, mode: Callable[[Tool], None]) -> None:
    """While portmap marks by KUBE-MARK-MASQ, marking and masquerading stay, with a message."""
    load(tool, *rules.NEIGHBOURS)
    mode(tool)
    load(tool, rules.MARKING_PORTMAP)
    (kept,) = kube_proxy.survey().retained
    assert kept == (
        f"{tool.name}, table nat: KUBE-MARK-MASQ, KUBE-POSTROUTING: used by rules in CNI-DN-77aa0c"
    )
    remove()
    (nat,) = (table for table in tool.tables() if table.name == "nat")
    ours = {"KUBE-MARK-MASQ", "KUBE-POSTROUTING"}
    assert {rule.target for rule in nat.rules if rule.chain in ours} == {
        "MARK",
        "RETURN",
        "MASQUERADE",
    }
    assert [rule.chain for rule in nat.rules if rule.target in ours] == [
        "POSTROUTING",
        "CNI-DN-77aa0c",
    ]
    assert not kube_proxy.ipsets()
    assert not kube_proxy.survey().removable


def test_cleanup_leaves_tables_of_others() -> None:
    """Only the nftables tables `ip kube-proxy` and `ip6 kube-proxy` are removed."""
    load_nft()
    assert kube_proxy.visible_rules() == ["table ip kube-proxy", "table ip6 kube-proxy"]
    assert remove() == ["table ip kube-proxy", "table ip6 kube-proxy"]
    left = run("nft", "list", "tables").split("\n")
    assert set(filter(None, left)) == {
        "table inet operator",
        "table ip kube-proxy-of-mine",
        "table ip6 kube-proxy-of-mine",
    }


def test_cleanup_whole_tables() -> None:
    """A table that cannot be changed stays completely unchanged; all others are removed."""
    (tool, *_) = TOOLS
    load(tool, rules.IPTABLES_MODE)
    survey = kube_proxy.survey()
    run(str(tool.command), "-t", "nat", "-N", "MINE")
    run(str(tool.command), "-t", "nat", "-A", "MINE", "-j", "KUBE-SERVICES")
    before = run(f"{tool.command}-save", "-t", "nat")
    script = next(found for found in survey.removable if "nat" in found.what)
    with pytest.raises(NodeError, match="iptables-legacy-restore"):
        script.remove()
    assert _rules(run(f"{tool.command}-save", "-t", "nat")) == _rules(before)


def _rules(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_looking_changes_nothing() -> None:
    """A survey creates no table."""
    before = everything()
    kube_proxy.survey()
    kube_proxy.visible_rules()
    assert everything() == before
    assert not any(firewall.legacy_tables(family) for family in (AF_INET, AF_INET6))
