# SPDX-License-Identifier: Apache-2.0
"""bpf/ -> bytecode: from the cache, or by the compiler process (bcc_child).

A cache entry is named by the hash of all sources, the flags and BCC's version, which is read
without importing bcc. With a warm cache nothing is compiled. LLVM is never loaded into the agent.
"""

import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ebpflb.datapath.maps import layout
from ebpflb.datapath.programs import bcc_child, kfuncs
from ebpflb.errors import CompileError

MAP_NUMBERS = {name: 0x10000 + index for index, name in enumerate(layout.MAPS)}
TIMEOUT = 60.0  # seconds: a compilation takes two
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
    """The bytecode of one file in bpf/hooks.

    Raises CompileError: with the compiler's text, if BCC is missing, or for any other obstacle,
    such as a full disk, too many processes, or a compiler that does not end.
    """
    try:
        return _compiled(source, flags, cache, sources)
    except (OSError, msgspec.MsgspecError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{source} does not compile: {error}") from error


def _compiled(source: str, flags: tuple[str, ...], cache: Path, sources: Path) -> Compiled:
    version = bcc_version()
    if version is None:
        raise CompileError(NO_BCC)
    found = sections(source, sources)
    entry = cache / f"{_key(source, flags, version, sources)}.msgpack"
    programs = _cached(entry)
    if programs is not None:
        return Compiled(programs, found, cached=True)
    programs = _run_child(source, list(found), flags, sources)
    _store(entry, programs)
    return Compiled(programs, found, cached=False)


def _key(source: str, flags: tuple[str, ...], version: str, sources: Path) -> str:
    digest = hashlib.sha256(repr((source, flags, version, MAP_NUMBERS)).encode())
    for path in sorted(sources.rglob("*.[ch]")):
        digest.update(str(path.relative_to(sources)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _cached(entry: Path) -> dict[str, bytes] | None:
    try:
        return msgspec.msgpack.decode(entry.read_bytes(), type=dict[str, bytes])
    except (OSError, msgspec.MsgspecError):
        return None


def _store(entry: Path, programs: dict[str, bytes]) -> None:
    """If the cache cannot be written, the next start compiles again, for a second."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        half = entry.with_suffix(".half")
        half.write_bytes(msgspec.msgpack.encode(programs))
        half.replace(entry)
    except OSError:
        return


def _run_child(
    source: str, programs: list[str], flags: tuple[str, ...], sources: Path
) -> dict[str, bytes]:
    numbers = [f"-DMAP_NUMBER_{name}={number}" for name, number in MAP_NUMBERS.items()]
    numbers += [f"-DKFUNC_NUMBER_{name}={at:#x}" for name, at in kfuncs.KFUNC_NUMBERS.items()]
    with tempfile.TemporaryDirectory(prefix="ebpflb-compile-") as temporary:
        folder = Path(temporary) / "bpf"
        shutil.copytree(sources, folder, ignore=shutil.ignore_patterns("__pycache__"))
        _open_to_all(Path(temporary))
        job = bcc_child.Job(str(folder), source, programs, [*flags, *numbers])
        done = subprocess.run(
            [sys.executable, "-m", bcc_child.__name__],
            input=msgspec.msgpack.encode(job),
            capture_output=True,
            check=False,
            timeout=TIMEOUT,
        )
        output = done.stderr.decode(errors="replace").replace(str(folder), str(sources))
    if done.returncode:
        raise CompileError(f"{source} does not compile:\n{output.strip()}")
    return msgspec.msgpack.decode(done.stdout, type=dict[str, bytes])


def _open_to_all(folder: Path) -> None:
    """Makes the copied sources readable for the user nobody, who runs the compiler."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
