# SPDX-License-Identifier: Apache-2.0
"""A scratch namespace and the node reach each other; the namespace needs no removal."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from ipaddress import ip_address

import pytest
from pyroute2 import netns

from ebpflb.errors import NodeError
from ebpflb.kernel.node import namespaces
from ebpflb.kernel.node.scratch_namespace import VETH_PREFIX, ScratchNamespace
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
ADDRESSES = {Family.IPV4: ip_address("198.18.0.7"), Family.IPV6: ip_address("2001:db8::7")}


@pytest.fixture
def node() -> Iterator[Namespace]:
    """Move this process into the node's namespace."""
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
    """A socket of the node reaches the namespace, and a socket there reaches the node."""
    address = ADDRESSES[family]
    own = {Family.IPV4: "192.0.2.1", Family.IPV6: "2001:db8::1"}[family]
    sort = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}[family]
    with closing(ScratchNamespace([address])) as made:
        with made.call(lambda: socket.create_server((str(address), 80), family=sort)):
            socket.create_connection((str(address), 80), 5).close()
        with socket.create_server((own, 81), family=sort):
            made.call(lambda: socket.create_connection((own, 81), 5)).close()
    assert devices() == []


@pytest.mark.parametrize("family", Family)
def test_an_address_in_use(node: Namespace, family: Family) -> None:
    """A second namespace with the same address is refused, because the two would take each other's
    packets.
    """
    with closing(ScratchNamespace([ADDRESSES[family]])):
        with pytest.raises(NodeError, match="no other `ebpflb doctor` runs"):
            ScratchNamespace([ADDRESSES[family]])
        assert len(devices()) == 1


def test_it_ends_with_a_killed_process(node: Namespace) -> None:
    """Device and namespace disappear when their process is killed."""
    command = [sys.executable, "-P", "-c", KILLED]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    name = process.stdout.readline().strip()
    assert devices() == [name]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_until("it is gone", lambda: devices() == [])


def test_not_allowed(node: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """If namespaces cannot be made, the error is a sentence."""

    def refuse(_: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(namespaces, "unshare", refuse)
    with pytest.raises(NodeError, match=r"no scratch namespace can be made: .*CAP_SYS_ADMIN"):
        ScratchNamespace([ADDRESSES[Family.IPV4]])
    assert devices() == []
