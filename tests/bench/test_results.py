# SPDX-License-Identifier: Apache-2.0
"""A result is written, read, drawn, and shown in the pages."""

import re
import sys
from pathlib import Path

import pytest

from bench import page, result
from bench.__main__ import run
from bench.parts import PARTS, Part
from bench.report import Row, row_of
from bench.result import Result

NODEPORT = Result(
    "python -m bench.nodeport --rounds 4",
    "a machine",
    7,
    [
        "TCP connections, a byte each way: 4 rounds",
        row_of("ebpflb, local", [100, 110, 120, 130], "/s"),
        row_of("nftables, local", [90, 80, 100], "/s", note="of three"),
        row_of("ebpflb / nftables", [1.1, 1.2, 1.3, 1.4], "x", 1.33, least=True),
        "the node's cost of a packet",
        Row("ebpflb, remote, TCP", 2000.1234567, "ns"),
    ],
)
GROWTH = Result(
    "python -m bench.growth",
    "another machine, 2 CPUs, 2026-11-24; load 0.9 0.9 1.5",
    7,
    ["amid more Services"]
    + [row_of("connect4", [1, 2, 3], "ns", at=10**n, axis="services") for n in range(3)],
)
PAGE = """before
<!-- bench nodeport -->
old
<!-- end of bench -->
between
<!-- bench growth -->
<!-- end of bench -->
<!-- bench draws -->
<!-- end of bench -->
after
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with results of two parts, and a page."""
    result.write(NODEPORT, tmp_path / "results/nodeport.json")
    result.write(GROWTH, tmp_path / "results/growth.json")
    (tmp_path / "page.md").write_text(PAGE)
    return tmp_path


def test_what_is_written_is_read(folder: Path) -> None:
    """Written results read back the same, with six digits of each figure, and headings between
    rows.
    """
    found = result.read(folder / "results/nodeport.json")
    assert found.rows("TCP")[:2] == NODEPORT.rows("TCP")[:2]
    assert found.rows("the node")[0].value == 2000.12
    assert len(found.rows()) == 4


def test_a_row_says_how_its_rounds_vary() -> None:
    """A row shows the middle half of four or more rounds, or the range of fewer rounds, and its
    note.
    """
    tcp = NODEPORT.rows("TCP")
    assert tcp[0].cells() == ("ebpflb, local", "115 /s", "", "", "middle half 102 to 128")
    assert tcp[1].cells()[-1] == "of 3: 80 to 100; of three"
    assert tcp[2].judgement() == "missed by 6%"
    assert row_of("once", [1], "ns").cells()[-1] == ""
    assert GROWTH.rows()[2].name == "connect4, 100 services"


def test_pages_show_the_results(folder: Path) -> None:
    """Results stand between their markers; results that were not measured are marked."""
    path = folder / "page.md"
    page.renew(folder / "results", (path,))
    text = path.read_text()
    assert "old" not in text
    assert f"![{PARTS['nodeport'].title}](results/nodeport.png)" in text
    assert "ebpflb, local" not in text
    assert "[all 4 figures](results/nodeport.json), 0 of 1 targets met." in text
    assert "| ebpflb / nftables | 1.250 x | >= 1.330 x |\n" in text
    assert "`python -m bench.growth`, 2026-11-24; load 0.9 0.9 1.5; [all 3 figures]" in text
    assert page.NOT_MEASURED in text
    assert [line for line in text.splitlines() if line in ("before", "between", "after")] == [
        "before",
        "between",
        "after",
    ]
    page.renew(folder / "results", (path,))
    assert path.read_text() == text


def test_a_marker_names_a_part() -> None:
    """A marker of an unknown part is an error: its page would show old figures for ever."""
    with pytest.raises(KeyError):
        page.renewed(PAGE.replace("draws", "nothing"), {}, Path(), Path())


def test_plots_are_drawn(folder: Path) -> None:
    """Bars and curves are drawn, small enough to be committed."""
    page.renew(folder / "results", ())
    for name in ("nodeport", "growth"):
        plot = (folder / f"results/{name}.png").read_bytes()
        assert plot.startswith(b"\x89PNG")
        assert len(plot) < 100_000


def test_the_summary_compares(folder: Path) -> None:
    """The summary shows our figures beside kube-proxy's, for everything measured."""
    text = page.renewed(
        "<!-- bench summary -->\n<!-- end of bench -->",
        page.read_results(folder / "results"), folder, folder,
    )  # fmt: skip
    assert "| the same, flow tables | 115 /s | 90 /s |" in text
    machines = "\nnodeport: a machine; growth: another machine, 2 CPUs."
    assert f"{machines} 2 parts, 0 of 1 targets met.\n" in text
    assert "memory" not in text


def test_pages_are_as_the_results_say() -> None:
    """The generated parts of the pages equal the results."""
    results = page.read_results(page.RESULTS)
    for path in page.PAGES:
        text = path.read_text()
        assert page.renewed(text, results, page.RESULTS, path.parent) == text, path


def test_every_part_stands_on_a_page() -> None:
    text = "\n".join(path.read_text() for path in page.PAGES)
    assert set(re.findall("<!-- bench (.*) -->", text)) == {*PARTS, "summary"}


def test_a_part_that_fails_leaves_its_former_result(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """If a part fails, its former result stays, and the part is named."""
    before = (folder / "results/growth.json").read_bytes()
    part = Part("growth", "bench.report.nothing", "", "", "", ())
    assert not run(part, quick=True, results=folder / "results")
    assert "growth FAILED" in capfd.readouterr().err
    assert (folder / "results/growth.json").read_bytes() == before


def test_a_result_says_its_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A result names its command, ready to be typed again, without its output file."""
    path = folder / "results/it.json"
    monkeypatch.setattr(result.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["bench/it.py", "--rounds", "3", "--json", str(path)])
    result.run_bench("It.", lambda wanted: [Row("rounds", wanted.rounds, "")], rounds=1)
    assert result.read(path).command == "python -m bench.it --rounds 3"
    assert result.read(path).rows()[0].value == 3
    assert "# python -m bench.it --rounds 3" in capsys.readouterr().out
