# SPDX-License-Identifier: Apache-2.0
"""The netfilter engine's table: its effect on packets, and how it is compared and rebuilt.

A client and an endpoint are in namespaces of their own; the test's thread is in the node's
namespace, which routes between them. A rule writes the choice into the priority, as the program at
ingress does.
"""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import NamedTuple

import pytest

from ebpflb.entries.services import CHOSEN_LIFT, Chosen
from ebpflb.errors import NodeError
from ebpflb.kernel.netfilter import nft, probe
from ebpflb.kernel.netfilter import table as rules
from ebpflb.kernel.netfilter.elements import Elements
from ebpflb.kernel.netfilter.table import (
    CANARY,
    KEEPER,
    TABLE,
    Keeper,
    NetfilterTable,
    TableOptions,
    remove,
)
from ebpflb.kernel.segment import checksum
from ebpflb.model.addresses import parse_address
from tests.kernel.node import nodes
from tests.kernel.node.nodes import run

NAME = f"ebpflb-test-{os.getpid()}-netfilter"
CLIENT, ENDPOINT = f"{NAME}-client", f"{NAME}-endpoint"
OPTIONS = TableOptions(0x4000, ((20000, 20099),), drops_invalid=True, sctp=True)
MASQUERADE = 0x800000
HERE_AND_THERE = "02:00:00:00:00:01", "02:00:00:00:00:02"
PORT, SERVICE_PORT = 8080, 80
# An SCTP INIT from port 5555 to SERVICE_PORT, with its checksum
INIT = bytes.fromhex("15b30050000000008916e7e20100001400000001000100000001000100000001")


class Addresses(NamedTuple):
    family: int
    client: str
    endpoint: str
    service: str
    node: str  # as endpoints see it


V4 = Addresses(socket.AF_INET, "192.0.2.7", "10.0.0.2", "198.51.100.1", "10.0.0.1")
V6 = Addresses(socket.AF_INET6, "2001:db8:1::7", "fd00::2", "2001:db8:99::1", "fd00::1")
FAMILIES = pytest.mark.parametrize("addresses", [V4, V6], ids=["IPv4", "IPv6"])


@pytest.fixture
def node() -> Iterator[None]:
    """Yield an empty namespace."""
    with nodes.fresh(NAME):
        yield


@pytest.fixture
def network() -> Iterator[None]:
    """Yield a client, a node and an endpoint."""
    with nodes.fresh(CLIENT), nodes.fresh(ENDPOINT), nodes.fresh(NAME):
        _connect("client0", CLIENT, ("192.0.2.1/24", "2001:db8:1::1/64"), V4.client, V6.client)
        _connect("endpoint0", ENDPOINT, ("10.0.0.1/24", "fd00::1/64"), V4.endpoint, V6.endpoint)
        for name in ("ipv4.ip_forward", "ipv6.conf.all.forwarding"):
            with open(f"/proc/sys/net/{name.replace('.', '/')}", "w") as file:
                file.write("1")
        yield


def _connect(device: str, netns: str, gateways: tuple[str, str], *addresses: str) -> None:
    """Give each end the other end's link address, so that no packet waits for neighbour
    discovery.
    """
    peer = ["peer", "name", "eth0", "address", HERE_AND_THERE[1], "netns", netns]
    run("ip", "link", "add", device, "address", HERE_AND_THERE[0], "type", "veth", *peer)
    with nodes.entered(netns):
        run("ip", "link", "set", "eth0", "up")
    run("ip", "link", "set", device, "up")
    for address, gateway in zip(addresses, gateways, strict=True):
        host, length = gateway.split("/")
        _add_address(device, gateway, address, HERE_AND_THERE[1])
        with nodes.entered(netns):
            _add_address("eth0", f"{address}/{length}", host, HERE_AND_THERE[0])
            run("ip", "route", "add", "default", "via", host)


def _add_address(device: str, address: str, neighbour: str, link_address: str) -> None:
    run("ip", "addr", "add", address, "dev", device, *_no_dad(address))
    run("ip", "neigh", "add", neighbour, "lladdr", link_address, "dev", device)


def _no_dad(address: str) -> list[str]:
    return ["nodad"] if ":" in address else []


@pytest.fixture
def table(network: None) -> Iterator[NetfilterTable]:
    with closing(NetfilterTable(OPTIONS)) as built:
        built.build()
        yield built


@pytest.fixture
def elements(table: NetfilterTable) -> Elements:
    """Return two elements: backend 1 is the endpoint's IPv4 address, backend 2 its IPv6 address."""
    written = Elements(table.session, OPTIONS)
    written.write([_backend(1, V4.endpoint), _backend(2, V6.endpoint)])
    return written


def _backend(number: int, address: str, port: int = PORT) -> tuple:  # type: ignore[type-arg]
    return number, parse_address(address), port


def _choose(addresses: Addresses, flags: int = 0, number: int | None = None) -> None:
    """Choose this backend for the client's packets to the service."""
    ip = "ip" if addresses is V4 else "ip6"
    number = number or (1 if addresses is V4 else 2)
    choice = Chosen.PREFIX | flags | number
    written = f"meta priority set {choice >> 16:x}:{choice & 0xFFFF:x}"
    rule = f"iifname client0 {ip} daddr {addresses.service} {written}"
    chain = f"chain c {{\n type filter hook prerouting priority -300\n {rule}\n }}"
    run("nft", "-f", "-", said=f"table inet choice {{\n {chain}\n}}\n")


def _socket(netns: str, addresses: Addresses, kind: int, protocol: int = 0) -> socket.socket:
    with nodes.entered(netns):
        opened = socket.socket(addresses.family, kind, protocol)
    opened.settimeout(5)
    return opened


def _ask(addresses: Addresses, kind: int, port: int = 0, to: int = PORT) -> tuple[str, int]:
    """Return the client's address and port as the endpoint sees them; check that the client gets
    the answer.
    """
    with (
        _socket(ENDPOINT, addresses, kind) as endpoint,
        _socket(CLIENT, addresses, kind) as client,
        ExitStack() as stack,
    ):
        endpoint.bind((addresses.endpoint, to))
        client.bind((addresses.client, port))
        if kind == socket.SOCK_STREAM:
            endpoint.listen()
        client.connect((addresses.service, SERVICE_PORT))
        client.send(b"?")
        if kind == socket.SOCK_STREAM:
            endpoint = stack.enter_context(endpoint.accept()[0])
            peer = endpoint.getpeername()
            assert endpoint.recv(9) == b"?"
            endpoint.send(b"!")
        else:
            said, peer = endpoint.recvfrom(9)
            assert said == b"?"
            endpoint.sendto(b"!", peer)
        assert client.recv(9) == b"!"
    return str(peer[0]), int(peer[1])


KINDS = pytest.mark.parametrize("kind", [socket.SOCK_DGRAM, socket.SOCK_STREAM], ids=["UDP", "TCP"])


BANDS = pytest.mark.parametrize("band", [None, 0, 1, 2, 4, 8, 15])


def _choose_lifted(elements: Elements, addresses: Addresses, flags: int, band: int | None) -> None:
    """Choose a backend whose id's lowest bits, ``band``, are lifted; None: an id as it is."""
    if band is None:
        _choose(addresses, flags)
    else:
        elements.write([_backend(0x30 | band, addresses.endpoint)])
        _choose(addresses, flags | Chosen.LIFTED, 0x30 | band << CHOSEN_LIFT)


@FAMILIES
@KINDS
@BANDS
def test_a_packet_goes_to_its_endpoint(
    addresses: Addresses, kind: int, band: int | None, elements: Elements
) -> None:
    """A packet with a choice goes to the endpoint with its client's address, without its choice;
    replies come back.
    """
    _choose_lifted(elements, addresses, 0, band)
    left = "ct state new meta l4proto { tcp, udp } meta priority none counter"
    chain = f"chain c {{\n type filter hook postrouting priority 300\n {left}\n }}"
    run("nft", "-f", "-", said=f"table inet left {{\n {chain}\n}}\n")
    assert _ask(addresses, kind, 5555) == (addresses.client, 5555)
    assert "counter packets 0 " not in run("nft", "list", "table", "inet", "left")


@FAMILIES
@KINDS
@BANDS
def test_the_endpoint_sees_the_nodes_address(
    addresses: Addresses, kind: int, band: int | None, elements: Elements
) -> None:
    """With the masquerade flag the endpoint sees the node's address and a port of the range; the
    packet's mark is cleared.
    """
    _choose_lifted(elements, addresses, MASQUERADE, band)
    chain = "chain c {\n type filter hook postrouting priority 300\n mark and 0x4000 != 0 drop\n }"
    run("nft", "-f", "-", said=f"table inet marked {{\n {chain}\n}}\n")
    host, port = _ask(addresses, kind, 5555)
    assert host == addresses.node
    assert port in range(20000, 20100)


@pytest.mark.usefixtures("elements")
def test_several_ranges_of_ports(table: NetfilterTable) -> None:
    """Each range has its share of the flows; table and elements stay when ranges change."""
    ranges = ((20000, 20499), (40000, 40999), (50000, 50499))
    table.set_options(OPTIONS._replace(masquerade_ports=ranges))
    assert table.build()
    assert not table.differences()
    shown = run("nft", "list", "chain", *_names("masquerade-marked"))
    assert "numgen random mod 2000 < 500" in shown and "numgen random mod 1500 < 1000" in shown
    _choose(V4, MASQUERADE)
    got = [_ask(V4, socket.SOCK_DGRAM, 5000 + at)[1] for at in range(100)]
    used = {next(at for at in ranges if at[0] <= port <= at[1]) for port in got}
    assert used == {*ranges}


@FAMILIES
@pytest.mark.usefixtures("elements")
def test_an_sctp_packet_is_translated(addresses: Addresses) -> None:
    """An SCTP packet gets the endpoint's address and port."""
    if not probe.can_translate_sctp():
        pytest.skip("this kernel has no NAT for SCTP")
    _choose(addresses)
    received = _send_sctp(addresses)
    assert received[:4] == struct.pack(">HH", 5555, PORT)


def _send_sctp(addresses: Addresses, seconds: float = 5) -> bytes:
    protocol = socket.IPPROTO_SCTP
    with (
        _socket(ENDPOINT, addresses, socket.SOCK_RAW, protocol) as endpoint,
        _socket(CLIENT, addresses, socket.SOCK_RAW, protocol) as client,
    ):
        endpoint.settimeout(seconds)
        client.sendto(INIT, (addresses.service, 0))
        return endpoint.recv(999)[20 if addresses is V4 else 0 :]


@FAMILIES
@pytest.mark.parametrize("flags", [0, MASQUERADE])
@pytest.mark.usefixtures("elements")
def test_a_choice_without_an_element(addresses: Addresses, flags: int) -> None:
    """A packet with such a choice is dropped, though the node itself has a socket at its
    destination; a packet without a choice reaches that socket.
    """
    run("ip", "link", "set", "lo", "up")
    run("ip", "addr", "add", addresses.service, "dev", "lo", *_no_dad(addresses.service))
    _choose(addresses, flags, 99)
    with (
        _socket(NAME, addresses, socket.SOCK_DGRAM) as local,
        _socket(CLIENT, addresses, socket.SOCK_DGRAM) as client,
    ):
        local.bind((addresses.service, SERVICE_PORT))
        client.sendto(b"chosen", (addresses.service, SERVICE_PORT))
        local.settimeout(0.2)
        with pytest.raises(TimeoutError):
            local.recv(9)
        assert "counter packets 1 " in run("nft", "list", "chain", *_names("translate"))
        run("nft", "delete", "table", "inet", "choice")
        client.sendto(b"other", (addresses.service, SERVICE_PORT))
        assert local.recv(9) == b"other"


@pytest.mark.usefixtures("elements")
def test_a_forged_choice_on_lo() -> None:
    """A choice on lo, where no program runs, is ignored: the frame reaches the local socket at its
    destination, not the endpoint.
    """
    run("ip", "link", "set", "lo", "up")
    run("ip", "addr", "add", V4.service, "dev", "lo")
    addresses = [socket.inet_aton(it) for it in (V4.client, V4.service)]
    header = struct.Struct(">BBHHHBBH4s4s")
    fields = [0x45, 0, 34, 0, 0, 64, socket.IPPROTO_UDP, 0, *addresses]
    fields[7] = checksum(header.pack(*fields))
    frame = bytes(12) + b"\x08\x00" + header.pack(*fields)
    frame += struct.pack(">HHHH", 5555, SERVICE_PORT, 14, 0) + b"forged"
    with (
        _socket(NAME, V4, socket.SOCK_DGRAM) as local,
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as forger,
    ):
        local.bind((V4.service, SERVICE_PORT))
        forger.bind(("lo", 0))
        forger.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, 0xEB000001 - (1 << 32))
        forger.send(frame)
        assert local.recv(9) == b"forged"


def _names(what: str) -> list[str]:
    return [TABLE.family, TABLE.table, what]


ACK, RST, SYN_ACK = 0x10, 0x04, 0x12


@FAMILIES
@pytest.mark.parametrize(
    ("flags", "port", "passes"),
    [(RST, PORT, False), (SYN_ACK, PORT, True), (RST, PORT + 1, True)],
    ids=["RST", "SYN/ACK", "other source"],
)
@pytest.mark.usefixtures("elements")
def test_invalid_segments(addresses: Addresses, flags: int, port: int, passes: bool) -> None:
    """An endpoint's segments of a connection that conntrack does not know do not reach the client;
    SYN/ACKs and other hosts' segments do.
    """
    assert _passes(addresses, flags, port) == passes


def _passes(addresses: Addresses, flags: int, port: int) -> bool:
    """Whether the endpoint's segment reaches the client; each SYN/ACK does after it."""
    protocol = socket.IPPROTO_TCP
    with (
        _socket(ENDPOINT, addresses, socket.SOCK_RAW, protocol) as endpoint,
        _socket(CLIENT, addresses, socket.SOCK_RAW, protocol) as client,
    ):
        for number, kind in ((1, flags), (2, SYN_ACK)):
            segment = _segment(addresses, port, kind, number)
            endpoint.sendto(segment, (addresses.client, 0))
        received = client.recv(999)[20 if addresses is V4 else 0 :]
        return bool(received[7] == 1)


def _segment(addresses: Addresses, port: int, flags: int, number: int) -> bytes:
    ends = [socket.inet_pton(addresses.family, it) for it in (addresses.endpoint, addresses.client)]
    head = [port, 5555, number, 0, 5 << 4, flags, 1000, 0, 0]
    layout = struct.Struct(">HHIIBBHHH")
    data = b"".join(ends) + struct.pack(">HH", socket.IPPROTO_TCP, layout.size) + layout.pack(*head)
    head[7] = checksum(data)
    return layout.pack(*head)


@pytest.mark.usefixtures("node")
def test_as_nft_prints_it() -> None:
    """nft(8) shows every rule with a comment, and can load what it shows."""
    with closing(nodes.SharedTable(OPTIONS)) as table:
        table.build()
        elements = Elements(table.session, OPTIONS)
        elements.write([_backend(1, V4.endpoint), _backend(2, V6.endpoint, 53)])
        shown = run("nft", "-y", "list", "table", "inet", TABLE.table)
        for line in (
            "type nat hook prerouting priority -110; policy accept;",
            "type nat hook postrouting priority 90; policy accept;",
            "type filter hook prerouting priority -190; policy accept;",
            f"elements = {{ 0:1 : {V4.endpoint} . {PORT} }}",
            f"elements = {{ 0:2 : {V6.endpoint} . 53 }}",
            'meta priority & ff00:0 == eb00:0 iif != "lo" goto translate',
            "dnat ip to meta priority & 3f:ffff map @backends4",
            "dnat ip6 to meta priority & 3f:ffff map @backends6",
            "masquerade to :20000-20099 fully-random",
            'counter packets 0 bytes 0 drop comment "ebpflb: the endpoint was removed"',
        ):
            assert line in shown
        run("nft", "delete", "table", "inet", TABLE.table)
        run("nft", "-f", "-", said=shown)
        assert run("nft", "-y", "list", "table", "inet", TABLE.table) == shown
        assert elements.read().keys() == {1, 2}


@pytest.fixture
def plain(node: None) -> Iterator[NetfilterTable]:
    """Return a table with one element, as on kernels before 6.9: other programs can change it."""
    with closing(nodes.SharedTable(OPTIONS)) as built:
        assert built.differences() == ["the table is missing"]
        assert not built.build()
        assert not built.differences()
        Elements(built.session, OPTIONS).write([_backend(1, V4.endpoint)])
        yield built


@pytest.mark.parametrize(
    ("tampering", "words", "is_kept"),
    [
        ("delete table inet ebpflb", "table is missing", False),
        ("flush chain inet ebpflb translate", "chain translate: rules were", True),
        ("add rule inet ebpflb choose accept", "chain choose: rules were", True),
        ("insert rule inet ebpflb choose accept", "chain choose: rules were", True),
        ("add chain inet ebpflb new", "chain new was added", True),
        ("add set inet ebpflb new { type mark; }", "map or set new was added", True),
        ("add table inet ebpflb { flags dormant; }", "switched off", True),
        ("chain inet ebpflb choose { policy drop; }", "chain choose was changed", True),
        ("flush chain inet ebpflb invalid; delete chain inet ebpflb invalid", "invalid is", True),
        (
            "flush chain inet ebpflb masquerade-marked; delete chain inet ebpflb masquerade-marked;"
            "add chain inet ebpflb masquerade-marked { type nat hook postrouting priority 95; }",
            "chain masquerade-marked was changed",
            True,
        ),
        (
            "flush chain inet ebpflb untranslated; delete set inet ebpflb endpoints4",
            "endpoints4 is missing",
            False,
        ),
        (
            "flush chain inet ebpflb translate; delete map inet ebpflb backends4;"
            "add map inet ebpflb backends4 { type mark : ipv4_addr . inet_service; }",
            "map or set backends4 was changed",
            False,
        ),
    ],
)
def test_differences_are_noticed_and_repaired(
    plain: NetfilterTable, tampering: str, words: str, is_kept: bool
) -> None:
    """A removal, addition or change by another program is noticed and repaired; elements stay if
    their map is intact.
    """
    before = run("nft", "-n", "list", "table", "inet", TABLE.table)
    run("nft", "-f", "-", said=tampering.replace(";", "\n") if "{" not in tampering else tampering)
    assert any(words in difference for difference in plain.differences())
    assert plain.build() == is_kept
    assert plain.differences() == []
    elements = Elements(plain.session, OPTIONS)
    elements.write([], [_backend(1, V4.endpoint)])
    elements.write([_backend(1, V4.endpoint)])
    assert sorted(run("nft", "-n", "list", "table", "inet", TABLE.table)) == sorted(before)


def test_other_options(plain: NetfilterTable) -> None:
    """Other options make another table, which keeps all elements that are still valid."""
    options = TableOptions(0x8000, ((30000, 30999),), drops_invalid=False, sctp=False)
    with closing(nodes.SharedTable(options)) as other:
        assert other.differences()
        assert other.build()
        assert not other.differences()
        assert Elements(other.session, options).read().keys() == {1}
    assert plain.differences()
    assert not plain.build()  # the sets of endpoints are new


@pytest.mark.usefixtures("node")
def test_an_owned_table() -> None:
    """Other programs cannot change or flush an owned table; it stays when its agent ends, the next
    agent takes it over with its elements, and anyone may remove it while no agent runs.
    """
    with closing(NetfilterTable(OPTIONS)) as table:
        table.build()
        if not table.is_owned:
            pytest.skip("this kernel's tables cannot stay without their owner (Linux 6.9)")
        Elements(table.session, OPTIONS).write([_backend(1, V4.endpoint)])
        run("nft", "flush", "ruleset")
        assert not table.differences()
        with closing(NetfilterTable(OPTIONS)) as second, pytest.raises(NodeError, match="owns"):
            second.build()
        with pytest.raises(NodeError, match="another process owns the table"):
            remove()
    with closing(NetfilterTable(OPTIONS)) as table:
        assert table.build()
        assert table.is_owned
        assert not table.differences()
        assert Elements(table.session, OPTIONS).read().keys() == {1}
    remove()
    assert not nft.tables()


@pytest.mark.usefixtures("node")
def test_all_tables_are_removed() -> None:
    """All tables of the engine are removed; missing ones are no error."""
    remove()
    with closing(nodes.SharedTable(OPTIONS)) as table:
        table.build()
        remove()
    assert not nft.tables()


@pytest.mark.usefixtures("network")
def test_connections_survive_a_flush() -> None:
    """With a table that keeps NAT alive, an established connection continues while the engine's
    table is missing, and afterwards.
    """
    keeper = Keeper()
    if not keeper.open():
        pytest.skip("this kernel's tables have no owner (Linux 5.12)")
    assert keeper.open()
    with (
        closing(keeper),
        closing(nodes.SharedTable(OPTIONS)) as table,
        _socket(ENDPOINT, V4, socket.SOCK_STREAM) as listener,
        _socket(CLIENT, V4, socket.SOCK_STREAM) as client,
    ):
        table.build()
        Elements(table.session, OPTIONS).write([_backend(1, V4.endpoint)])
        _choose(V4)
        listener.bind((V4.endpoint, PORT))
        listener.listen()
        client.connect((V4.service, SERVICE_PORT))
        with listener.accept()[0] as endpoint:
            endpoint.settimeout(5)
            for step in (lambda: run("nft", "flush", "ruleset"), table.build):
                step()
                client.send(b"?")
                assert endpoint.recv(9) == b"?"
                endpoint.send(b"!")
                assert client.recv(9) == b"!"
            assert KEEPER in nft.tables()
    assert KEEPER not in nft.tables()


def test_cleanup_removes_what_a_killed_agent_left_of_the_canary(node: None) -> None:
    run("nft", "add", "table", "inet", "ebpflb-canary")
    remove()
    assert CANARY not in nft.tables()


def test_the_probe_leaves_nothing(node: None) -> None:
    """The kernel that runs these tests can translate; the probe leaves nothing here."""
    assert probe.netfilter_obstacle() is None
    assert probe.can_translate_sctp() in (True, False)
    assert not nft.tables()
    assert "probe" not in run("ip", "link")


def test_the_probe_finds_an_obstacle(monkeypatch: pytest.MonkeyPatch, node: None) -> None:
    """A packet that is not translated, or a refused table, is reported in a sentence."""
    monkeypatch.setattr(probe, "BACKEND_ID", 1 << 23)
    assert "was not delivered" in (probe.netfilter_obstacle() or "")
    monkeypatch.undo()
    monkeypatch.setattr(rules, "base_chain", lambda *_: {})
    assert "cannot translate by nf_tables" in (probe.netfilter_obstacle() or "")
