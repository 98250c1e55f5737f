# SPDX-License-Identifier: Apache-2.0
"""bpf(2): each function is one command of the system call. No other module calls it.

cffi in ABI mode needs no compiler. The call is declared without the ellipsis of syscall(2): this is
a third faster, and uses the same registers on x86_64 and arm64. Every failure is a KernelError.
"""

import errno
import hashlib
import io
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import _cffi_backend

from ebpflb import files
from ebpflb.errors import KernelError, NodeError

# C declarations -> cffi's types.
#
# Parsing the declarations takes 60 ms at each start of the agent and of every command. So cffi's
# tables are kept, a Python file for each text of declarations, named by the text's hash: an
# installation contains them beside the programs' bytecode, a checkout gets them in build/ when they
# are first needed. If the file is missing, the text is parsed.

_CHECKOUT = Path(__file__).parents[2] / "bpf"
# Beside the package in a checkout, else where setup.cfg's data_files puts it.
SOURCES = _CHECKOUT if _CHECKOUT.is_dir() else Path(sys.prefix) / "share/ebpflb/bpf"
BROUGHT = SOURCES.with_name("bytecode")
CACHE = _CHECKOUT.with_name("build") / "declarations" if _CHECKOUT.is_dir() else None
DECLARATIONS_SUFFIX = ".py"


def c_types(text: str, brought: Path = BROUGHT, cache: Path | None = CACHE) -> Any:
    """Return cffi's FFI, with the types and functions that the text declares."""
    names: dict[str, Any] = {}
    exec(_code(text, brought, cache), names)
    return names["ffi"]


def _code(text: str, brought: Path, cache: Path | None) -> str:
    for folder in (brought, cache):
        if folder and (tables := _file(text, folder)).exists():
            return tables.read_text()
    if cache is None:
        return parse_declarations(text)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        return write_declarations(text, cache).read_text()
    except OSError:  # a checkout that this user may only read
        return parse_declarations(text)


def write_declarations(text: str, folder: Path) -> Path:
    """Write the file for these declarations. Raises OSError."""
    path = _file(text, folder)
    files.replace(path, parse_declarations(text).encode(), mode=0o644)
    return path


def _file(text: str, folder: Path) -> Path:
    known = f"{_cffi_backend.__version__}\n{text}"
    return folder / f"{hashlib.sha256(known.encode()).hexdigest()}{DECLARATIONS_SUFFIX}"


def parse_declarations(text: str) -> str:
    """Return a Python module with ``ffi``."""
    from cffi import FFI, recompiler  # cffi's parser takes 20 ms to import

    parser, written = FFI(), io.StringIO()
    parser.cdef(text)
    parser.set_source("declarations", None)
    recompiler.make_py_source(parser, "declarations", written)
    return written.getvalue()


# The structs and numbers of bpf(2), from uapi/linux/bpf.h: one struct for each command.
#
# Each struct is as long as its command needs, results included: the kernel writes results at their
# offset whatever length is passed (for example the revision of a query). Fields beyond the passed
# length count as zero.


MAP_KINDS = {
    "HASH": 1, "ARRAY": 2, "PROG_ARRAY": 3, "PERCPU_HASH": 5, "PERCPU_ARRAY": 6,
    "LRU_HASH": 9, "LPM_TRIE": 11, "RINGBUF": 27,
}  # fmt: skip
MAP_FLAGS = {"NONE": 0, "NO_PREALLOC": 1, "RDONLY_PROG": 0x80, "MMAPABLE": 0x400}

TEXT = """
long syscall(long number, int command, void *attr, unsigned int size);
struct map_create { uint32_t kind, key_size, value_size, entries, flags, inner, numa;
    char name[16]; uint32_t ifindex, btf, btf_key, btf_value; };
struct btf_load { uint64_t btf, log; uint32_t size, log_size, log_level; };
struct element { uint32_t map, pad; uint64_t key, value, flags; };
struct batch { uint64_t in, out, keys, values; uint32_t count, map;
    uint64_t element_flags, flags; };
struct prog_load { uint32_t kind, count; uint64_t code, license; uint32_t log_level, log_size;
    uint64_t log; uint32_t version, flags; char name[16]; uint32_t ifindex, attach, btf[9],
    attach_btf, attach_program, relocations; uint64_t fds; };
struct object { uint64_t path; uint32_t fd, flags; };
struct info { uint32_t fd, size; uint64_t out; };
struct link_create { uint32_t program, target, attach, flags; };
struct link_update { uint32_t link, program, flags, old; };
struct query { uint32_t target, attach, flags, attach_flags; uint64_t ids; uint32_t count, pad;
    uint64_t id_flags, links, link_flags, revision; };
struct by_id { uint32_t id, next, flags; };
struct map_info { uint32_t kind, id, key_size, value_size, entries, flags; char name[16]; };
struct prog_info { uint32_t kind, id; uint8_t tag[8]; uint32_t jited_size, xlated_size;
    uint64_t jited, xlated, load_time; uint32_t uid, map_count; uint64_t maps; char name[16];
    uint32_t ifindex, bits; uint64_t device, inode; uint32_t symbols, lengths;
    uint64_t symbol, length; uint32_t btf, function_size; uint64_t function;
    uint32_t functions, lines; uint64_t line, jited_line;
    uint32_t jited_lines, line_size, jited_line_size, tags; uint64_t tag_list,
    run_time, run_count; };
struct btf_info { uint64_t btf; uint32_t btf_size, id; uint64_t name;
    uint32_t name_size, kernel; };
struct link_info { uint32_t kind, id, program, pad; uint64_t cgroup; uint32_t attach, pad2; };
struct tcx_info { uint32_t kind, id, program, pad, ifindex, attach; };
struct test_run { uint32_t program, retval, size_in, size_out; uint64_t in, out;
    uint32_t repeat, duration, context_size_in, context_size_out;
    uint64_t context_in, context_out; uint32_t flags, cpu; };
struct skb_context { uint32_t before[2], mark, between[5], priority, ingress_ifindex, ifindex; };
"""
ffi = c_types(TEXT)


_libc = ffi.dlopen(None)
_NUMBERS = {"x86_64": 321, "aarch64": 280}
# A signal or an attaching debugger ends the verifier with EAGAIN. libbpf makes as many attempts.
_LOAD_ATTEMPTS = 5
ENOTSUPP = 524  # an errno of the kernel that is missing in errno(3)
_MAP_CREATE, _LOOKUP, _UPDATE, _DELETE, _NEXT_KEY, _PROG_LOAD, _PIN, _GET = range(8)
_PROG_BY_ID, OBJ_GET_INFO, _QUERY, _BTF_LOAD = 13, 15, 16, 18
_LOOKUP_BATCH, _UPDATE_BATCH, _DELETE_BATCH = 24, 26, 27
_LINK_CREATE, _LINK_UPDATE, _ITER_CREATE, _LINK_DETACH = 28, 29, 33, 34


def bpf(command: int, what: str, attr: Any) -> int:
    """Make one call; ``what`` describes it in errors. Raises KernelError, or NodeError."""
    result: int = _libc.syscall(_number(), command, attr, ffi.sizeof(attr[0]))
    if result < 0:
        why = os.strerror(ffi.errno) if ffi.errno != ENOTSUPP else "not supported by this kernel"
        raise KernelError(what, ffi.errno, why)
    return result


@cache
def _number() -> int:
    """Return the number of the system call. Raises NodeError on an unsupported machine."""
    machine = platform.machine()
    if machine not in _NUMBERS:
        raise NodeError(f"unsupported machine {machine}: only x86_64 and aarch64 are supported")
    return _NUMBERS[machine]


def find(command: int, what: str, attr: Any) -> int | None:
    """Like bpf, but return None for ENOENT."""
    try:
        return bpf(command, what, attr)
    except KernelError as error:
        if error.errno == errno.ENOENT:
            return None
        raise


def _pointer(buffer: Any) -> int:
    return int(ffi.cast("uintptr_t", ffi.from_buffer(buffer)))


def btf_load(types: bytes) -> int:
    """Return a descriptor of type descriptions (Documentation/bpf/btf.rst)."""
    attr = ffi.new("struct btf_load *", {"btf": _pointer(types), "size": len(types)})
    return bpf(_BTF_LOAD, "describing types", attr)


def map_create(
    *, name: str, kind: str, sizes: tuple[int, int], entries: int, flags: int, types: Sequence[int]
) -> int:
    """Create a map and return its descriptor.

    ``sizes`` are those of key and value; ``types`` are a BTF, and the ids of key and value in it.
    """
    attr = ffi.new("struct map_create *")
    attr.kind, attr.entries = MAP_KINDS[kind], entries
    attr.key_size, attr.value_size = sizes
    attr.flags, attr.name = flags, name[:15].encode()
    attr.btf, attr.btf_key, attr.btf_value = types
    return bpf(_MAP_CREATE, f"creating map {name}", attr)


def _element(map_fd: int, key: bytes, value: Any, flags: int = 0) -> tuple[Any, Any]:
    attr = ffi.new("struct element *")
    keep = ffi.from_buffer(key)
    attr.map, attr.key, attr.flags = map_fd, int(ffi.cast("uintptr_t", keep)), flags
    attr.value = _pointer(value) if value is not None else 0
    return attr, keep


def map_lookup(map_fd: int, key: bytes, value_size: int) -> bytes | None:
    """Return the value, or None for an unknown key."""
    value = bytearray(value_size)
    attr, _keep = _element(map_fd, key, value)
    return None if find(_LOOKUP, "map look-up", attr) is None else bytes(value)


NOEXIST, EXIST = 1, 2  # BPF_*


def map_update(map_fd: int, key: bytes, value: bytes, flags: int = 0) -> None:
    """Insert or replace. Errors: E2BIG: full; ENOENT: missing, with EXIST; EEXIST: with NOEXIST."""
    bpf(_UPDATE, "map update", _element(map_fd, key, value, flags)[0])


def map_delete(map_fd: int, key: bytes) -> bool:
    """Delete a key; return whether it existed."""
    attr, _keep = _element(map_fd, key, None)
    return find(_DELETE, "map delete", attr) is not None


def map_next_key(map_fd: int, key: bytes | None, key_size: int) -> bytes | None:
    """Return the key after ``key`` (None: the first one), or None at the end."""
    following = bytearray(key_size)
    attr, _keep = _element(map_fd, key if key is not None else b"", following)
    if key is None:
        attr.key = 0
    return None if find(_NEXT_KEY, "map walk", attr) is None else bytes(following)


def map_lookup_batch(
    map_fd: int, cursor: bytes | None, keys: bytearray, values: bytearray, count: int
) -> tuple[int, bytes | None]:
    """Fill keys and values with up to ``count`` entries (5.6).

    Return the number of entries and the cursor for the next call; None at the end.
    """
    following = bytearray(max(16, len(keys) // count))
    attr = ffi.new("struct batch *")
    attr.map, attr.count, attr.out = map_fd, count, _pointer(following)
    attr.keys, attr.values = _pointer(keys), _pointer(values)
    if cursor is not None:
        setattr(attr, "in", _pointer(cursor))
    more = find(_LOOKUP_BATCH, "map batch look-up", attr) is not None
    return attr.count, bytes(following) if more else None


def map_write_batch(map_fd: int, keys: bytes, values: bytes | None, count: int) -> None:
    """Update ``count`` entries (5.6); delete them if ``values`` is None."""
    attr = ffi.new("struct batch *")
    attr.map, attr.count, attr.keys = map_fd, count, _pointer(keys)
    if values is None:
        bpf(_DELETE_BATCH, "map batch delete", attr)
    else:
        attr.values = _pointer(values)
        bpf(_UPDATE_BATCH, "map batch update", attr)


def prog_load(
    *,
    name: str,
    program_type: int,
    attach_type: int = 0,
    attach_btf: int = 0,
    code: bytes,
    log: bytearray | None = None,
    log_level: int = 1,
) -> int:
    """Load a program and return its descriptor.

    ``attach_btf``: the number of the kernel's function that it is for (btf.py). The verifier writes
    each step (level 1) or a summary (level 4) to ``log``.
    """
    attr = ffi.new("struct prog_load *")
    license_text = ffi.new("char[]", b"GPL")
    attr.kind, attr.attach, attr.name = program_type, attach_type, name[:15].encode()
    attr.attach_btf = attach_btf
    attr.count, attr.code = len(code) // 8, _pointer(code)
    attr.license = int(ffi.cast("uintptr_t", license_text))
    if log is not None:
        attr.log, attr.log_size, attr.log_level = _pointer(log), len(log), log_level
    attempts = 0
    while True:
        attempts += 1
        try:
            return bpf(_PROG_LOAD, f"loading program {name}", attr)
        except KernelError as error:
            if error.errno != errno.EAGAIN or attempts == _LOAD_ATTEMPTS:
                raise


def pin(fd: int, path: str) -> None:
    """Give an object a name in a bpffs."""
    attr = ffi.new("struct object *")
    text = ffi.new("char[]", path.encode())
    attr.path, attr.fd = int(ffi.cast("uintptr_t", text)), fd
    bpf(_PIN, f"pinning {path}", attr)


def get(path: str) -> int | None:
    """Return the descriptor of a pinned object, or None if there is none."""
    attr = ffi.new("struct object *")
    text = ffi.new("char[]", path.encode())
    attr.path = int(ffi.cast("uintptr_t", text))
    return find(_GET, f"opening {path}", attr)


@contextmanager
def opened(pin: Path) -> Iterator[int | None]:
    """Like ``get``; the descriptor is closed at the end."""
    fd = get(str(pin))
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


@contextmanager
def closing(fd: int) -> Iterator[int]:
    """Close the descriptor at the end."""
    try:
        yield fd
    finally:
        os.close(fd)


def info(fd: int, struct: str) -> Any:
    """Return an object's information: "map_info", "prog_info", "link_info" or "tcx_info"."""
    out = ffi.new(f"struct {struct} *")
    info_into(fd, out)
    return out


def info_into(fd: int, out: Any) -> None:
    """Read an object's information into a struct with pointers to further buffers."""
    attr = ffi.new("struct info *")
    attr.fd, attr.size = fd, ffi.sizeof(out[0])
    attr.out = int(ffi.cast("uintptr_t", out))
    bpf(OBJ_GET_INFO, f"asking for {ffi.typeof(out[0]).cname}", attr)


def map_ids(prog_fd: int) -> set[int]:
    """Return the ids of the maps that a program uses."""
    counted = info(prog_fd, "prog_info").map_count
    ids, out = ffi.new("uint32_t[]", counted), ffi.new("struct prog_info *")
    out.map_count, out.maps = counted, int(ffi.cast("uintptr_t", ids))
    info_into(prog_fd, out)
    return set(ids)


def link_create(prog_fd: int, target: int, attach: int, flags: int = 0) -> int:
    """Attach a program at a cgroup's descriptor or a device's index.

    Return the link's descriptor.
    """
    attr = ffi.new("struct link_create *")
    attr.program, attr.target, attr.attach, attr.flags = prog_fd, target, attach, flags
    return bpf(_LINK_CREATE, "attaching", attr)


def iterator(link_fd: int) -> int:
    """Return a descriptor whose reading runs the link's program over this thread's namespace."""
    attr = ffi.new("struct link_update *", {"link": link_fd})
    return bpf(_ITER_CREATE, "making an iterator", attr)


def link_update(link_fd: int, prog_fd: int) -> None:
    """Replace the link's program atomically."""
    attr = ffi.new("struct link_update *", {"link": link_fd, "program": prog_fd})
    bpf(_LINK_UPDATE, "replacing a program", attr)


def link_detach(link_fd: int) -> None:
    """Detach the link's program at once (5.9); unpinning does so some time later."""
    attr = ffi.new("struct link_update *", {"link": link_fd})
    bpf(_LINK_DETACH, "detaching a program", attr)


def query(target: int, attach: int, *, effective: bool = False) -> list[int]:
    """Return the ids of the programs at a cgroup or device, in the order in which they run."""
    return _query(target, attach, int(effective))


def query_links(ifindex: int, attach: int) -> dict[int, int]:
    """Return the ids of the tcx links at a device and of their programs (6.6), in order.

    A program without a link has the link 0.
    """
    links = ffi.new("uint32_t[64]")
    programs = _query(ifindex, attach, 0, int(ffi.cast("uintptr_t", links)))
    return dict(zip(links, programs, strict=False))


def _query(target: int, attach: int, flags: int, links: int = 0) -> list[int]:
    """Return programs; kernels before 6.6 know no ``links``, and accept it only if it is 0."""
    ids = ffi.new("uint32_t[64]")
    attr = ffi.new("struct query *")
    attr.target, attr.attach, attr.flags, attr.count = target, attach, flags, 64
    attr.ids, attr.links = int(ffi.cast("uintptr_t", ids)), links
    bpf(_QUERY, "asking which programs are attached", attr)
    return list(ids[0 : attr.count])


def prog_by_id(prog_id: int) -> int:
    """Return a program's descriptor."""
    attr = ffi.new("struct by_id *", {"id": prog_id})
    return bpf(_PROG_BY_ID, f"opening program {prog_id}", attr)
