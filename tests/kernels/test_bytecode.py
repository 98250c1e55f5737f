# SPDX-License-Identifier: Apache-2.0
"""The list of the files that are compiled and loaded in the lab is complete."""

import re
from pathlib import Path

import pytest

from ebpflb.kernel import datapath, probe
from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.maps import layout
from ebpflb.kernel.programs import precompile

SWITCH = re.compile(r"(?m)^#\s*ifn?def (?!EBPFLB_|DIALECT_|__)(\w+)")


def test_every_compiled_file_is_listed() -> None:
    """The list has every file of hooks/ that is compiled."""
    found = layout.SOURCES.glob("hooks/*.c")
    assert {str(path.relative_to(layout.SOURCES)) for path in found} == set(precompile.VARIANTS)


def test_every_switch_is_both_on_and_off() -> None:
    """The variants have every switch of the C code both on and off, except one for tests.
    SOCK_DESTROY is none: it says which kernels load the source."""
    files = [path for path in layout.SOURCES.rglob("*.[ch]") if "stub" not in path.parts]
    switches = {f"-D{name}" for path in files for name in SWITCH.findall(Path(path).read_text())}
    every = {
        flag for its in precompile.VARIANTS.values() for flags in its.values() for flag in flags
    }
    assert every - {precompile.SOCK_DESTROY} | {"-DWHOLE_WAY"} == switches
    sources = precompile.VARIANTS.keys() - {precompile.QUIET_SOCKET}
    assert all(() in precompile.VARIANTS[source].values() for source in sources)


@pytest.mark.parametrize("set_retval", [True, False])
@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("coarse", [True, False])
@pytest.mark.parametrize("process", [True, False])
def test_whatever_probes_find_is_a_variant(
    monkeypatch: pytest.MonkeyPatch, set_retval: bool, read: bool, coarse: bool, process: bool
) -> None:
    """Each combination of compiler flags that the agent uses is precompiled, so no node of the
    image needs a compiler.
    """
    monkeypatch.setattr(probe, "set_retval", lambda: set_retval)
    monkeypatch.setattr(probe, "kernel_read", lambda: read)
    monkeypatch.setattr(probe, "coarse_clock", lambda: coarse)
    monkeypatch.setattr(probe, "process", lambda: process)
    sockets = precompile.VARIANTS[datapath.SOCKET_SOURCE].values()
    packets = precompile.VARIANTS[datapath.PACKET_SOURCE].values()
    usual, monitored = datapath.socket_variant(), datapath.socket_variant((precompile.MONITOR,))
    assert {usual, monitored} <= {*sockets}
    assert {*usual} <= {*monitored}  # monitoring changes no answer
    assert datapath.socket_flags() in precompile.VARIANTS[precompile.EXPLAIN].values()
    flags = datapath.packet_flags()
    assert {(*flags, *more) for more in datapath.LINK_VARIANTS.values()} <= {*packets}


def test_what_is_compiled_without_flags_is_a_variant() -> None:
    """The program that only reads the cookie has no flags."""
    assert () in precompile.VARIANTS[cgroup_links.COOKIE_SOURCE].values()
