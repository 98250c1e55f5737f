# SPDX-License-Identifier: Apache-2.0
"""bpf/ -> bytecode: brought along, from the cache, or by the compiler process (bcc_child).

The child is started by its file, with isolated Python: no module of it is looked for in the working
directory, or where the environment says.

A cache entry is named by the hash of all sources, the flags and BCC's version, which is read
without importing bcc. With a warm cache nothing is compiled. LLVM is never loaded into the agent.

An installation can bring bytecode along (precompile.py). Its entries are looked up first. Their
names have no version of BCC, for the node may have another BCC or none: what counts is that
sources and flags are the same. What is not there is compiled as ever.
"""

import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ebpflb import child
from ebpflb.datapath.declarations import BROUGHT as BROUGHT
from ebpflb.datapath.maps import layout
from ebpflb.datapath.programs import bcc_child, bytecode_cache, compile_folder
from ebpflb.errors import CompileError, in_words

MAP_NUMBERS = {name: 0x10000 + index for index, name in enumerate(layout.PROGRAM_MAPS)}
COMPILE_SECONDS = 300.0  # two are usual, and a minute has been seen on a node that was starved
ANY_BCC = "any"
NO_BCC = "BCC is missing: apt install python3-bpfcc (the package called bcc on PyPI is another)"


@dataclass(frozen=True)
class Compiled:
    """Bytecode by program name, whether it had to be compiled, and for which sections."""

    programs: dict[str, bytes]
    sections: dict[str, str]
    cached: bool


def sections(source: str, sources: Path = layout.SOURCES) -> dict[str, str]:
    """Program name -> section, from the PROGRAM lines of a file in bpf/."""
    text = (sources / source).read_text()
    return {
        name: section
        for section, name in re.findall(r'(?m)^PROGRAM\("([^"]+)"\)\nint (\w+)\(', text)
    }


def bcc_version() -> str | None:
    """The version of the installed BCC, or None; without importing it."""
    spec = importlib.util.find_spec("bcc")
    if spec is None or not spec.origin:
        return None
    version = Path(spec.origin).with_name("version.py")
    found = re.search(r"'([^']+)'", version.read_text()) if version.exists() else None
    return found[1] if found else None


def compile_source(
    source: str,
    flags: tuple[str, ...] = (),
    *,
    cache: Path,
    sources: Path = layout.SOURCES,
) -> Compiled:
    """The bytecode of one file in bpf/hooks, wherever it is had from.

    Raises CompileError: with the compiler's text, if BCC is missing, or for any other obstacle,
    such as a full disk, too many processes, or a compiler that does not end.
    """
    with _obstacles_reported(source):
        return brought(source, flags, sources) or _compiled(source, flags, cache, sources)


def brought(source: str, flags: tuple[str, ...], sources: Path = layout.SOURCES) -> Compiled | None:
    """What the installation has of it; None if nothing, or nothing that counts."""
    return _kept(entry(BROUGHT, source, flags, ANY_BCC, sources), sections(source, sources))


def compile_here(
    source: str,
    flags: tuple[str, ...] = (),
    *,
    cache: Path,
    sources: Path = layout.SOURCES,
) -> Compiled:
    """The same by this machine's own BCC. Raises CompileError."""
    with _obstacles_reported(source):
        return _compiled(source, flags, cache, sources)


@contextmanager
def _obstacles_reported(source: str) -> Iterator[None]:
    try:
        yield
    except (OSError, msgspec.MsgspecError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{source} does not compile: {in_words(error)}") from error


def _compiled(source: str, flags: tuple[str, ...], cache: Path, sources: Path) -> Compiled:
    version = bcc_version()
    if version is None:
        raise CompileError(NO_BCC)
    found = sections(source, sources)
    compile_folder.remove_leftovers()
    place = entry(cache, source, flags, version, sources)
    kept = _kept(place, found)
    if kept:
        return kept
    programs = _run_child(source, list(found), flags, sources)
    bytecode_cache.write(place, programs)
    return Compiled(programs, found, cached=False)


def _kept(place: Path, found: dict[str, str]) -> Compiled | None:
    programs = bytecode_cache.read(place)
    if programs is None or programs.keys() != found.keys():
        return None
    return Compiled(programs, found, cached=True)


def entry(
    folder: Path,
    source: str,
    flags: tuple[str, ...],
    version: str,
    sources: Path = layout.SOURCES,
) -> Path:
    """The file in a folder, named by everything that the bytecode is made from."""
    made_from = (source, flags, version, sys.byteorder, MAP_NUMBERS)
    digest = hashlib.sha256(repr(made_from).encode())
    for path in sorted(sources.rglob("*.[ch]")):
        digest.update(str(path.relative_to(sources)).encode() + b"\0" + path.read_bytes())
    return folder / f"{digest.hexdigest()}{bytecode_cache.SUFFIX}"


def _run_child(
    source: str, programs: list[str], flags: tuple[str, ...], sources: Path
) -> dict[str, bytes]:
    numbers = [f"-DMAP_NUMBER_{name}={number}" for name, number in MAP_NUMBERS.items()]
    with compile_folder.temporary() as temporary:
        folder = temporary / "bpf"
        shutil.copytree(sources, folder, ignore=shutil.ignore_patterns("__pycache__"))
        _open_to_all(temporary)
        job = bcc_child.Job(str(folder), source, programs, [*flags, *numbers])
        done = subprocess.run(
            [sys.executable, "-I", bcc_child.__file__],
            input=msgspec.msgpack.encode(job),
            capture_output=True,
            check=False,
            timeout=COMPILE_SECONDS,
            cwd="/",
            env=child.environment(),
        )
        output = done.stderr.decode(errors="replace").replace(str(folder), str(sources))
    if done.returncode:
        raise CompileError(f"{source} does not compile:\n{output.strip()}")
    return msgspec.msgpack.decode(done.stdout, type=dict[str, bytes])


def _open_to_all(folder: Path) -> None:
    """Makes the copied sources readable for the user nobody, who runs the compiler."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
