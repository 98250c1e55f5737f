# SPDX-License-Identifier: Apache-2.0
"""The hooks of sockets and packets over maps in memory, as a library that Python calls."""

import hashlib
from pathlib import Path
from typing import Any

from cffi import FFI

from ebpflb.kernel.maps import layout
from tests.native import build

DECLARATIONS = """
typedef unsigned int __u32; typedef unsigned long long __u64;
struct map { int kind, key_size, value_size, entries, stride, places, used, next;
    char *keys, *values, *taken; unsigned long long *added, *touched; };
struct socket_call { __u32 hook, type, protocol, state; __u64 netns, cookie;
    __u32 family, address, port; int allowed, retval, strange; __u32 verdicts; };
struct end { __u32 address, port; };
struct conversation { struct end client, frontend, backend, seen_as;
    __u32 v6, protocol, sent, received; };
extern unsigned long long now; extern unsigned int dice; extern int until_meanwhile;
extern void (*meanwhile)(void); extern __u32 node_address;
struct map *map_new(int kind, int key_size, int value_size, int entries);
void map_free(struct map *map);
void *map_at(struct map *map, int place);
void *map_lookup(struct map *map, const char *key);
int map_delete(struct map *map, const char *key);
int map_update(struct map *map, const char *key, const char *value, int flags);
int map_dump(const struct map *map, char *keys, char *values);
void bind_map(int index, const char *name, struct map *map);
void run(struct socket_call *call);
long long outcome_of(const struct socket_call *call);
void end_connection(const char *key);
int end_peer(const char *ended);
__u32 end_flow(const char *entries);
void run_all(const struct socket_call *calls, int count, int first, int step, __u64 first_cookie,
    long long *outcomes);
long long talk_open(struct conversation *talk, int *replied);
long long talk_on(struct conversation *talk, int *replied);
void talk_close(struct conversation *talk);
void talk_all(const struct conversation *talks, int count, int first, int step,
    struct conversation *after, long long *outcomes);
"""
SOURCE = Path(__file__).with_name("sockets.c")
SOURCES = (Path(__file__), SOURCE, *sorted(SOURCE.parent.glob("*.h")))


def built() -> Path:
    """Return the library's file; ``python -m tests.simulation.build`` builds it, too."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()
    return build.once(f"simulation_{digest[:16]}.so", _build)


def _build(library: Path) -> None:
    includes = (f"-I{layout.SOURCES}", f"-I{build.SOURCE.parent}", "-DHAVE_SET_RETVAL")
    flags = (*build.SHAPE, *build.STRICT, *build.CHECKED, *includes)
    build.gcc("-shared", *flags, SOURCE, "-o", library)


class Library:
    """The library, and cffi's view of it."""

    def __init__(self) -> None:
        library = built()
        self.ffi: Any = FFI()
        self.ffi.cdef(DECLARATIONS)
        self.lib: Any = self.ffi.dlopen(str(library))


if __name__ == "__main__":
    built()
