# SPDX-License-Identifier: Apache-2.0
"""How rows are drawn."""

import pytest

from ebpflb.cli.output import COLUMNS, print_narrow_table, print_table


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


def narrow(capsys: pytest.CaptureFixture[str], *rows: dict[str, object], wide: bool) -> list[str]:
    print_narrow_table("title", list(rows), wide=wide, whole=("name",))
    return capsys.readouterr().out.splitlines()


def test_narrow(capsys: pytest.CaptureFixture[str]) -> None:
    """What does not fit into 80 columns ends in an ellipsis; -o wide has all."""
    row = {"name": "n" * 40, "why": "because " * 9, "number": 7}
    lines = narrow(capsys, row, wide=False)
    assert len(lines[2]) == COLUMNS == 80
    assert "n" * 40 in lines[2] and "\u2026" in lines[2] and lines[2].endswith("7")
    assert lines[1].split() == ["NAME", "WHY", "NUMBER"]
    assert ("because " * 9).strip() in narrow(capsys, row, wide=True)[2]


def test_narrowest(capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing else is left the others are cut too."""
    rows = {f"name{i}": "x" * 60 for i in range(4)} | {"name": "n" * 60}
    assert len(narrow(capsys, rows, wide=False)[2]) == COLUMNS


def test_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    """They are shown, and a terminal does not act on them."""
    for lines in (
        drawn(capsys, {"a": "b\x1b[2J\nc"}),
        narrow(capsys, {"a": "b\x1b\nc"}, wide=True),
    ):
        assert "b\\x1b" in "".join(lines) and "\x1b" not in "".join(lines)
