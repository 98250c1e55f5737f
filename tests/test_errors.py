# SPDX-License-Identifier: Apache-2.0
"""Operators read errors in words, without Python's terms."""

import ast
import ssl
import subprocess
from collections.abc import Iterator
from http.client import IncompleteRead, RemoteDisconnected
from pathlib import Path

import pytest
from urllib3 import HTTPSConnectionPool
from urllib3.connection import HTTPSConnection
from urllib3.exceptions import NewConnectionError, ProtocolError, ReadTimeoutError

from ebpflb.errors import LONGEST_LINE, NodeError, in_words

ROOT = Path(__file__).parents[1]
OF_THE_SYSTEM = {"OSError", "HTTPError", "TimeoutExpired", "PermissionError", "FileNotFoundError"}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError(2, "No such file or directory", "/x"), "/x: No such file or directory"),
        (OSError(111, "Connection refused"), "Connection refused"),
        (
            NewConnectionError(
                HTTPSConnection("192.0.2.1", 6443),
                "Failed to establish a new connection: [Errno 111] Connection refused",
            ),
            "Failed to establish a new connection: Connection refused",
        ),
        (
            ReadTimeoutError(
                HTTPSConnectionPool("::1", 9), "/", "Read timed out. (read timeout=5)"
            ),
            "Read timed out. (read timeout=5)",
        ),
        (
            ssl.SSLCertVerificationError(
                1,
                "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed"
                " certificate (_ssl.c:1006)",
            ),
            "certificate verify failed: self-signed certificate",
        ),
        (
            ProtocolError("Connection aborted.", RemoteDisconnected("Remote end closed it")),
            "Connection aborted: Remote end closed it",
        ),
        (
            ProtocolError("Connection broken: IncompleteRead(0 bytes read)", IncompleteRead(b"")),
            "Connection broken: 0 bytes read: 0 bytes read",
        ),
        (subprocess.TimeoutExpired(["/usr/bin/python3", "-m", "x"], 60), "not ended after 60 s"),
        (ValueError("two\n  lines"), "two lines"),
        (ValueError(), "ValueError"),
        (NodeError("of our own"), "of our own"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_in_words(error: BaseException, words: str) -> None:
    """File and reason stay; classes, errnos and source lines are removed."""
    assert in_words(error) == words


def test_what_is_raised_from_another_error_keeps_its_reason() -> None:
    """The errors in this test are real ones, not similar texts."""
    with pytest.raises(OSError, match="No such file") as failed:
        Path("/nothing/here").read_text()
    assert in_words(failed.value) == "/nothing/here: No such file or directory"


def test_words_are_bounded() -> None:
    """The words are bounded, whatever a library writes."""
    assert len(in_words(ValueError("x" * 10**6))) <= LONGEST_LINE + 3


def formatted(path: Path) -> Iterator[str]:
    """Yield the places where a system error is formatted as Python does."""
    for handler in ast.walk(ast.parse(path.read_text())):
        if not isinstance(handler, ast.ExceptHandler) or not handler.name or not handler.type:
            continue
        if OF_THE_SYSTEM.isdisjoint(
            it.attr if isinstance(it, ast.Attribute) else getattr(it, "id", "")
            for it in ast.walk(handler.type)
        ):
            continue
        for node in ast.walk(handler):
            value = node.value if isinstance(node, ast.FormattedValue) else None
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("str", "repr"):
                value = node.args[0]
            if isinstance(value, ast.Name) and value.id == handler.name:
                yield f"{path}:{value.lineno}"


def test_no_error_of_the_system_is_formatted_by_python() -> None:
    """in_words or strerror replace `[Errno 2]` and `HTTPSConnection(...)`."""
    assert [it for path in (ROOT / "ebpflb").rglob("*.py") for it in formatted(path)] == []


def test_the_search_finds_something(tmp_path: Path) -> None:
    """The test above can fail."""
    bad = tmp_path / "bad.py"
    bad.write_text(
        "try:\n    pass\nexcept (OSError, ValueError) as e:\n    print(f'{e}', str(e))\n"
    )
    assert len(list(formatted(bad))) == 2
