# SPDX-License-Identifier: Apache-2.0
"""The table in docs/configuration.md, made of ``configuration.table``.

python -m tests.configuration.page    writes it anew
"""

from pathlib import Path

from ebpflb.configuration.table import ROWS, Row

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
BEGIN, END = "<!-- made of ebpflb/configuration/table.py -->\n", "<!-- until here -->\n"
HEAD = "| flag | field | asked | answer | what it does |\n|---|---|---|---|---|\n"


def table() -> str:
    """All rows, in the order of kube-proxy.md 15."""
    return HEAD + "".join(map(_line, ROWS))


def current(page: str) -> str:
    """The page with the table as it should be."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


def _line(row: Row) -> str:
    flags = " ".join(
        f"`-{each}`" if len(each) == 1 else f"`--{each}`" for each in row.flags.split()
    )
    fields = " ".join(f"`{each}`" for each in row.fields.split())
    answer = "accepted, no effect" if row.idle else "honoured"
    return f"| {flags or '-'} | {fields or '-'} | {row.letter} | {answer} | {row.meaning} |\n"


if __name__ == "__main__":
    PAGE.write_text(current(PAGE.read_text()))
