# SPDX-License-Identifier: Apache-2.0
"""The BTFs of the kernel's modules: a program that calls their functions is loaded with them."""

import os
from collections.abc import Collection, Iterator

from ebpflb.datapath import kernel

_BY_ID, _NEXT_ID = 19, 23  # BPF_BTF_GET_FD_BY_ID, BPF_BTF_GET_NEXT_ID


def open_module_btfs(names: Collection[str]) -> dict[str, int]:
    """The descriptors of modules' BTFs, by the module's name; only of those that are loaded.

    Raises KernelError; without CAP_SYS_ADMIN, EPERM.
    """
    found: dict[str, int] = {}
    for number in _ids():
        wanted = kernel.ffi.new("struct by_id *")
        wanted.id = number
        fd = kernel.bpf(_BY_ID, f"opening BTF {number}", wanted)
        name = _name(fd)
        if name in names:
            found[name] = fd
        else:
            os.close(fd)
    return found


def _ids() -> Iterator[int]:
    attr = kernel.ffi.new("struct by_id *")
    while kernel.find(_NEXT_ID, "listing BTFs", attr) is not None:
        attr.id = attr.next
        yield attr.id


def _name(fd: int) -> str:
    """The module's, or "vmlinux"; "" for a program's BTF."""
    name = bytearray(64)
    out = kernel.ffi.new("struct btf_info *")
    text = kernel.ffi.from_buffer(name)
    out.name, out.name_size = int(kernel.ffi.cast("uintptr_t", text)), len(name)
    kernel.info_into(fd, out)
    return name.split(b"\0", 1)[0].decode() if out.kernel else ""
