# SPDX-License-Identifier: Apache-2.0
"""``--output`` and ``--watch``: values as a table, JSON or YAML, once or again and again.

A row of a table is one line, fit for grep.

Control characters, which a name in a map or manifest may hold, are escaped.
"""

import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from textwrap import fill, wrap
from typing import Any, TypeVar

import click
import msgspec
import yaml
from tabulate import tabulate

from ebpflb.errors import escaped
from ebpflb.tools.check_result import CheckResult

WIDE = "wide"
COLUMNS = 80
_NARROWEST = 8  # characters that stay of a cell
_WIDEST = 26  # of a cell among columns of which the first ones are shown
_INDENT, _GAP = 2, 2


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _option(*formats: str, more: str = "") -> Decorator:
    return click.option(
        "-o",
        "--output",
        type=click.Choice(formats),
        default="table",
        show_default=True,
        help=f"Output format{more}.",
    )


output_option = _option("table", "json", "yaml")
wide_output_option = _option("table", WIDE, "json", "yaml")


def lines_output_option(line: str) -> Decorator:
    """For rows that come one after the other; ``line`` says what each line of JSON is."""
    return _option("table", WIDE, "json", "yaml", more=f"; JSON is {line}, YAML a document for it")


def print_row_as(output: str, row: Any) -> None:
    """Prints one of many as a line of "json", or a document of "yaml"."""
    if output == "yaml":
        click.echo("---")
        print_as(output, row)
    else:
        click.echo(msgspec.json.encode(row))


def print_as(output: str, value: Any) -> None:
    """Prints a value as "json" or "yaml"."""
    if output == "yaml":
        click.echo(yaml.safe_dump(msgspec.to_builtins(value), sort_keys=False), nl=False)
    else:
        click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    """Prints rows, which have the same keys, with a column for each key."""
    click.echo(f"{title}\n{_table(rows) if rows else '  no entries'}\n")


def print_narrow_table(
    title: str, rows: list[dict[str, Any]], *, wide: bool, whole: Collection[str] = ()
) -> None:
    """The same as kubectl has it; if not ``wide``, in COLUMNS, where an ellipsis stands for what
    does not fit. The columns ``whole`` are cut last.
    """
    click.echo(f"{title}\n{_narrow_table(rows, wide, whole) if rows else '  none'}\n")


def print_first_columns(
    title: str, rows: list[dict[str, Any]], *, wide: bool, empty: str = "no entries"
) -> None:
    """As print_narrow_table, of rows with too many columns for one line: if not ``wide`` the first
    ones that fit, and a line that names the others.
    """
    left: list[str] = []
    if rows and not wide:
        shown = _first_that_fit(rows)
        left = [name.replace("_", " ") for name in rows[0] if name not in shown]
        rows = [{name: row[name] for name in shown} for row in rows]
    click.echo(f"{title}\n{_narrow_table(rows, wide, ()) if rows else f'  {empty}'}")
    if left:
        words = f"-o wide has {', '.join(left)}"
        click.echo(fill(words, COLUMNS, initial_indent="  ", subsequent_indent="  "))
    click.echo()


def percent(share: float, digits: int) -> str:
    """With so many decimals; of a share below one percent with two digits, as 0.010%."""
    return f"{share:.{digits}%}" if share >= 0.01 or not share else f"{100 * share:#.2g}%"


def _table(rows: list[dict[str, Any]]) -> str:
    heads = [name.replace("_", " ") for name in rows[0]]
    cells = [[_text(value) for value in row.values()] for row in rows]
    return _rendered(tabulate(cells, heads, "simple", colalign=_sides(rows), disable_numparse=True))


def _narrow_table(rows: list[dict[str, Any]], wide: bool, whole: Collection[str]) -> str:
    """Heads are a row: as heads they would take two columns more."""
    heads = [name.replace("_", " ").upper() for name in rows[0]]
    cells = [heads, *([_text(value) for value in row.values()] for row in rows)]
    if not wide:
        cells = _fitted(cells, [name in whole for name in rows[0]])
    return _rendered(tabulate(cells, (), "plain", colalign=_sides(rows), disable_numparse=True))


def _first_that_fit(rows: list[dict[str, Any]]) -> list[str]:
    """Where each is as wide as its cells, but none wider than _WIDEST."""
    found, free = list[str](), COLUMNS - _INDENT + _GAP
    for name in rows[0]:
        widest = max(len(name), *(len(_text(row[name])) for row in rows))
        free -= min(widest, _WIDEST) + _GAP
        if free < 0 and found:
            break
        found.append(name)
    return found


def _sides(rows: list[dict[str, Any]]) -> list[str]:
    return ["right" if _is_number(value) else "left" for value in rows[0].values()]


def _rendered(table: str) -> str:
    return "\n".join(f"{' ' * _INDENT}{line}".rstrip() for line in table.splitlines())


def _fitted(cells: list[list[str]], whole: list[bool]) -> list[list[str]]:
    """The widest columns are cut until the row fits."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    free = COLUMNS - _INDENT - _GAP * (len(widths) - 1)
    for kept in (whole, [False] * len(widths)):
        cut = [index for index, is_kept in enumerate(kept) if not is_kept]
        while cut and sum(widths) > free:
            widest = max(cut, key=widths.__getitem__)
            if widths[widest] <= _NARROWEST:
                break
            widths[widest] -= 1
    return [[_cut(text, width) for text, width in zip(row, widths, strict=True)] for row in cells]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else escaped(str(value))


def wrapped(label: str, text: str) -> list[str]:
    """A word longer than a line, as a path may be, is not broken: it could not be copied."""
    return wrap(
        " ".join(text.split()),
        COLUMNS,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )


# The lines of ``ebpflb check`` and ``ebpflb doctor``: what was looked at, and what was found.

_RESULT_INDENT = " " * 9


def print_results(results: Sequence[CheckResult], output: str, lacking: str) -> None:
    """``lacking``: the word for what is required and not ok. ``output``: "table" or WIDE."""
    if output == WIDE:
        print_narrow_table("this node", [_row(it, lacking) for it in results], wide=True)
    else:
        click.echo("\n".join(line for each in results for line in _lines(each, lacking)))


def _lines(result: CheckResult, lacking: str) -> Iterator[str]:
    """One of 80 columns if it is ok; else also what to do."""
    first = f"{_word(result, lacking):8} {result.feature}: {escaped(result.detail)}"
    if result.ok:
        yield first if len(first) <= COLUMNS else f"{first[: COLUMNS - 1]}…"
    else:
        yield from wrap(first, COLUMNS, subsequent_indent=_RESULT_INDENT)
        yield from wrap(
            escaped(result.remedy),
            COLUMNS,
            initial_indent=_RESULT_INDENT,
            subsequent_indent=_RESULT_INDENT,
        )


def _row(result: CheckResult, lacking: str) -> dict[str, str]:
    return {
        "": _word(result, lacking),
        "what": result.feature,
        "found": result.detail,
        "what to do, or what is lost": result.remedy,
    }


def _word(result: CheckResult, lacking: str) -> str:
    if result.ok:
        return "ok"
    return lacking if result.required else "warning"


# ``--watch``: shows a value again and again, until Ctrl-C.

_Value = TypeVar("_Value")

_CLEAR = "\x1b[H\x1b[2J"

watch_option = click.option(
    "-w",
    "--watch",
    type=click.FloatRange(min=0.1),
    is_flag=False,
    flag_value=2.0,
    default=None,
    metavar="[SECONDS]",
    help="Repeat every 2 s, or every SECONDS, and show changes, until Ctrl-C.",
)


def show(
    read: Callable[[], _Value], print_: Callable[[_Value], None], seconds: float | None
) -> _Value:
    """Prints the value, which it returns; with ``seconds`` it watches, and ends the command."""
    if seconds:
        watch(read, print_, seconds)
        sys.exit(0)
    value = read()
    print_(value)
    return value


def watch(read: Callable[[], _Value], print_: Callable[[_Value], None], seconds: float) -> None:
    """On a terminal in place; elsewhere one output after the other, where they differ."""
    last = None
    try:
        while True:
            value = read()
            if value != last:
                if sys.stdout.isatty():
                    click.echo(_CLEAR, nl=False)
                print_(value)
                sys.stdout.flush()
            last = value
            time.sleep(seconds)
    except KeyboardInterrupt:
        return
