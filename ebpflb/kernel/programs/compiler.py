# SPDX-License-Identifier: Apache-2.0
"""bpf/ -> bytecode: from the installation, from the cache, or by the compiler process (bcc_child).

The child is started by its file, with isolated Python: none of its modules is searched in the
working directory, or in paths of the environment.

A cache entry is named by the hash of all sources, the flags and BCC's version, which is read
without importing bcc. With a warm cache nothing is compiled. LLVM is never loaded into the agent.

An installation can contain bytecode (precompile.py), which is looked up first. The names of its
entries have no version of BCC, because the node may have another BCC or none; sources and flags
must be the same. Missing bytecode is compiled as usual.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from msgspec import Struct

from ebpflb import child, files
from ebpflb.errors import CompileError, in_words
from ebpflb.kernel.bpf import BROUGHT as BROUGHT
from ebpflb.kernel.maps import layout
from ebpflb.kernel.programs import bcc_child

# Compiled bytecode in files, each named by the hash of everything that it was compiled from.
#
#     32 bytes    SHA-256 of the file's name and of the rest
#     the rest    msgpack {program: bytecode}
#
# Only compiled bytecode may be loaded into the kernel: an entry counts only if its digest fits, and
# if only root and this user could have written it. Otherwise the source is compiled again.

SUFFIX = ".msgpack"
_DIGEST = hashlib.sha256().digest_size
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MOST = 16 << 20  # bytes; an entry has a tenth of a megabyte


def read_cached(entry: Path) -> dict[str, bytes] | None:
    """Return bytecode by program name; None if there is no valid entry."""
    try:
        return _programs(entry, _content(entry))
    except (OSError, ValueError, files.UnusableFile):
        return None


def write_cached(entry: Path, programs: dict[str, bytes]) -> None:
    """Write an entry; if this fails, the next start compiles again, for a second."""
    with suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        packed = msgspec.msgpack.encode(programs)
        files.replace(entry, _digest(entry, packed) + packed, mode=0o644)


def _content(entry: Path) -> bytes:
    with files.open_regular(entry, _MOST, follow=False) as file:
        found = os.fstat(file.fileno())
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & _OTHERS_MAY_WRITE:
            raise ValueError("others may have written to it")
        return file.read(_MOST)


def _programs(entry: Path, content: bytes) -> dict[str, bytes]:
    digest, packed = content[:_DIGEST], content[_DIGEST:]
    if digest != _digest(entry, packed):
        raise ValueError("the digest does not match the content")
    return msgspec.msgpack.decode(packed, type=dict[str, bytes])


def _digest(entry: Path, packed: bytes) -> bytes:
    return hashlib.sha256(entry.name.encode() + b"\0" + packed).digest()


EXCHANGE = 0x1FFFF  # of the call and the constant by which programs exchange a value (bpf/compat.h)
MAP_NUMBERS = {name: 0x10000 + index for index, name in enumerate(layout.PROGRAM_MAPS)}
COMPILE_SECONDS = 300.0  # usually 2; a minute was measured on an overloaded node
ANY_BCC = "any"
NO_BCC = "BCC is missing: apt install python3-bpfcc (the package called bcc on PyPI is another)"


class Compiled(Struct, frozen=True):
    """Bytecode and section by program name; ``cached``: it did not have to be compiled."""

    programs: dict[str, bytes]
    sections: dict[str, str]
    cached: bool


def sections(source: str, sources: Path = layout.SOURCES) -> dict[str, str]:
    """Return program name -> section, from the PROGRAM lines of a file in bpf/."""
    text = (sources / source).read_text()
    return {
        name: section
        for section, name in re.findall(r'(?m)^PROGRAM\("([^"]+)"\)\nint (\w+)\(', text)
    }


def bcc_version() -> str | None:
    """Return the version of the installed BCC, or None; without importing it."""
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
    here: bool = False,
) -> Compiled:
    """Return the bytecode of one file in bpf/hooks.

    ``here``: compiled by this machine's own BCC, whatever the installation has.

    Raises CompileError: with the compiler's text, if BCC is missing, or for any other obstacle,
    such as a full disk, too many processes, or a compiler that does not end.
    """
    try:
        installed = None if here else brought(source, flags, sources)
        return installed or _compiled(source, flags, cache, sources)
    except (OSError, msgspec.MsgspecError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{source} does not compile: {in_words(error)}") from error


def brought(source: str, flags: tuple[str, ...], sources: Path = layout.SOURCES) -> Compiled | None:
    """Return the installation's bytecode; None if it has no valid one."""
    return _kept(entry(BROUGHT, source, flags, ANY_BCC, sources), sections(source, sources))


def _compiled(source: str, flags: tuple[str, ...], cache: Path, sources: Path) -> Compiled:
    version = bcc_version()
    if version is None:
        raise CompileError(NO_BCC)
    found = sections(source, sources)
    place = entry(cache, source, flags, version, sources)
    kept = _kept(place, found)
    if kept:
        return kept
    programs = _run_child(source, list(found), flags, sources)
    write_cached(place, programs)
    return Compiled(programs, found, cached=False)


def _kept(place: Path, found: dict[str, str]) -> Compiled | None:
    programs = read_cached(place)
    if programs is None or programs.keys() != found.keys():
        return None
    return Compiled(programs, found, cached=True)


def entry(
    folder: Path, source: str, flags: tuple[str, ...], version: str, sources: Path = layout.SOURCES
) -> Path:
    """Return the file in a folder, named by everything that the bytecode is made from."""
    made_from = (source, flags, version, sys.byteorder, MAP_NUMBERS, EXCHANGE)
    digest = hashlib.sha256(repr(made_from).encode() + _digest_contents(sources))
    return folder / f"{digest.hexdigest()}{SUFFIX}"


def _digest_contents(folder: Path) -> bytes:
    """Return a digest of the names and contents of all sources, which takes 3 ms."""
    digest = hashlib.sha256()
    for source in sorted(folder.rglob("*.[ch]")):
        digest.update(str(source.relative_to(folder)).encode() + b"\0" + source.read_bytes())
    return digest.digest()


def _run_child(
    source: str, programs: list[str], flags: tuple[str, ...], sources: Path
) -> dict[str, bytes]:
    numbers = [f"-DMAP_NUMBER_{name}={number}" for name, number in MAP_NUMBERS.items()]
    numbers.append(f"-DEXCHANGE_NUMBER={EXCHANGE}")
    with TemporaryDirectory(prefix="ebpflb-sources-") as temporary:
        folder = Path(temporary) / "bpf"
        shutil.copytree(sources, folder, ignore=shutil.ignore_patterns("__pycache__"))
        _open_to_all(Path(temporary))
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
    """Make the copied sources readable for the user nobody, who runs the compiler."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
