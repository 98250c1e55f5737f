# SPDX-License-Identifier: Apache-2.0
"""A terminal for a command: its output, and its width."""

import fcntl
import os
import pty
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

LINES = 40


@contextmanager
def opened(columns: int) -> Iterator[tuple[int, IO[str]]]:
    """Return the descriptor to read from, and the file for a command's stdout.

    Close the file once the command has it, or ``read`` does not end.
    """
    screen, other_end = pty.openpty()
    fcntl.ioctl(other_end, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
    try:
        with open(other_end, "w") as out:
            yield screen, out
    finally:
        os.close(screen)


def read(screen: int) -> str:
    """Return the output until no process has the terminal, when reading raises EIO."""
    shown = b""
    try:
        while part := os.read(screen, 1 << 16):
            shown += part
    except OSError:
        pass
    return shown.decode().replace("\r\n", "\n")
