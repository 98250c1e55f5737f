# SPDX-License-Identifier: Apache-2.0
"""The compiler: the only place that imports bcc, run as a process of its own and gone in a second.

    stdin   a Job
    stdout  msgpack {program: bytecode}, map references still numbered
    stderr  the compiler's own words

It imports bcc, then becomes nobody before it compiles, where it may (CAP_SETUID, CAP_SETGID; a
container need not grant them), and gives up every capability. The sources lie in a folder of
its own, so that a private checkout need not be opened to others.
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
    """What to compile: a folder that holds bpf/, the file in it, and the compiler's flags."""

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
        sys.exit(str(error).splitlines()[0])  # clang has said the rest
    sys.stdout.buffer.write(msgspec.msgpack.encode(programs))
    sys.stdout.buffer.flush()
    os._exit(0)  # LLVM's destructors take longer than the compilation


if __name__ == "__main__":
    main()
