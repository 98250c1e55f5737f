# SPDX-License-Identifier: Apache-2.0
"""The tables of flags in docs/configuration.md, made of what the code declares.

python -m tests.config.page    writes them again
"""

from pathlib import Path

from ebpflb.cli.run_options import format_value
from ebpflb.config.parameters import PARAMETERS, Parameter
from ebpflb.options import Flag, Options, Paths, flags_of

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
END = "<!-- until here -->\n"


def own_table() -> str:
    """The options that kube-proxy does not have, by name."""
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


def kube_proxy_table() -> str:
    """All parameters that have an effect, in the order of kube-proxy.md 15; then the others, by the
    reason why they have none.
    """
    head = "| flag | field | description |\n|---|---|---|\n"
    honoured = "".join(_line(each) for each in PARAMETERS if not each.ignored)
    reasons: dict[str, list[str]] = {}
    for each in filter(lambda it: it.ignored, PARAMETERS):
        names = " ".join(filter(None, (_flags(each), _fields(each))))
        reasons.setdefault(each.help, []).append(names)
    ignored = "".join(f"- {reason} {', '.join(each)}\n" for reason, each in reasons.items())
    return f"{head}{honoured}\nAccepted without effect:\n\n{ignored}"


TABLES = {
    "<!-- made of ebpflb/options.py -->\n": own_table,
    "<!-- made of ebpflb/config/parameters.py -->\n": kube_proxy_table,
}


def current(page: str) -> str:
    """The page with the tables as they should be."""
    for begin, table in TABLES.items():
        before, _, rest = page.partition(begin)
        page = before + begin + table() + END + rest.partition(END)[2]
    return page


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
