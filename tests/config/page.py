# SPDX-License-Identifier: Apache-2.0
"""The table of options in docs/configuration.md, made from the declarations in the code.

python -m tests.config.page writes it again
"""

from pathlib import Path

from ebpflb.cli.run_options import format_value
from ebpflb.options import Flag, Options, Paths, flags_of

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
BEGIN = "<!-- made of ebpflb/options.py -->\n"
END = "<!-- until here -->\n"


def own_table() -> str:
    """Return the table of options that kube-proxy does not have, by name."""
    declared = [(flag, default) for kind in (Options, Paths) for _, flag, default in flags_of(kind)]
    declared.sort(key=lambda it: it[0].name)
    lines = (_own_line(flag, default) for flag, default in declared)
    return "| option | chart | default | meaning |\n|---|---|---|---|\n" + "".join(lines)


def _own_line(flag: Flag, default: object) -> str:
    chart = flag.chart if flag.chart == "-" else f"`{flag.chart}`"
    variable = f"Or `{flag.variable}`." if flag.variable else ""
    shown = flag.default_text or f"`{format_value(flag.shown(default))}`".replace("``", "-")
    meaning = " ".join(filter(None, (flag.help, variable, flag.details)))
    return f"| `{flag.name}` | {chart} | {shown} | {meaning} |\n"


def current(page: str) -> str:
    """Return the page with the table as it should be."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + own_table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(current(PAGE.read_text()))
