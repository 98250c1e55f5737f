# SPDX-License-Identifier: Apache-2.0
"""How rows are drawn."""

import pytest

from ebpflb.cli.output import print_table


def drawn(capsys: pytest.CaptureFixture[str], *rows: dict[str, object]) -> list[str]:
    print_table("title", list(rows))
    return capsys.readouterr().out.splitlines()


def test_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """Columns are as wide as their widest, numbers stand to the right, truth is yes or no."""
    rows = [
        {"name": "a", "idle_seconds": 7, "ok": True},
        {"name": "longer", "idle_seconds": 1.5, "ok": False},
    ]
    assert drawn(capsys, *rows) == [
        "title",
        "  name      idle seconds  ok",
        "  ------  --------------  ----",
        "  a                    7  yes",
        "  longer             1.5  no",
        "",
    ]


def test_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A row stays one line and is not cut, whatever its length."""
    text = "word " * 200
    assert drawn(capsys, {"text": text.strip()})[3] == f"  {text}".rstrip()


def test_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Without rows there is a line that says so."""
    assert drawn(capsys) == ["title", "  no entries", ""]
