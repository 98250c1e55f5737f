# SPDX-License-Identifier: Apache-2.0
"""Builds a Python module from bpf/hooks/socket.c, socket_opening.c and lookups.c, with gcc.

The source is compiled as strictly as gcc can, with a check of every undefined operation at run
time, and without optimization: gcc would take longer than the tests gain. The wrapper around it is
cffi's; the kernel's helpers, which the source calls, end in Python (``extern "Python+C"``).

The result is kept below build/, in a folder for each state of the sources. ``python -m
tests.native.build`` builds everything, so that no test waits for it.
"""

import hashlib
import importlib.util
import subprocess
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from cffi import FFI
from filelock import FileLock

from ebpflb.kernel.maps import layout

_ADDRESS_HOOKS = ("connect", "sendmsg", "recvmsg", "getpeername")
HOOKS = [f"{hook}{family}" for hook in _ADDRESS_HOOKS for family in (4, 6)]
BIND_HOOKS = ["post_bind4", "post_bind6", "sock_release"]

HELPERS = """
void *bpf_map_lookup_elem(void *map, const void *key);
long bpf_map_update_elem(void *map, const void *key, const void *value, __u64 flags);
long bpf_map_delete_elem(void *map, const void *key);
__u64 bpf_ktime_get_ns(void);
__u64 jiffies64(void);
long bpf_skb_load_bytes(const void *ctx, __u32 offset, void *to, __u32 size);
__u32 bpf_get_prandom_u32(void);
__u32 bpf_get_smp_processor_id(void);
__u64 get_netns_cookie(void *ctx);
__u64 get_socket_cookie(void *ctx);
int set_retval(int retval);
int bpf_sock_ops_cb_flags_set(void *ctx, int flags);
"""
CONTEXTS = """
struct bpf_sock { __u32 type; __u32 protocol; __u32 src_ip4; __u32 src_ip6[4]; __u32 src_port;
    __u32 state; ...; };
struct bpf_sock_addr { __u32 user_ip4; __u32 user_ip6[4]; __u32 user_port; __u32 type;
    __u32 protocol; struct bpf_sock *sk; ...; };
struct bpf_sock_ops { __u32 op; __u32 args[4]; __u32 state; __u32 packets_out;
    __u32 bpf_sock_ops_cb_flags; ...; };
"""
PROTOTYPES = "\n".join(
    [f"int {hook}(struct bpf_sock_addr *ctx);" for hook in HOOKS]
    + [f"int {hook}(struct bpf_sock *ctx);" for hook in BIND_HOOKS]
    + ["int socket_opening(struct bpf_sock_ops *ctx);"]
)
LOOKUPS = """
int lookup_service(const void *frontend, __u64 netns, void *service);
int may_exist(const void *frontend);
void remember_choice(const void *tuple, __u32 service, __u32 chosen);
long long repeat_choice(const void *tuple);
int pass_packet(const void *packet);
int follow_packet(const void *packet, void *to);
int copy_service(const void *frontend, const void *value, void *copy);
int copy_backend(const void *slot, const void *value, void *copy);
int copy_entry(const void *tuple, const void *entry, void *copy);
void write_in_turns(void *entry, const void *one, const void *other, __u32 size, __u32 rounds);
int look_at(void *socket, const void *numbers, __u64 time);
int read_often(const void *tuple, const void *entry, const void *right, void *wrong, __u32 rounds);
"""
SOURCE = Path(__file__).with_name("lookups.c")  # it includes the hooks
WORDS = "typedef unsigned int __u32; typedef unsigned long long __u64;\n"

CHECKED = ("-fsanitize=undefined", "-fno-sanitize-recover=undefined")
STRICT = ("-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter")
SHAPE = ("-std=gnu11", "-O0", "-fPIC", "-DDIALECT_NATIVE")
# For kernels with and without bpf_set_retval.
VARIANTS = {"set_retval": ("-DHAVE_SET_RETVAL",), "no_retval": ()}
ROOT = Path(__file__).parents[2]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")  # before there are threads: Python 3.11 has a race
SOURCES = (Path(__file__), SOURCE, *layout.SOURCES.rglob("*.[ch]"))


@cache
def folder() -> Path:
    """Return the folder for the results of the present sources."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES):
        digest.update(path.read_bytes())
    made = ROOT / "build" / "native" / digest.hexdigest()[:16]
    made.mkdir(parents=True, exist_ok=True)
    return made


def once(name: str, build: Callable[[Path], None]) -> Path:
    """Return the file of this name; if it is missing, one process builds it."""
    path = folder() / name
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            build(unfinished := path.with_suffix(".unfinished"))
            unfinished.rename(path)
    return path


def built(variant: str) -> Any:
    """Return the module with the hooks of a variant."""
    name = f"native_{variant}"
    return _load(name, once(f"{name}{SUFFIX}", lambda path: _build(path, name, VARIANTS[variant])))


def _build(library: Path, name: str, flags: tuple[str, ...]) -> None:
    wrapper, source = library.with_name(f"{name}.c"), library.with_name(f"{name}.o")
    ffi = FFI()
    ffi.cdef(WORDS + CONTEXTS + PROTOTYPES + LOOKUPS + f'extern "Python+C" {{ {HELPERS} }}')
    ffi.set_source(name, "#include <linux/bpf.h>\n" + HELPERS + PROTOTYPES + LOOKUPS)
    ffi.emit_c_code(str(wrapper))
    gcc(*SHAPE, *STRICT, *CHECKED, *flags, f"-I{layout.SOURCES}", "-c", SOURCE, "-o", source)
    python = sysconfig.get_paths()["include"]
    gcc("-shared", "-fPIC", f"-I{python}", wrapper, source, *CHECKED, "-o", library)


def gcc(*arguments: str | Path) -> None:
    done = subprocess.run(["gcc", *arguments], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr


def _load(name: str, library: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Build every variant at once."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(built, VARIANTS))


if __name__ == "__main__":
    main()
