# SPDX-License-Identifier: Apache-2.0
"""The list of what is compiled and loaded in the lab leaves nothing out."""

import re
from pathlib import Path

from ebpflb.datapath import datapath, probe
from ebpflb.datapath.maps import layout
from vagrant.kernels import bytecode

SWITCH = re.compile(r"(?m)^#\s*ifn?def (?!EBPFLB_|DIALECT_|__)(\w+)")


def test_sources() -> None:
    """Every file of hooks/ that is compiled."""
    found = layout.SOURCES.glob("hooks/*.c")
    assert {str(path.relative_to(layout.SOURCES)) for path in found} == set(bytecode.VARIANTS)


def test_variants() -> None:
    """Every switch of the C, on and off."""
    files = [path for path in layout.SOURCES.rglob("*.[ch]") if "stub" not in path.parts]
    switches = {f"-D{name}" for path in files for name in SWITCH.findall(Path(path).read_text())}
    every = {flag for its in bytecode.VARIANTS.values() for flags in its.values() for flag in flags}
    assert every == switches
    assert all(() in its.values() for its in bytecode.VARIANTS.values())


def test_what_the_agent_compiles() -> None:
    """The flags that the agent gives the compiler make a variant of the list."""
    assert datapath.socket_flags() in bytecode.VARIANTS["hooks/socket.c"].values()
    for conntrack in {False, probe.coarse_clock()}:  # which is older than conntrack's functions
        flags = datapath.packet_flags(conntrack=conntrack)
        for more in ((), ("-DNO_LINK_HEADER",)):
            assert (*flags, *more) in bytecode.VARIANTS[datapath.PACKET_SOURCE].values()
