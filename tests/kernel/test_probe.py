# SPDX-License-Identifier: Apache-2.0
"""Probes: they find what this kernel can do, and leave nothing behind."""

import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from pyroute2.iproute import IPRoute

from ebpflb.errors import KernelError
from ebpflb.kernel import bpf, probe
from ebpflb.kernel.attach import tcx
from ebpflb.kernel.maps import bpf_map, layout
from ebpflb.kernel.maps.layout import MapSpec
from ebpflb.kernel.node import namespaces, sock_diag
from ebpflb.kernel.node.sock_diag import SockDiag
from ebpflb.kernel.programs import compiler
from tests.kernel.variants import needs_root, open_files

PACKETS = "hooks/packet.c"
# bpf_map_lookup_elem, _update_elem, _delete_elem, bpf_spin_lock, _unlock: unmade_maps tries them.
OF_MAPS = {1, 2, 3, 93, 94, 130}
CALL, LOAD64 = 0x85, 0x18
PROBES: list[Callable[[], object]] = [
    probe.set_retval,
    probe.coarse_clock,
    probe.route_source,
    probe.packet_helpers,
    probe.clsact_filters,
    probe.map_works,
    probe.unmade_maps,
    probe.batches,
    namespaces.own_cookie,
    sock_diag.can_destroy,
    tcx.works,
]


def helpers(code: bytes) -> set[int]:
    """The numbers of the helpers that a program calls."""
    found, at = set(), 0
    while at < len(code):
        opcode, registers, _offset, number = struct.unpack_from("<BBhi", code, at)
        if opcode == CALL and not registers >> 4:
            found.add(number)
        at += 16 if opcode == LOAD64 else 8
    return found


def test_packet_helpers_are_those_called(cache: Path) -> None:
    """The helpers that are probed are exactly those that the packet programs call."""
    variants: list[tuple[str, ...]] = [(), ("-DNO_LINK_HEADER",)]
    programs = [
        code
        for flags in variants
        for code in compiler.compile_source(PACKETS, flags, cache=cache).programs.values()
    ]
    called = set().union(*map(helpers, programs)) - OF_MAPS
    assert called == {call[0] for call in probe.PACKET_HELPERS.values()}


@needs_root
def test_every_packet_helper() -> None:
    """Every kernel that runs these tests has all of them: a refusal is a mistake of the probe."""
    assert all(probe.packet_helpers().values())


@needs_root
@pytest.mark.parametrize("call", [(), (9,), (23, 1), (2**20,)], ids=str)
def test_refused(call: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper that does not exist, or is called with wrong arguments, is reported as missing."""
    monkeypatch.setattr(probe, "PACKET_HELPERS", {"it": call or (0,)})
    assert probe.packet_helpers() == {"it": False}


@needs_root
@pytest.mark.parametrize("ask", PROBES, ids=lambda ask: ask.__name__)
def test_leaves_nothing(ask: Callable[[], object]) -> None:
    """No descriptor stays open, nothing stays at a device, and the namespace is the same."""
    ask()  # what is opened once stays open
    before = open_files(), os.readlink("/proc/thread-self/ns/net"), qdiscs()
    ask()
    assert (open_files(), os.readlink("/proc/thread-self/ns/net"), qdiscs()) == before


def qdiscs() -> list[tuple[int, str]]:
    with IPRoute() as route:
        return [(found["index"], found.get_attr("TCA_KIND")) for found in route.get_qdiscs()]


@needs_root
def test_no_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no namespace can be created the probe raises an error; it does not try our own devices."""
    monkeypatch.setattr(namespaces, "NEW_NETWORK", 1)  # EINVAL
    with pytest.raises(OSError, match="cannot make a namespace: Invalid argument"):
        probe.clsact_filters()


@needs_root
@pytest.mark.parametrize(
    "kind", sorted({bpf_map.kernel_kind(spec) for spec in layout.MAPS.values()} - {layout.RING})
)
def test_batches(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of map has an answer; it is no where the kernel refuses."""
    assert kind in probe.batches()

    def refuse(*_arguments: object) -> None:
        raise KernelError("batch", bpf.ENOTSUPP, "not supported")

    monkeypatch.setattr(bpf, "map_write_batch", refuse)
    assert probe.batches()[kind] is False


@needs_root
def test_unmade_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of map that the kernel cannot create is named with its flags."""
    assert probe.unmade_maps() == []
    flat = MapSpec("flat", "LPM_TRIE", "__u64", "__u32", 4, ("NONE",))  # must be NO_PREALLOC
    monkeypatch.setitem(layout.MAPS, "flat", flat)
    assert probe.unmade_maps() == ["LPM_TRIE (NONE)"]


@needs_root
def test_socket_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the kernel refuses, or succeeds without ending the socket, the answer is no."""
    monkeypatch.setattr(SockDiag, "destroy", refuse(errno.EOPNOTSUPP))
    assert not sock_diag.can_destroy()
    monkeypatch.setattr(SockDiag, "destroy", lambda *_: True)
    assert not sock_diag.can_destroy()


@needs_root
def test_sockets_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without udp_diag sockets are not listed, and so none is ended."""
    assert sock_diag.can_destroy()
    monkeypatch.setattr(SockDiag, "connected", refuse(errno.ENOENT))
    assert not sock_diag.can_destroy()


def refuse(number: int) -> Callable[..., None]:
    def refused(*_arguments: object) -> None:
        raise KernelError("sock_diag", number, os.strerror(number))

    return refused
