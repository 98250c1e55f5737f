# SPDX-License-Identifier: Apache-2.0
"""Run a command under the seccomp profile of RuntimeDefault for these capabilities.

    /usr/bin/python3 seccomp_default.py CAP_BPF,CAP_NET_ADMIN... COMMAND...

Debian's Python has the module seccomp (python3-seccomp). seccomp_default.txt has the sources.
"""

import errno
import os
import sys
from collections.abc import Iterable
from pathlib import Path

_ALWAYS, _ADMIN = "always", "CAP_SYS_ADMIN"
_NAMESPACES = 0x7E020000  # CLONE_NEWNS and the others before CLONE_NEWTIME
_AF_ALG, _AF_VSOCK = 38, 40
_PERSONALITIES = (0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)


def allowed(capabilities: set[str]) -> set[str]:
    """Return the system calls that are allowed with any arguments."""
    lines = Path(__file__).with_suffix(".txt").read_text().replace("\n  ", " ").splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    return {name for key, *names in rows if key in {_ALWAYS, *capabilities} for name in names}


def under(capabilities: Iterable[str]) -> list[str]:
    """Return the command prefix that applies the profile for these capabilities."""
    return ["/usr/bin/python3", __file__, ",".join(capabilities)]


def load(capabilities: set[str]) -> None:
    """Set the filter of this process, permanently.

    Names that libseccomp does not know are left out, as container runtimes do.
    """
    # A module of Debian's Python only.
    import seccomp  # type: ignore[import-not-found]

    made = seccomp.SyscallFilter(seccomp.ERRNO(errno.EPERM))
    for name in allowed(capabilities):
        number = seccomp.resolve_syscall(seccomp.Arch(), name)
        if number >= 0:
            made.add_rule(seccomp.ALLOW, number)
    for operator, family in ((seccomp.LT, _AF_ALG), (seccomp.EQ, 39), (seccomp.GT, _AF_VSOCK)):
        made.add_rule(seccomp.ALLOW, "socket", seccomp.Arg(0, operator, family))
    for persona in _PERSONALITIES:
        made.add_rule(seccomp.ALLOW, "personality", seccomp.Arg(0, seccomp.EQ, persona))
    if _ADMIN not in capabilities:
        no_namespaces = seccomp.Arg(0, seccomp.MASKED_EQ, _NAMESPACES, 0)
        made.add_rule(seccomp.ALLOW, "clone", no_namespaces)
        made.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")
    made.load()


if __name__ == "__main__":
    _, granted, *command = sys.argv
    load(set(granted.split(",")))
    os.execvp(command[0], command)
