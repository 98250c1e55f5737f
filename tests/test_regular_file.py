# SPDX-License-Identifier: Apache-2.0
"""Reading an agent's file takes bounded time and memory, whatever is in its place; a wrong file is
named.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from ebpflb import files
from ebpflb.files import UnusableFile
from tests.kit.hostile_files import HOSTILE, lay


class Known(msgspec.Struct):
    """The expected content of the file."""

    number: int


def test_the_content_is_decoded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The content is returned; a missing file is no error."""
    (tmp_path / "file").write_text('{"number": 7}')
    assert files.decode_regular(tmp_path / "file", Known) == Known(7)
    assert files.decode_regular(tmp_path / "none", Known) is None
    assert not caplog.records


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_anything_else_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], None]
) -> None:
    """A file of any other kind is named in one line and treated as missing; a missing file is not
    named.
    """
    path = tmp_path / "file"
    lay(make, path)
    assert files.decode_regular(path, Known) is None
    assert len(caplog.messages) == path.exists() or path.is_symlink()
    for said in caplog.messages:
        assert said.startswith(f"{path}: ignored: ") and "\n" not in said and len(said) < 1000


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    """No kind of file leaves an open descriptor."""
    before = len(os.listdir("/proc/self/fd"))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("1234")
    for name, most in (("pipe", 9), (".", 9), ("file", 2), ("file", 9), ("none", 9)):
        with suppress(OSError, UnusableFile):
            files.read_regular(tmp_path / name, most)
    assert len(os.listdir("/proc/self/fd")) == before


def test_links_are_not_followed_where_that_is_asked(tmp_path: Path) -> None:
    """On request links are not followed, as for files that other users could have made."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    files.open_regular(tmp_path / "link", 1).close()
    with pytest.raises(OSError, match="symbolic links"):
        files.open_regular(tmp_path / "link", 1, follow=False)
