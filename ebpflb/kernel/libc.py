# SPDX-License-Identifier: Apache-2.0
"""Calls of the C library that Python 3.11 does not have. Each raises OSError if the call fails."""

import ctypes
import os
import socket

NEW_NETWORK = 0x40000000  # CLONE_NEWNET

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(kind: int) -> None:
    """unshare(2): move this thread into a new namespace of this kind."""
    _check(_libc.unshare(kind))


def setns(namespace: int, kind: int) -> None:
    """setns(2): move this thread into the namespace, which is an open file."""
    _check(_libc.setns(namespace, kind))


def getsockopt(opened: socket.socket, level: int, option: int, value: bytes, length: int) -> bytes:
    """getsockopt(2) with a value to send, and for more than socket.getsockopt's 1,024 bytes."""
    buffer = ctypes.create_string_buffer(value, length)
    size = ctypes.byref(ctypes.c_uint32(length))
    _check(_libc.getsockopt(opened.fileno(), level, option, buffer, size))
    return buffer.raw


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
