# SPDX-License-Identifier: Apache-2.0
"""A scratch namespace reaches the node and is reached; nobody has to remove it."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from ipaddress import ip_network

import pytest
from pyroute2 import netns

from ebpflb.errors import NodeError
from ebpflb.kernel import libc
from ebpflb.kernel.node import scratch_namespace
from ebpflb.kernel.node.scratch_namespace import VETH_PREFIX, ScratchNamespace, unused_address
from ebpflb.lab.agents import wait_until
from ebpflb.lab.netns import Namespace
from ebpflb.model.addresses import Family

KILLED = """
import sys
from ipaddress import ip_address
from ebpflb.kernel.node.scratch_namespace import ScratchNamespace
made = ScratchNamespace([ip_address("198.18.0.7")])
print(made.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def node() -> Iterator[Namespace]:
    """This process is in it."""
    made = Namespace(f"ebpflb-scratch-{os.getpid()}")
    made.create()
    made.ip("address add 192.0.2.1/32 dev lo")
    made.ip("address add 2001:db8::1/128 dev lo nodad")
    netns.pushns(made.netns)
    yield made
    netns.popns()
    netns.remove(made.netns)


def devices() -> list[str]:
    return [name for _, name in socket.if_nameindex() if name.startswith(VETH_PREFIX)]


@pytest.mark.parametrize("family", Family)
def test_both_ways(node: Namespace, family: Family) -> None:
    """A socket of the node reaches it, and one of it the node's own address."""
    address = unused_address(family, ())
    own = {Family.IPV4: "192.0.2.1", Family.IPV6: "2001:db8::1"}[family]
    sort = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}[family]
    with closing(ScratchNamespace([address])) as made:
        with made.call(lambda: socket.create_server((str(address), 80), family=sort)):
            socket.create_connection((str(address), 80), 5).close()
        with socket.create_server((own, 81), family=sort):
            made.call(lambda: socket.create_connection((own, 81), 5)).close()
    assert devices() == []


def test_an_address_that_is_routed_is_not_taken(
    node: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever route leads to it but the default one; where none is left it is said."""
    monkeypatch.setattr(scratch_namespace, "V4_NETWORK", ip_network("198.18.0.0/29"))
    node.ip(
        "link add d0 type veth peer name d1",
        "link set d0 up",
        "route add default dev d0",
        "route add 198.18.0.0/30 dev d0",
        "route add unreachable 198.18.0.4/32",
        "address add 198.18.0.5/32 dev d0",
    )
    assert {str(unused_address(Family.IPV4, ())) for _ in range(20)} == {"198.18.0.6"}
    node.ip("route add blackhole 198.18.0.0/16")
    with pytest.raises(NodeError, match="no unused IPv4 address"):
        unused_address(Family.IPV4, ())


def test_killed(node: Namespace) -> None:
    """Device and namespace end with a process that is killed."""
    command = [sys.executable, "-P", "-c", KILLED]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    name = process.stdout.readline().strip()
    assert devices() == [name]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_until("it is gone", lambda: devices() == [])


def test_not_allowed(node: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence, where namespaces cannot be made."""

    def refuse(_: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(libc, "unshare", refuse)
    with pytest.raises(NodeError, match=r"no scratch namespace can be made: .*CAP_SYS_ADMIN"):
        ScratchNamespace([unused_address(Family.IPV4, ())])
    assert devices() == []
