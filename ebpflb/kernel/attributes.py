# SPDX-License-Identifier: Apache-2.0
"""The structs and numbers of bpf(2), from uapi/linux/bpf.h: one struct for each command.

Each struct is as long as its command needs, results included: the kernel writes results at their
offset whatever length is passed (for example the revision of a query). Fields beyond the passed
length count as zero.
"""

from ebpflb.kernel import declarations

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
ffi = declarations.types(TEXT)
