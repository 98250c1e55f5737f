# SPDX-License-Identifier: Apache-2.0
"""Probes find out what this kernel can do, and leave nothing behind."""

import errno
import os
from collections.abc import Callable

import pytest
from pyroute2.iproute import IPRoute

from ebpflb.errors import KernelError
from ebpflb.kernel import probe
from ebpflb.kernel.attach import tcx
from ebpflb.kernel.node import namespaces, sock_diag
from ebpflb.kernel.node.sock_diag import SockDiag
from tests.kernel.variants import needs_root, open_files

PROBES: list[Callable[[], object]] = [
    probe.set_retval,
    probe.coarse_clock,
    probe.route_source,
    probe.clsact_filters,
    probe.map_works,
    namespaces.own_cookie,
    sock_diag.can_destroy,
    tcx.works,
]


@needs_root
@pytest.mark.parametrize("ask", PROBES, ids=lambda ask: ask.__name__)
def test_leaves_nothing(ask: Callable[[], object]) -> None:
    """The probe leaves no descriptor and nothing at a device, and the namespace is the same."""
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
def test_socket_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the kernel refuses, or reports success without ending the socket, the answer is no."""
    monkeypatch.setattr(SockDiag, "destroy", refuse(errno.EOPNOTSUPP))
    assert not sock_diag.can_destroy()
    monkeypatch.setattr(SockDiag, "destroy", lambda *_: True)
    assert not sock_diag.can_destroy()


@needs_root
def test_sockets_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without udp_diag no socket is listed, so none is ended."""
    assert sock_diag.can_destroy()
    monkeypatch.setattr(SockDiag, "connected", refuse(errno.ENOENT))
    assert not sock_diag.can_destroy()


def refuse(number: int) -> Callable[..., None]:
    def refused(*_arguments: object) -> None:
        raise KernelError("sock_diag", number, os.strerror(number))

    return refused
