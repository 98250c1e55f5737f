# SPDX-License-Identifier: Apache-2.0
"""``--output``: values as a table, JSON or YAML. A row of a table is one line, fit for grep."""

from typing import Any

import click
import msgspec
import yaml
from tabulate import tabulate

output_option = click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json", "yaml"]),
    default="table",
    show_default=True,
    help="Output format.",
)


def print_as(output: str, value: Any) -> None:
    """Prints a value as "json" or "yaml"."""
    if output == "yaml":
        click.echo(yaml.safe_dump(msgspec.to_builtins(value), sort_keys=False), nl=False)
    else:
        click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    """Prints rows, which have the same keys, with a column for each key."""
    click.echo(f"{title}\n{_table(rows) if rows else '  no entries'}\n")


def _table(rows: list[dict[str, Any]]) -> str:
    heads = [name.replace("_", " ") for name in rows[0]]
    sides = ["right" if _is_number(value) else "left" for value in rows[0].values()]
    cells = [[_text(value) for value in row.values()] for row in rows]
    table = tabulate(cells, heads, tablefmt="simple", colalign=sides, disable_numparse=True)
    return "\n".join(f"  {line}".rstrip() for line in table.splitlines())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)
