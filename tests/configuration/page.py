# SPDX-License-Identifier: Apache-2.0
"""The table in docs/configuration.md, made of ``configuration.parameters``.

python -m tests.configuration.page    writes it anew
"""

from pathlib import Path

from ebpflb.configuration.parameters import PARAMETERS, Parameter

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
BEGIN, END = "<!-- made of ebpflb/configuration/parameters.py -->\n", "<!-- until here -->\n"
HEAD = "| flag | field | required | effect | description |\n|---|---|---|---|---|\n"


def table() -> str:
    """All parameters, in the order of kube-proxy.md 15."""
    return HEAD + "".join(map(_line, PARAMETERS))


def current(page: str) -> str:
    """The page with the table as it should be."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


def _line(parameter: Parameter) -> str:
    flags = " ".join(
        f"`-{each}`" if len(each) == 1 else f"`--{each}`" for each in parameter.flags.split()
    )
    fields = " ".join(f"`{each}`" for each in parameter.fields.split())
    effect = "ignored" if parameter.ignored else "honoured"
    cells = (flags or "-", fields or "-", parameter.required, effect, parameter.help)
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(current(PAGE.read_text()))
