# SPDX-License-Identifier: Apache-2.0
"""Every file of bpf/hooks in every variant, compiled with whichever BCC is here.

    python -m vagrant.kernels.bytecode FOLDER           compiles, with the agents' cache; fails if
                                                        a program's stack is over its budget
    python -m vagrant.kernels.bytecode --load FOLDER    has this kernel load what is there

The second needs no BCC: bytecode of another BCC (vagrant/bcc) is loaded here.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from ebpflb.errors import EbpflbError
from ebpflb.kernel import probe
from ebpflb.kernel.maps import bpf_map, layout, state_dir
from ebpflb.kernel.programs import compiler, loader, precompile
from ebpflb.options import Paths
from vagrant.kernels import verifier


def variants(source: str) -> dict[str, tuple[str, ...]]:
    """Return the variants of a source that this kernel accepts, by trying them."""
    lacking: dict[str, Callable[[], bool]] = {
        precompile.RETVAL: probe.set_retval,
        precompile.READ: probe.kernel_read,
        precompile.COARSE: probe.coarse_clock,
        precompile.PROCESS: probe.process,
        precompile.SOCK_DESTROY: probe.sock_destroy,
    }
    missing = {flag for flag, works in lacking.items() if not works()}
    return {
        name: its for name, its in precompile.VARIANTS[source].items() if missing.isdisjoint(its)
    }


def compile_all(folder: Path) -> None:
    """Compile into a folder. Raises CompileError."""
    precompile.write(folder, Paths.cache)
    bcc = compiler.bcc_version() or ""
    (folder / "bcc").write_text(bcc)
    print(f"{folder}: by BCC {bcc}")


def bcc_of(folder: Path) -> str:
    """Return the version of the BCC that filled a folder; if it names none, of this machine's."""
    named = folder / "bcc"
    return named.read_text() if named.exists() else compiler.bcc_version() or ""


def load_all(folder: Path) -> None:
    """Load every program of a folder. Raises VerifierError or KernelError."""
    sections = {
        name: at for source in precompile.VARIANTS for name, at in compiler.sections(source).items()
    }
    made = {
        name: bpf_map.open_map(spec, state_dir.create_map(spec))
        for name, spec in layout.PROGRAM_MAPS.items()
    }
    fds = {compiler.MAP_NUMBERS[name]: opened.fd for name, opened in made.items()}
    count = 0
    for entry in sorted(folder.glob("*.msgpack")):
        for name, code in (compiler.read_cached(entry) or {}).items():
            attach = loader.HOOK_TYPES[sections[name]]
            loader.load_one(name, attach, loader.relocate(code, fds))
            count += 1
    print(f"{count} programs loaded")
    if not count:
        sys.exit(f"no bytecode in {folder}")


def main(words: list[str]) -> None:
    try:
        if words[0] == "--load":
            load_all(Path(words[1]))
        else:
            folder = Path(words[0])
            compile_all(folder)
            over = verifier.complaints(verifier.stacks(folder), verifier.read(), verifier.STACK)
            if over and not os.environ.get("LAB_RENEW"):
                sys.exit("\n".join(["over the budget of the stack", *over]))
    except EbpflbError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
