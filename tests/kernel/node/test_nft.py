# SPDX-License-Identifier: Apache-2.0
"""Tables of nftables by netlink, and the table that keeps NAT alive."""

from errno import EMFILE, EPROTONOSUPPORT

import pytest

from ebpflb.errors import NodeError
from ebpflb.kernel.netfilter import nft, watch
from ebpflb.kernel.netfilter.nft import Name
from tests.kernel.node.nodes import run

pytestmark = pytest.mark.usefixtures("fresh_netns")


def test_only_tables_of_ip_families_are_listed() -> None:
    for family in ("ip", "ip6", "inet", "arp", "bridge"):
        run("nft", "add", "table", family, "mine")
    assert nft.tables() == {Name("ip", "mine"), Name("ip6", "mine"), Name("inet", "mine")}


def test_a_chain_belongs_to_table_and_family() -> None:
    """A chain is found only in its own table and family."""
    run("nft", "add", "table", "ip", "mine")
    run("nft", "add", "table", "ip", "other")
    for chain in ("one", "two"):
        run("nft", "add", "chain", "ip", "mine", chain)
    assert nft.chains(Name("ip", "mine")) == {"one", "two"}
    assert nft.has_chain(Name("ip", "mine"), "one")
    for name, chain in (("ip", "other"), ("ip6", "mine")):
        assert not nft.has_chain(Name(name, chain), "one")
    assert not nft.has_chain(Name("ip", "mine"), "on")


def test_an_unreadable_table_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that cannot be read is not reported as missing; without nf_tables there is no
    table.
    """
    refusal = OSError(EMFILE, "Too many open files")

    def refused() -> None:
        raise refusal

    monkeypatch.setattr(nft, "open_nf_tables", refused)
    for look in (nft.tables, lambda: nft.has_chain(Name("ip", "mine"), "one")):
        with pytest.raises(NodeError, match="Too many open files"):
            look()
    refusal = OSError(EPROTONOSUPPORT, "Protocol not supported")
    assert not nft.tables() and not nft.chains(Name("ip", "mine"))
    assert not nft.has_chain(Name("ip", "mine"), "one")


def test_a_table_is_deleted_whole() -> None:
    """A table is deleted with its content; a missing table is no error."""
    run("nft", "-f", "-", said="table ip mine {\n chain c {\n jump d\n }\n chain d {\n }\n}\n")
    for _ in range(2):
        nft.delete(Name("ip", "mine"))
        assert not nft.tables()


def test_delete_refused() -> None:
    """If the kernel refuses, the error names table and reason."""
    with pytest.raises(NodeError, match=r"^table ip x{300}: "):
        nft.delete(Name("ip", "x" * 300))


def test_hold_nat() -> None:
    """The table that keeps NAT alive is made once, decides nothing, and can be removed."""
    watch.keep_nat_hooks()
    made = run("nft", "list", "ruleset")
    assert "type nat hook prerouting" in made
    assert not any(
        word in made for word in ("dnat", "snat", "masquerade", "drop", "accept;\n\t\t\t")
    )
    watch.keep_nat_hooks()
    assert run("nft", "list", "ruleset") == made
    nft.delete(watch.HOLD)
    assert not run("nft", "list", "ruleset")
