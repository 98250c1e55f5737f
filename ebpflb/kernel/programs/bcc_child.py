# SPDX-License-Identifier: Apache-2.0
"""Compile with BCC in a process of its own, for a second. No other module imports bcc.

    stdin   a Job
    stdout  msgpack {program: bytecode}, map references still numbered
    stderr  the compiler's messages

After importing bcc the process changes to the user nobody, if it may (CAP_SETUID, CAP_SETGID; a
container need not grant them), and drops all capabilities; then it compiles. The sources are copied
to a temporary folder, because the user nobody may be unable to read a private checkout. The module
imports nothing of ebpflb, because it is started by its path, with isolated Python.
"""

import ctypes
import os
import struct
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

NOBODY = 65534
_CAPABILITY_VERSION_3 = 0x20080522  # uapi/linux/capability.h: two sets of 32 bits each
# BCC's own helpers take pointers without const: a warning for each use would hide the errors.
NO_CONST = "-Wno-incompatible-pointer-types-discards-qualifiers"


class Job(msgspec.Struct):
    """A compilation: a folder that holds bpf/, the file in it, and the compiler's flags."""

    folder: str
    source: str
    programs: list[str]
    flags: list[str]


def _give_up_rights() -> None:
    with suppress(PermissionError):
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    if ctypes.CDLL(None, use_errno=True).capset(header, bytes(24)):
        raise OSError(ctypes.get_errno(), "capabilities cannot be given up")


def _compile(job: Job) -> dict[str, bytes]:
    import bcc

    folder = Path(job.folder)
    os.environ["BCC_KERNEL_SOURCE"] = str(folder / "stub")
    _give_up_rights()
    source = folder / job.source
    text = f'#line 1 "{source}"\n{source.read_text()}'
    flags = [f"-I{folder}", "-DDIALECT_BCC", NO_CONST, *job.flags]
    module = bcc.BPF(text=text, cflags=flags)
    return {program: module.dump_func(program) for program in job.programs}


def main() -> None:
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Job)
    try:
        programs = _compile(job)
    except Exception as error:
        sys.exit(str(error).splitlines()[0])  # clang has already printed the details
    sys.stdout.buffer.write(msgspec.msgpack.encode(programs))
    sys.stdout.buffer.flush()
    os._exit(0)  # LLVM's destructors take longer than the compilation


if __name__ == "__main__":
    main()
