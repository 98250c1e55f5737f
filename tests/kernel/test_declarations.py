# SPDX-License-Identifier: Apache-2.0
"""cffi's types from C declarations: from the installed file, or else parsed."""

from pathlib import Path

import pytest

from ebpflb.kernel import bpf

TEXT = "struct pair { uint32_t first, second; }; enum side { LEFT, RIGHT };"
OTHER = "struct pair { uint64_t first; };"


def test_the_file_of_this_text_is_used(tmp_path: Path) -> None:
    """The installed file for a text is used; another text has another file."""
    written = bpf.write_declarations(TEXT, tmp_path)
    written.write_text("ffi = 'brought along'")
    assert bpf.c_types(TEXT, tmp_path, None) == "brought along"
    assert bpf.c_types(OTHER, tmp_path, None).sizeof("struct pair") == 8


def test_a_checkout_parses_a_text_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first parse the file is read; a folder that cannot be made is no error."""
    cache = tmp_path / "build/declarations"
    assert bpf.c_types(TEXT, tmp_path, cache).sizeof("struct pair") == 8
    monkeypatch.setattr(bpf, "parse_declarations", lambda text: pytest.fail("parsed again"))
    assert bpf.c_types(TEXT, tmp_path, cache).sizeof("struct pair") == 8
    monkeypatch.undo()
    (tmp_path / "file").touch()
    assert bpf.c_types(TEXT, tmp_path, tmp_path / "file/cache").sizeof("struct pair") == 8
