# SPDX-License-Identifier: Apache-2.0
"""The table in docs/configuration.md, made of ``configuration.parameters``.

python -m tests.config.page    writes it anew
"""

from pathlib import Path

from ebpflb.config.parameters import PARAMETERS, Parameter

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
BEGIN, END = "<!-- made of ebpflb/config/parameters.py -->\n", "<!-- until here -->\n"
HEAD = "| flag | field | description |\n|---|---|---|\n"


def table() -> str:
    """All parameters that have an effect, in the order of kube-proxy.md 15; then the others, by the
    reason why they have none.
    """
    honoured = "".join(_line(each) for each in PARAMETERS if not each.ignored)
    reasons: dict[str, list[str]] = {}
    for each in filter(lambda it: it.ignored, PARAMETERS):
        names = " ".join(filter(None, (_flags(each), _fields(each))))
        reasons.setdefault(each.help, []).append(names)
    ignored = "".join(f"- {reason} {', '.join(each)}\n" for reason, each in reasons.items())
    return f"{HEAD}{honoured}\nAccepted without effect:\n\n{ignored}"


def current(page: str) -> str:
    """The page with the table as it should be."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


def _line(parameter: Parameter) -> str:
    cells = (_flags(parameter) or "-", _fields(parameter) or "-", parameter.help)
    return f"| {' | '.join(cells)} |\n"


def _flags(parameter: Parameter) -> str:
    names = parameter.flags.split()
    return " ".join(f"`-{each}`" if len(each) == 1 else f"`--{each}`" for each in names)


def _fields(parameter: Parameter) -> str:
    return " ".join(f"`{each}`" for each in parameter.fields.split())


if __name__ == "__main__":
    PAGE.write_text(current(PAGE.read_text()))
