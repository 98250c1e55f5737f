# SPDX-License-Identifier: Apache-2.0
"""Entries of conntrack are listed and deleted over netlink, in a namespace of the test's own."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from ebpflb.entries.flows import DESTINATION_NAT, Connection, Ends, FlowState
from ebpflb.errors import NodeError
from ebpflb.kernel.netfilter import conntrack
from ebpflb.model.services import Protocol
from tests.kernel.node import nodes
from tests.kernel.node.nodes import run

NAME = f"ebpflb-test-{os.getpid()}-ctnetlink"
MANY = 2000  # more than the kernel sends at a time
VIPS = {4: "127.0.0.7", 6: "fd00:96::7"}
RULES = """
table inet mine {
  chain c {
    type nat hook output priority -100
    ip daddr 127.0.0.7 meta l4proto { tcp, udp } dnat ip to 127.0.0.1:5454
    ip6 daddr fd00:96::7 meta l4proto { tcp, udp } dnat ip6 to [::1]:5454
  }
}
"""


@pytest.fixture(autouse=True)
def netns() -> Iterator[None]:
    with nodes.fresh(NAME):
        run("ip", "link", "set", "lo", "up")
        run("ip", "address", "add", f"{VIPS[6]}/128", "dev", "lo", "nodad")
        run("nft", "-f", "-", said=RULES)
        yield


def say(address: str, port: int, source: int = 0) -> None:
    kind = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(kind, socket.SOCK_DGRAM) as client:
        client.bind(("", source))
        client.sendto(b"?", (address, port))


def everything() -> list[Connection]:
    return list(conntrack.connections(lambda *_: True))


@pytest.mark.parametrize("family", [4, 6])
def test_datagrams_and_their_backend(family: int) -> None:
    """An entry has the requested destination, and the backend and client from its replies."""
    vip, backend = VIPS[family], {4: "127.0.0.1", 6: "::1"}[family]
    say(vip, 53, source=4321)
    (found,) = everything()
    source, destination, *ports = found.original
    assert (str(destination), ports) == (vip, [4321, 53])
    assert found.reply == (ip_address(backend), source, 5454, 4321)
    assert (found.protocol, found.state) == (Protocol.UDP, FlowState.ONE_WAY)
    assert found.is_translated
    assert 0 < found.seconds <= 30


def test_ipvs_translates_without_a_bit_of_the_status() -> None:
    """An entry whose replies come from another address is translated, as those of IPVS."""
    client, vip, backend = map(ip_address, ("10.0.0.1", VIPS[4], "10.0.0.2"))
    asked = Ends(client, vip, 4321, 53)
    assert Connection(Protocol.UDP, asked, Ends(backend, client, 53, 4321)).is_translated
    assert Connection(Protocol.UDP, asked, Ends(vip, client, 5353, 4321)).is_translated
    assert not Connection(Protocol.UDP, asked, asked.reversed()).is_translated


@pytest.mark.parametrize("family", [4, 6])
def test_a_connection_and_its_states(family: int) -> None:
    """TCP has the states of the flow tables, and also conntrack's own words for them."""
    kind = socket.AF_INET6 if family == 6 else socket.AF_INET
    with socket.create_server(("::" if family == 6 else "", 5454), family=kind) as server:
        client = socket.create_connection((VIPS[family], 80))
        peer, _ = server.accept()
        (found,) = everything()
        assert (found.protocol, found.state_name) == (Protocol.TCP, "established")
        assert found.state is FlowState.OPEN
        client.shutdown(socket.SHUT_WR)
        assert peer.recv(1) == b""
        (found,) = everything()
        assert found.state is FlowState.CLOSING
        assert found.state_name in ("fin-wait", "close-wait"), "by whether the FIN is acknowledged"
        peer.close()
        client.close()
        (found,) = everything()
        assert found.state is FlowState.CLOSED


def test_only_what_is_wanted() -> None:
    """The caller filters by protocol, packed address and port; the kernel filters by protocol."""
    for port in (53, 54, 55):
        say("127.0.0.9", port)
        say(VIPS[6], port)
    with socket.create_server(("127.0.0.9", 53)) as server:
        socket.create_connection(server.getsockname()).close()
    wanted = (Protocol.UDP, ip_address("127.0.0.9").packed, 53)
    (found,) = conntrack.connections(lambda *ends: ends == wanted)
    assert (str(found.original.destination), found.original.destination_port) == ("127.0.0.9", 53)
    assert not found.is_translated
    assert len(list(conntrack.connections(lambda *_: True, Protocol.UDP))) == 6
    assert len(list(conntrack.connections(lambda *_: True, Protocol.TCP))) == 1
    by_protocol = conntrack.protocol_filter(Protocol.TCP)
    listed = list(conntrack.dump(by_protocol, socket.AF_INET))
    assert len(listed) == 1, "the kernel leaves out the others"


def test_by_what_an_entry_lacks_of_its_status() -> None:
    """The kernel leaves out translated entries, if it can filter by status bits."""
    for address in (*VIPS.values(), "127.0.0.9"):
        say(address, 53)
    listed = conntrack.connections(lambda *_: True, Protocol.UDP, without=DESTINATION_NAT)
    assert [str(each.original.destination) for each in listed] == ["127.0.0.9"]
    untranslated = conntrack.status_filter(DESTINATION_NAT)
    assert len(list(conntrack.dump(untranslated))) == 1, "the kernel leaves out the others"


@pytest.mark.parametrize("family", [4, 6])
def test_by_both_ends(family: int) -> None:
    """The caller sees destination and endpoint before an entry is decoded, also in zones."""
    zoned = "chain z {\n type filter hook output priority -300\n udp sport 4002 ct zone set 5\n }"
    run("nft", "-f", "-", said=f"table inet zoned {{\n {zoned}\n}}\n")
    seen = set[tuple[Any, ...]]()

    def may_be(protocol: int, *ends: Any) -> bool:
        seen.add((protocol, *ends))
        return bool(ends[3] == 5454)

    for source in (4001, 4002):
        say(VIPS[family], 53, source=source)
    say({4: "127.0.0.9", 6: "::1"}[family], 5453)
    found = conntrack.connections(lambda *_: True, Protocol.UDP, may_be=may_be)
    assert {each.original.source_port for each in found} == {4001, 4002}
    endpoint = ip_address({4: "127.0.0.1", 6: "::1"}[family]).packed
    assert (Protocol.UDP, ip_address(VIPS[family]).packed, 53, endpoint, 5454) in seen
    assert {each[4] for each in seen} == {5454, 5453}


def test_only_these_are_deleted() -> None:
    """Only the given entries are deleted; an entry that has replaced one of them stays."""
    for port in (53, 54):
        say(VIPS[4], port, source=4000 + port)
    found = list(conntrack.connections(lambda _, __, port: port == 53))
    assert conntrack.delete(found) == 1
    assert [each.original.destination_port for each in everything()] == [54]
    run("nft", "-f", "-", said=f"delete table inet mine\n{RULES.replace('5454', '5455')}")
    say(VIPS[4], 53, source=4053)
    assert conntrack.delete(found) == 0, "it has another backend than the one that was listed"
    assert conntrack.count() == 2


def test_an_entry_that_is_not_from_the_kernel_is_never_deleted() -> None:
    """An entry without a tuple is not deleted: the kernel would delete all entries."""
    say(VIPS[4], 53)
    (found,) = everything()
    with pytest.raises(ValueError, match="not from the kernel"):
        conntrack.delete([found._replace(identity=b"")])
    assert conntrack.count() == 1


def test_zones_are_told_apart() -> None:
    """An entry in a zone is listed, and deleted without the same entry outside the zone."""
    zoned = "chain z {\n type filter hook output priority -300\n udp sport 4001 ct zone set 5\n }"
    run("nft", "-f", "-", said=f"table ip zoned {{\n {zoned}\n}}\n")
    say(VIPS[4], 53, source=4001)
    say(VIPS[4], 53, source=4002)
    found = {each.original.source_port: each for each in everything()}
    assert conntrack.delete([found[4001]]) == 1
    assert [each.original.source_port for each in everything()] == [4002]


def test_no_conntrack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A kernel without conntrack has no entries; entries that cannot be listed are an error."""
    assert everything() == []
    say(VIPS[4], 53)
    with monkeypatch.context() as patched:
        patched.setattr(conntrack, "GET", 99 << 8 | 1)  # of no subsystem
        with pytest.raises(NodeError, match=r"cannot be listed: .*: load .*nf_conntrack_netlink$"):
            everything()
    monkeypatch.setattr(conntrack, "COUNT", tmp_path / "nothing")
    assert everything() == []


def test_without_the_capability() -> None:
    """The missing capability is named, unless there are no entries."""
    ask = (
        "from ebpflb.kernel.netfilter import conntrack;"
        "print(list(conntrack.connections(lambda *_: True)))"
    )
    command = ["setpriv", "--bounding-set=-net_admin", sys.executable, "-P", "-c", ask]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr
    say(VIPS[4], 53)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "cannot be listed: Operation not permitted: CAP_NET_ADMIN is needed" in done.stderr


@pytest.mark.parametrize("family", [4, 6])
def test_an_entry_is_found_by_its_flow(family: int) -> None:
    """A flow's entry is found by its original direction only.

    A flow without an entry is skipped.
    """
    say(VIPS[family], 53, source=4321)
    (entry,) = everything()
    asked = [(int(entry.protocol), entry.original)]
    other = (int(entry.protocol), entry.original._replace(source_port=4322))
    (found,) = conntrack.find([other, *asked, other])
    assert found._replace(seconds=entry.seconds) == entry  # a second may pass in between
    assert list(conntrack.find([(int(entry.protocol), entry.reply)])) == []
