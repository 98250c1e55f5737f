# SPDX-License-Identifier: Apache-2.0
"""A network namespace for this process: devices that lead nowhere, with routes as on a node.

Frames are addressed to the devices (frames.py).
"""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cffi import FFI

from tests.packet.frames import DEVICE, ROUTER
from tests.packet.places import V4, V6

DEVICES = ("uplink", "pods", "tunnel")
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET

_ffi = FFI()
_ffi.cdef("int unshare(int flags); int setns(int fd, int kind);")
_libc = _ffi.dlopen(None)

_SETUP = f"""\
link set lo up
link add uplink address {DEVICE} type veth peer name uplink-end
link add pods address {DEVICE} type veth peer name pods-end
link add tunnel address {DEVICE} type veth peer name tunnel-end
link set uplink up
link set uplink-end up
link set pods up
link set pods-end up
link set tunnel up
link set tunnel-end up
address add {V4.node}/24 dev uplink
address add {V6.node}/64 dev uplink nodad
address add {V4.bridge}/24 dev pods
address add {V6.bridge}/64 dev pods nodad
neighbour add {V4.router} lladdr {ROUTER} dev uplink nud permanent
neighbour add {V6.router} lladdr {ROUTER} dev uplink nud permanent
route add default via {V4.router}
route add default via {V6.router}
route add {V4.other_client}/32 dev tunnel
route add {V6.other_client}/128 dev tunnel
"""


@contextmanager
def network_of_our_own() -> Iterator[dict[str, int]]:
    """Yield the devices' indexes. The namespace ends when we leave it, or are killed."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    assert _libc.unshare(_NEW_NETWORK) == 0
    try:
        for switch in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
            Path(f"/proc/sys/net/{switch}").write_text("1")
        subprocess.run(["ip", "-batch", "-"], input=_SETUP, text=True, check=True)
        yield {device: socket.if_nametoindex(device) for device in DEVICES}
    finally:
        assert _libc.setns(home, _NEW_NETWORK) == 0
        os.close(home)


@contextmanager
def having(what: str, *words: str) -> Iterator[None]:
    """Have a route or neighbour during the block, in the words of ``ip``."""
    subprocess.run(["ip", what, "add", *words], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", what, "del", *words], check=True)


@contextmanager
def routed_from(address: str, device: str) -> Iterator[None]:
    """Route packets from this source through the device during the block, whatever their
    destination.
    """
    family = "-6" if ":" in address else "-4"
    route = ["route", "add", "default", "dev", device, "table", "7"]
    rule = ["rule", "add", "from", address, "lookup", "7"]
    for words in (route, rule):
        subprocess.run(["ip", family, *words], check=True)
    try:
        yield
    finally:
        for words in (rule, route):
            subprocess.run(["ip", family, words[0], "del", *words[2:]], check=True)


@contextmanager
def mtu(device: str, size: int) -> Iterator[None]:
    """Set the device's MTU during the block."""
    change = ["ip", "link", "set", device, "mtu"]
    subprocess.run([*change, str(size)], check=True)
    try:
        yield
    finally:
        subprocess.run([*change, "1500"], check=True)
