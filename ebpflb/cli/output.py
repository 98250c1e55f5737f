# SPDX-License-Identifier: Apache-2.0
"""How every command prints, in the style of kubectl.

A table has a line for each row, upper-case headings, columns that are as wide as their content and
two blanks apart. Nothing is cut. ``-o`` prints the same as data.

Control characters, which a name in a map or manifest may hold, are escaped.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from ebpflb.errors import escaped

if TYPE_CHECKING:
    from ebpflb.tools.node_checks import CheckResult

Row = Mapping[str, Any]  # the name of a column -> its cell
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_GAP = "  "
_NONE = "<none>"  # an empty cell, so that `awk` counts the columns right
TABLE_ROWS = 100  # on a terminal, unless --limit says more
_NUMBER = re.compile(r"(\d+(\.\d+)?( ?(%|[nµm]?s|min|h|d))?|[-?])?")


class Output(NamedTuple):
    """The chosen output: ``-o`` and ``--no-headers``."""

    form: str = "table"  # or wide, json, yaml
    headers: bool = True

    @property
    def is_data(self) -> bool:
        """Whether the output is JSON or YAML."""
        return self.form in ("json", "yaml")

    @property
    def is_wide(self) -> bool:
        return self.form == "wide"

    @property
    def is_whole(self) -> bool:
        """Whether rows have all columns."""
        return self.is_wide or self.is_data

    def most_rows(self, limit: int | None) -> int:
        """Return how many rows --limit allows; without it only a terminal's table is limited."""
        if limit is None and sys.stdout.isatty() and not self.is_data:
            return TABLE_ROWS
        return limit or sys.maxsize

    @property
    def has_sentences(self) -> bool:
        """Whether sentences stand below the table; -o wide and --no-headers print rows only."""
        return self.form == "table" and self.headers


def output_option(*forms: str, more: str = "") -> Decorator:
    """Return ``-o`` with these forms and "table"; ``more`` is the end of its help.

    A command with the form "wide" prints tables, so it gets ``--no-headers`` too. The command's
    argument ``output`` has both.
    """
    choice = click.option(
        "-o",
        "--output",
        type=click.Choice(("table", *forms)),
        default="table",
        show_default=True,
        callback=lambda context, _, form: Output(form, not context.meta.get(_NO_HEADERS)),
        help=f"Output format{more}.",
    )
    return lambda command: choice(_no_headers(command) if "wide" in forms else command)


_NO_HEADERS = "ebpflb.no_headers"
_no_headers = click.option(
    "--no-headers",
    is_flag=True,
    is_eager=True,  # before -o, which takes its value
    expose_value=False,
    callback=lambda context, _, given: context.meta.update({_NO_HEADERS: given}),
    help="Print only the rows of tables: no headings, and no sentences below.",
)
data_option = output_option("json", "yaml")
list_option = output_option("wide", "json", "yaml")


limit_option = click.option(
    "--limit",
    type=click.IntRange(min=0),
    help=f"The most rows; 0 means all.  [default: {TABLE_ROWS} of a table on a terminal, else all]",
)


def print_row_as(output: Output, row: Any) -> None:
    """Print one of many rows as a line of JSON, or a document of YAML."""
    if output.form == "yaml":
        click.echo("---")
        print_as(output, row)
    else:
        click.echo(msgspec.json.encode(row))


def print_as(output: Output, value: Any) -> None:
    """Print a value as JSON or YAML."""
    if output.form == "yaml":
        import yaml  # takes as long to import as click

        click.echo(yaml.safe_dump(msgspec.to_builtins(value), sort_keys=False), nl=False)
    else:
        click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_none_found(what: str = "Services") -> None:
    """Say on stderr that a list is empty."""
    click.echo(f"No {what} found", err=True)


def print_list(
    rows: Sequence[Row],
    output: Output,
    *,
    data: Iterable[Any] | None = None,
    notes: Iterable[str] = (),
    what: str = "Services",
) -> None:
    """Print a list as ``output`` asks: JSON or YAML, or a table of the rows.

    JSON has ``data``, which uses the same words as the rows, or the rows themselves. A table has
    the notes on stderr, and a sentence there if there is no row, as with kubectl.
    """
    if output.is_data:
        print_as(output, {"items": [*(rows if data is None else data)], "notes": [*notes]})
        return
    print_table(rows, output)
    if not rows:
        print_none_found(what)
    for note in notes:
        click.echo(escaped(note), err=True)


def print_table(rows: Sequence[Row], output: Output) -> None:
    """Print rows, which have the same keys; each key is a column."""
    if lines := [*table_lines(rows, headers=output.headers)]:
        click.echo("\n".join(lines))


def table_lines(
    rows: Sequence[Row], *, headers: bool = True, least: Mapping[str, int] | None = None
) -> Iterator[str]:
    """Yield the lines of a table; none without rows.

    ``least`` has the minimum widths of columns, for rows that come one by one.
    """
    if not rows:
        return
    cells = [[cell(value) for value in row.values()] for row in rows]
    right = [any(it) and all(map(_NUMBER.fullmatch, it)) for it in zip(*cells, strict=True)]
    if headers:
        cells.insert(0, [name.replace("_", "-").upper() for name in rows[0]])
    cells = [[*(text or _NONE for text in row[:-1]), row[-1]] for row in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if least:
        widths = [max(w, least.get(name, 0)) for w, name in zip(widths, rows[0], strict=True)]
    for row in cells:
        yield _GAP.join(map(_aligned, row, widths, right)).rstrip()


def _aligned(text: str, width: int, to_right: bool) -> str:
    return text.rjust(width) if to_right else text.ljust(width)


def cell(value: Any) -> str:
    """Return a value as the text of a cell."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ",".join(map(cell, value))
    return "" if value is None else escaped(str(value))


# The results of `ebpflb check` and `ebpflb doctor`.


def print_results(results: "Sequence[CheckResult]", output: Output, lacking: str) -> None:
    """Print a table, and below it what to do about each result that is not ok.

    ``lacking`` is the word for the result "wrong".
    """
    if not (results or output.is_data):
        return
    rows = [_result_row(each, lacking, output) for each in results]
    print_list(rows, output)
    if output.has_sentences:
        for each in results:
            if each.remedy:
                click.echo(f"\n{each.feature}: {escaped(each.detail)}\n  {escaped(each.remedy)}")


def _result_row(result: "CheckResult", lacking: str, output: Output) -> Row:
    word = lacking if result.result == "wrong" else result.result
    more = {"what_to_do": result.remedy} if output.is_whole else {}
    return {"result": word, "check": result.feature, **more, "found": result.detail}


def microseconds(nanoseconds: int) -> str:
    return f"{nanoseconds / 1000:.1f} µs"


def percent(share: float, digits: int) -> str:
    """Return a percentage with ``digits`` decimals; below one percent with two significant digits,
    such as 0.010%.
    """
    return f"{share:.{digits}%}" if share >= 0.01 or not share else f"{100 * share:#.2g}%"
