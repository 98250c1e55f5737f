# SPDX-License-Identifier: Apache-2.0
"""C declarations -> cffi's types.

Parsing the declarations takes 60 ms at each start of the agent and of every command. So cffi's
tables are kept, a Python file for each text of declarations, named by the text's hash: an
installation contains them beside the programs' bytecode, a checkout gets them in build/ when they
are first needed. If the file is missing, the text is parsed.
"""

import hashlib
import io
import sys
from pathlib import Path
from typing import Any

import _cffi_backend

from ebpflb import files

_CHECKOUT = Path(__file__).parents[2] / "bpf"
# Beside the package in a checkout, else where setup.cfg's data_files puts it.
SOURCES = _CHECKOUT if _CHECKOUT.is_dir() else Path(sys.prefix) / "share/ebpflb/bpf"
BROUGHT = SOURCES.with_name("bytecode")
CACHE = _CHECKOUT.with_name("build") / "declarations" if _CHECKOUT.is_dir() else None
SUFFIX = ".py"


def types(text: str, brought: Path = BROUGHT, cache: Path | None = CACHE) -> Any:
    """Return cffi's FFI, with the types and functions that the text declares."""
    names: dict[str, Any] = {}
    exec(_code(text, brought, cache), names)
    return names["ffi"]


def _code(text: str, brought: Path, cache: Path | None) -> str:
    for folder in (brought, cache):
        if folder and (tables := _file(text, folder)).exists():
            return tables.read_text()
    if cache is None:
        return parsed(text)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        return write(text, cache).read_text()
    except OSError:  # a checkout that this user may only read
        return parsed(text)


def write(text: str, folder: Path) -> Path:
    """Write the file for these declarations. Raises OSError."""
    path = _file(text, folder)
    files.replace(path, parsed(text).encode(), mode=0o644)
    return path


def _file(text: str, folder: Path) -> Path:
    known = f"{_cffi_backend.__version__}\n{text}"
    return folder / f"{hashlib.sha256(known.encode()).hexdigest()}{SUFFIX}"


def parsed(text: str) -> str:
    """Return a Python module with ``ffi``."""
    from cffi import FFI, recompiler  # cffi's parser takes 20 ms to import

    parser, written = FFI(), io.StringIO()
    parser.cdef(text)
    parser.set_source("declarations", None)
    recompiler.make_py_source(parser, "declarations", written)
    return written.getvalue()
