# SPDX-License-Identifier: Apache-2.0
"""Tables in docs that repeat facts from the code are complete and correct."""

import re

import pytest

from ebpflb.cli.run import run
from ebpflb.config.parameters import PARAMETERS
from ebpflb.kernel.maps import layout
from ebpflb.model import addresses
from ebpflb.options import Options, flags_of
from ebpflb.serve.conditions import Cause, Verdict
from ebpflb.serve.status import AgentStatus
from tests.docs import pages
from tests.docs.pages import ROOT

RUNBOOK = ROOT / "docs/runbook.md"
REFERENCE = ROOT / "docs/reference.md"
ARCHITECTURE = ROOT / "docs/architecture.md"
SCALE = ROOT / "docs/scale.md"


def test_the_table_has_each_verdict_once() -> None:
    """The table has the verdicts of bpf/layout/verdict.h, each once, in their order."""
    header = (ROOT / "bpf/layout/verdict.h").read_text()
    listed = re.findall(r"^\tVERDICT_(\w+) = ", header, re.M)
    assert listed
    assert [row[0] for row in pages.rows(REFERENCE, "What does each verdict mean?")] == [
        f"`{each.lower()}`" for each in listed
    ]


def test_the_table_has_every_map() -> None:
    """The table has every map of bpf/maps, once."""
    rows = pages.rows(REFERENCE, "Which maps are there?")
    listed = [name for names, _ in rows for name in names.split(", ")]
    assert sorted(listed) == sorted(layout.MAPS)


def test_every_field_has_its_line() -> None:
    """Every field of the agent's status has its line."""
    rows = pages.rows(REFERENCE, "What do the lines of status mean?")
    listed = {name for row in rows for name in row[0].split(", ")}
    fields = set(AgentStatus.__struct_fields__)
    assert {field.replace("_", " ") for field in fields} <= listed


def test_runbook_has_each_verdict_and_reason_of_status() -> None:
    """Each verdict and reason has a heading in the runbook, which has no other such heading."""
    chapters = re.split(r"^## (.*)\n", RUNBOOK.read_text(), flags=re.M)
    below = dict(zip(chapters[1::2], chapters[2::2], strict=True))
    found = {name: re.findall(r"^### (.*)$", text, re.M) for name, text in below.items()}
    assert found["Status"] == list(Verdict)
    assert sorted(found["Reasons"]) == sorted(Cause)


def test_exit_status() -> None:
    """The reference has the exit status of each verdict."""
    rows = pages.rows(ROOT / "docs/reference.md", "Which commands are there?")
    (listed,) = [row[2] for row in rows if row[0] == "`ebpflb status`"]
    assert listed == ", ".join([*(f"{it.exit_status} {it}" for it in Verdict), "1 unknown"])


def test_readme_has_the_headings_of_the_demo() -> None:
    """README's output of the demo has the headings that the demo prints."""
    (shown,) = (it for it in pages.code(ROOT / "README.md") if "make demo" in it)
    demo = (ROOT / "ebpflb/cli/demo.py").read_text()
    headings = re.findall(r"^# (?:\d+ )?(.*)$", shown, re.M)
    assert headings
    assert [each for each in headings if each not in demo] == []


def test_where_to_find_what() -> None:
    """Every function and class in the first two tables is defined in a file of its row."""
    found = re.findall(r"^\| (?:to find|flag) .*\n(?:\|.*\n)+", ARCHITECTURE.read_text(), re.M)
    assert len(found) == 2
    for row in [row for table in found for row in table.splitlines()[2:]]:
        files = [(ARCHITECTURE.parent / path).read_text() for path in pages.LINK.findall(row)]
        assert files
        for name in pages.SPAN.findall(row):
            definition = rf"(?m)(def |class |^\w.*[ *]|^){name}(\(| =|:|, )|DEFINE_\w+\({name},"
            assert any(re.search(definition, text) for text in files), name


def test_which_code_acts_on_a_flag() -> None:
    """Every option that only ebpflb has is in a row."""
    listed = re.findall(r"(?m)^\| (--[^|]*)\|", ARCHITECTURE.read_text())
    flags = {flag.name for _, flag, _ in flags_of(Options)}
    assert flags <= {name.strip(",") for row in listed for name in row.split()}


@pytest.mark.parametrize("layer", ["cli", "lab", "agent"])
def test_import_rule(layer: str) -> None:
    """The rule in architecture.md has the layers of import-linter's contract, in their order."""
    contract = re.search(r"^layers =\n((?:    .*\n)+)", (ROOT / "setup.cfg").read_text(), re.M)
    assert contract
    layers = [line.strip().replace(" | ", ", ") for line in contract[1].splitlines()]
    rule = " > ".join(each for each in layers if each != "__main__")
    assert layer in rule and f"`{rule}`" in ARCHITECTURE.read_text()


def test_sizes_of_maps() -> None:
    """docs/scale.md has a row for each name of --map-size, with the usual number of entries."""
    found = re.findall(r"(?m)^\| `([a-z-]+)` \|[^|]*\| ([0-9,]+) \|", SCALE.read_text())
    assert found == [(name, f"{layout.usual_size(name):,}") for name in addresses.SIZES]


def test_own_options() -> None:
    """docs/configuration.md has a row for each option of `run` that kube-proxy does not have."""
    theirs = {f"--{name}" for each in PARAMETERS for name in each.flags.split()}
    shown = [it for it in run.params if not getattr(it, "hidden", False)]
    own = {it.opts[0] for it in shown if not theirs & set(it.opts)} - {"--help"}
    rows = pages.rows(ROOT / "docs/configuration.md", "Which options does ebpflb add?")
    assert [row[0].strip("[").split("]")[0] for row in rows] == [f"`{it}`" for it in sorted(own)]
