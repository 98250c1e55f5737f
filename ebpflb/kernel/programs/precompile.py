# SPDX-License-Identifier: Apache-2.0
"""Compile every program in every variant that an agent can load, for nodes without BCC.

    python -m ebpflb.kernel.programs.precompile [FOLDER]

Without FOLDER the result is written to the place where agents of this installation look first
(compiler.BROUGHT). The image's recipe does that, so its nodes start no compiler.
"""

import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from ebpflb.errors import CompileError, EbpflbError
from ebpflb.kernel import bpf
from ebpflb.kernel.maps import layout
from ebpflb.kernel.programs import compiler

RETVAL, COARSE, BARE = "-DHAVE_SET_RETVAL", "-DHAVE_COARSE_CLOCK", "-DNO_LINK_HEADER"
READ = "-DHAVE_KERNEL_READ"  # only with RETVAL: the bind guard needs both
MONITOR = "-DMONITOR"  # while `ebpflb monitor` runs
PROCESS = "-DHAVE_PROCESS"  # only with RETVAL and MONITOR
RECORDING = "-DRECORD"  # for `ebpflb explain`, whose packets all have a link header
SOCK_DESTROY = "-DHAVE_SOCK_DESTROY"  # only QUIET_SOCKET, which needs it
EXPLAIN = "hooks/explain.c"
SOCKET_END = "hooks/socket_end.c"
CONNECTION_END = "hooks/connection_end.c"
FLOW_END = "hooks/flow_end.c"
SOCKET_OPENING = "hooks/socket_opening.c"
ANSWER = "hooks/answer.c"
HAND_OVER = "hooks/hand_over.c"
QUIET_SOCKET = "hooks/quiet_socket.c"
# The compiler's flags, by source and variant; the agent loads these and no others.
VARIANTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "hooks/packet.c": {
        "plain": (),
        "coarse clock": (COARSE,),
        "no link header": (BARE,),
        "coarse clock, no link header": (COARSE, BARE),
        "monitoring": (MONITOR,),
        "monitoring, coarse clock": (COARSE, MONITOR),
        "monitoring, no link header": (BARE, MONITOR),
        "monitoring, coarse clock, no link header": (COARSE, BARE, MONITOR),
        "recording": (RECORDING,),
        "recording, coarse clock": (COARSE, RECORDING),
    },
    "hooks/socket.c": {
        "plain": (),
        "set_retval": (RETVAL,),
        "set_retval, kernel read": (RETVAL, READ),
        "monitoring": (MONITOR,),
        "monitoring, set_retval": (RETVAL, MONITOR),
        "monitoring, set_retval, kernel read": (RETVAL, READ, MONITOR),
        "monitoring, set_retval, process": (RETVAL, MONITOR, PROCESS),
        "monitoring, set_retval, kernel read, process": (RETVAL, READ, MONITOR, PROCESS),
    },
    "hooks/netns_cookie.c": {"plain": ()},
    CONNECTION_END: {"plain": ()},
    EXPLAIN: {"plain": (), "set_retval": (RETVAL,)},
    FLOW_END: {"plain": ()},
    SOCKET_END: {"plain": ()},
    SOCKET_OPENING: {"plain": ()},
    ANSWER: {"plain": ()},
    HAND_OVER: {
        "plain": (),
        "coarse clock": (COARSE,),
        "monitoring": (MONITOR,),
        "monitoring, coarse clock": (COARSE, MONITOR),
    },
    QUIET_SOCKET: {"sock_destroy": (SOCK_DESTROY,)},
}


def write(folder: Path, cache: Path) -> None:
    """Write a file for each variant and each set of C declarations, and remove all others.

    The cache makes repeating it fast. Raises CompileError, also if the folder cannot be
    written.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        written = set(pool.map(lambda it: _write_one(it[0], it[1], folder, cache), _each()))
    written |= {bpf.write_declarations(text, folder) for text in (bpf.TEXT, layout.TEXT)}
    for suffix in (compiler.SUFFIX, bpf.DECLARATIONS_SUFFIX):
        for entry in set(folder.glob(f"*{suffix}")) - written:
            entry.unlink()


def is_brought() -> bool:
    """Whether this installation has all of them, so that no compiler is needed."""
    return all(compiler.brought(source, flags) is not None for source, flags in _each())


def _each() -> list[tuple[str, tuple[str, ...]]]:
    return [(source, flags) for source, its in VARIANTS.items() for flags in its.values()]


def _write_one(source: str, flags: tuple[str, ...], folder: Path, cache: Path) -> Path:
    compiled = compiler.compile_source(source, flags, cache=cache, here=True)
    entry = compiler.entry(folder, source, flags, compiler.ANY_BCC)
    compiler.write_cached(entry, compiled.programs)
    if compiler.read_cached(entry) != compiled.programs:
        raise CompileError(f"{entry} cannot be written")
    return entry


def main(words: list[str]) -> None:
    folder = Path(words[0]) if words else compiler.BROUGHT
    try:
        with TemporaryDirectory(prefix="ebpflb-precompile-") as cache:
            write(folder, Path(cache))
    except EbpflbError as error:
        sys.exit(str(error))
    print(f"{folder}: {len(_each())} variants, by BCC {compiler.bcc_version()}")


if __name__ == "__main__":
    main(sys.argv[1:])
