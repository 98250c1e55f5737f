# SPDX-License-Identifier: Apache-2.0
"""Every file of bpf/hooks in every variant, compiled with whichever BCC is here.

    python -m vagrant.kernels.bytecode FOLDER           compiles, into an agent's cache
    python -m vagrant.kernels.bytecode --load FOLDER    has this kernel load what is there

The second needs no BCC: bytecode of another BCC (vagrant/bcc) is loaded here.
"""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec

from ebpflb.datapath import conntrack_probe, probe
from ebpflb.datapath.maps import bpf_map, layout
from ebpflb.datapath.programs import compiler, loader
from ebpflb.errors import EbpflbError, NodeError
from ebpflb.options import Paths

_RETVAL, _COARSE, _BARE = "-DHAVE_SET_RETVAL", "-DHAVE_COARSE_CLOCK", "-DNO_LINK_HEADER"
_CONNTRACK = "-DHAVE_CONNTRACK"
PROBE = "hooks/conntrack_probe.c"  # a kernel without its functions takes no variant of it
# The compiler's flags, by source and variant; the agent loads these and no others.
VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "hooks/packet.c": {
        "plain": (),
        "coarse clock": (_COARSE,),
        "no link header": (_BARE,),
        "coarse clock, no link header": (_COARSE, _BARE),
        "conntrack": (_COARSE, _CONNTRACK),
        "conntrack, no link header": (_COARSE, _CONNTRACK, _BARE),
    },
    "hooks/socket.c": {"plain": (), "set_retval": (_RETVAL,)},
    "hooks/netns_cookie.c": {"plain": ()},
    PROBE: {"plain": ()},
}


def variants(source: str) -> dict[str, tuple[str, ...]]:
    """Those of a source that this kernel takes, which is tried."""
    lacking: dict[str, Callable[[], bool]] = {
        _RETVAL: probe.set_retval,
        _COARSE: probe.coarse_clock,
        _CONNTRACK: _has_conntrack,
    }
    missing = {flag for flag, works in lacking.items() if not works()}
    if source == PROBE and _CONNTRACK in missing:
        return {}
    return {name: its for name, its in VARIANTS[source].items() if missing.isdisjoint(its)}


@cache
def _has_conntrack() -> bool:
    return conntrack_probe.obstacle(Paths.cache) is None


def compile_all(folder: Path) -> None:
    """Raises CompileError."""
    for source, its in VARIANTS.items():
        for flags in its.values():
            compiler.compile_source(source, flags, cache=folder)
        print(f"BCC {compiler.bcc_version()}: {source}, {', '.join(its)}")


def load_all(folder: Path) -> None:
    """Loads every program of a folder. Raises VerifierError or KernelError."""
    sections = {name: at for source in VARIANTS for name, at in compiler.sections(source).items()}
    made = {
        name: bpf_map.open_map(spec, bpf_map.create_map(spec)) for name, spec in layout.MAPS.items()
    }
    fds = {compiler.MAP_NUMBERS[name]: opened.fd for name, opened in made.items()}
    count = 0
    for entry in sorted(folder.glob("*.msgpack")):
        found = msgspec.msgpack.decode(entry.read_bytes(), type=dict[str, bytes])
        for name, code in found.items():
            attach = loader.HOOKS[sections[name]]
            try:
                loader.load_one(name, attach, loader.relocate(code, fds))
            except NodeError as error:  # this kernel has no functions for conntrack
                print(f"{name}: {error}")
            else:
                count += 1
    print(f"{count} programs loaded")
    if not count:
        sys.exit(f"no bytecode in {folder}")


def main(words: list[str]) -> None:
    try:
        if words[0] == "--load":
            load_all(Path(words[1]))
        else:
            compile_all(Path(words[0]))
    except EbpflbError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
