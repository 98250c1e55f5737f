# SPDX-License-Identifier: Apache-2.0
"""Connections that conntrack translates, in a namespace of the test's own."""

import errno
from pathlib import Path
from socket import AF_INET, SOCK_DGRAM, socket

import pytest

from ebpflb.errors import NodeError
from ebpflb.kernel.netfilter import conntrack, nft, watch
from ebpflb.kernel.netfilter.nft import Refused, Transaction
from tests.kernel.node import nodes
from tests.kernel.node.nodes import run

pytestmark = pytest.mark.usefixtures("fresh_netns")


@pytest.mark.parametrize(
    ("rule", "translated"), [("dnat to 127.0.0.1:54", True), ("ct state new accept", False)]
)
def test_translated_connections_count(rule: str, translated: bool) -> None:
    """Connections to a translated address count; connections that are only tracked do not."""
    assert not watch.has_dnat_connections()
    run("ip", "link", "set", "lo", "up")
    chain = f"type nat hook output priority -100\n udp dport 53 {rule}\n"
    run("nft", "-f", "-", said=f"table ip mine {{\n chain c {{\n {chain} }}\n}}\n")
    with socket(AF_INET, SOCK_DGRAM) as client:
        client.sendto(b"?", ("127.0.0.1", 53))
    assert watch.has_dnat_connections() == translated


def test_unlisted_connections_may_be_translated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If the kernel does not list its connections, some may be translated."""
    unknown = 99 << 8 | 1  # of no subsystem
    monkeypatch.setattr(conntrack, "GET", unknown)
    assert watch.has_dnat_connections()
    monkeypatch.setattr(conntrack, "MOST", tmp_path / "nothing")
    assert not watch.has_dnat_connections()


def test_a_kernel_without_nat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing chains of type nat are given as the reason, with what to do."""

    def refuse(*_: object) -> None:
        raise Refused(watch.HOLD, errno.ENOENT)

    monkeypatch.setattr(Transaction, "commit", refuse)
    with pytest.raises(NodeError, match="modprobe -a nft_chain_nat nft_ct"):
        watch.keep_nat_hooks()


def test_a_table_stays_as_long_as_it_is_used() -> None:
    """The table is removed when no connection is translated; a missing table counts as removed."""
    watch.keep_nat_hooks()
    nodes.translate("127.0.0.7", 53)
    assert not watch.release_when_unused(watch.HOLD)
    conntrack.delete(conntrack.connections(lambda *_: True))
    for _ in range(2):
        assert watch.release_when_unused(watch.HOLD)
        assert not nft.exists(watch.HOLD)
