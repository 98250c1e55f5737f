# SPDX-License-Identifier: Apache-2.0
"""C declarations -> cffi's types.

Parsing the declarations takes 60 ms at each start of the agent and of every command. So an
installation contains cffi's tables beside the programs' bytecode: a Python file for each text of
declarations, named by the text's hash. If the file is missing, the text is parsed.
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
SUFFIX = ".py"


def types(text: str, brought: Path = BROUGHT) -> Any:
    """Return cffi's FFI, with the types and functions that the text declares."""
    tables = _file(text, brought)
    code = tables.read_text() if tables.exists() else _parsed(text)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["ffi"]


def write(text: str, folder: Path) -> Path:
    """Write the file for these declarations. Raises OSError."""
    path = _file(text, folder)
    files.replace(path, _parsed(text).encode(), mode=0o644)
    return path


def _file(text: str, folder: Path) -> Path:
    known = f"{_cffi_backend.__version__}\n{text}"
    return folder / f"{hashlib.sha256(known.encode()).hexdigest()}{SUFFIX}"


def _parsed(text: str) -> str:
    """Return a Python module with ``ffi``."""
    from cffi import FFI, recompiler  # cffi's parser takes 20 ms to import

    parser, written = FFI(), io.StringIO()
    parser.cdef(text)
    parser.set_source("declarations", None)
    recompiler.make_py_source(parser, "declarations", written)
    return written.getvalue()
