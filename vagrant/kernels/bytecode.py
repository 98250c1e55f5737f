# SPDX-License-Identifier: Apache-2.0
"""Every file of bpf/hooks in every variant, compiled with whichever BCC is here.

    python -m vagrant.kernels.bytecode FOLDER           compiles, into an agent's cache
    python -m vagrant.kernels.bytecode --load FOLDER    has this kernel load what is there

The second needs no BCC: bytecode of another BCC (vagrant/bcc) is loaded here.
"""

import sys
from pathlib import Path

import msgspec

from ebpflb.datapath import compiler, layout, maps, probe, programs, state
from ebpflb.errors import EbpflbError

VARIANTS = {"set_retval": ("-DHAVE_SET_RETVAL",), "plain": ()}


def hooks() -> list[str]:
    """Every file that is compiled."""
    found = layout.SOURCES.glob("hooks/*.c")
    return sorted(str(path.relative_to(layout.SOURCES)) for path in found)


def variants() -> dict[str, tuple[str, ...]]:
    """Those that this kernel takes, which is tried."""
    return VARIANTS if probe.set_retval() else {"plain": VARIANTS["plain"]}


def compile_all(cache: Path) -> None:
    """Raises CompileError."""
    for source in hooks():
        for flags in VARIANTS.values():
            compiler.compile_source(source, flags, cache=cache)
    print(f"BCC {compiler.bcc_version()}: {', '.join(hooks())} in {len(VARIANTS)} variants")


def load_all(cache: Path) -> None:
    """Loads every program of a cache. Raises VerifierError or KernelError."""
    sections = {name: at for source in hooks() for name, at in compiler.sections(source).items()}
    made = {name: maps.open_map(spec, state.make_map(spec)) for name, spec in layout.MAPS.items()}
    fds = {compiler.MAP_NUMBERS[name]: opened.fd for name, opened in made.items()}
    count = 0
    for entry in sorted(cache.glob("*.msgpack")):
        found = msgspec.msgpack.decode(entry.read_bytes(), type=dict[str, bytes])
        for name, code in found.items():
            attach = programs.HOOKS[sections[name]]
            programs.load_one(name, attach, programs.relocate(code, fds))
            count += 1
    print(f"{count} programs loaded")
    if not count:
        sys.exit(f"no bytecode in {cache}")


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
