# SPDX-License-Identifier: Apache-2.0
"""Lists of the kernel, as netlink sends them."""

import errno
from collections import deque
from typing import Any, Self

import pytest

from ebpflb.kernel import netlink

KIND, INTERRUPTED = 20, 0x10  # RTM_NEWADDR, NLM_F_DUMP_INTR
DONE = netlink.packed(netlink.DONE, 0, bytes(4))


class Kernel:
    """A socket with these answers, each in one piece."""

    def __init__(self, answers: deque[bytes]) -> None:
        self.answers = answers

    def __call__(self, *_: Any) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: no descriptor is open."""

    def send(self, _: bytes) -> None:
        """Accept any request: all are the same."""

    def recv(self, _: int) -> bytes:
        return self.answers.popleft()


def listed(monkeypatch: pytest.MonkeyPatch, *answers: bytes) -> list[bytes]:
    with monkeypatch.context() as patched:
        patched.setattr("ebpflb.kernel.netlink.socket.socket", Kernel(deque(answers)))
        return netlink.dump(KIND, b"", 0)


def item(content: bytes, flags: int = 0) -> bytes:
    return netlink.packed(KIND, flags, content)


def test_a_list_that_has_changed_meanwhile_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports the change, and may have left something out."""
    torn = item(b"one.", INTERRUPTED) + DONE
    whole = item(b"one.") + item(b"two.") + DONE
    assert listed(monkeypatch, torn, whole) == [b"one.", b"two."]


def test_a_list_that_changes_all_the_time_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a list keeps changing, the result is an error, not a partial list."""
    torn = item(b"one.", INTERRUPTED) + DONE
    with pytest.raises(OSError, match="the list changes all the time") as caught:
        listed(monkeypatch, *[torn] * 100)
    assert caught.value.errno == errno.EAGAIN


def test_an_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the kernel's number."""
    refused = netlink.packed(netlink.ERROR, 0, (-errno.EPERM).to_bytes(4, "little", signed=True))
    with pytest.raises(PermissionError):
        listed(monkeypatch, item(b"one."), refused)


def test_an_attribute_without_a_length_does_not_stop_the_reader() -> None:
    assert netlink.attributes(bytes(4) + netlink.text(3, "eth0"))[3] == b"eth0\0"
