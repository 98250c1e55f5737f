# SPDX-License-Identifier: Apache-2.0
"""Rows and values as a table, JSON or YAML; a row stays one line, so that grep works."""

from typing import Any

import click
import msgspec
import yaml
from tabulate import tabulate


def show(value: Any, output: str) -> None:
    """A value that is not a table, as JSON or YAML."""
    if output == "yaml":
        click.echo(yaml.safe_dump(msgspec.to_builtins(value), sort_keys=False), nl=False)
    else:
        click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def table(title: str, rows: list[dict[str, Any]]) -> None:
    """Rows of equal keys, a column each; numbers to the right."""
    click.echo(f"{title}\n  no entries\n" if not rows else f"{title}\n{_drawn(rows)}\n")


def _drawn(rows: list[dict[str, Any]]) -> str:
    heads = [name.replace("_", " ") for name in rows[0]]
    sides = ["right" if _is_number(value) else "left" for value in rows[0].values()]
    cells = [[_text(value) for value in row.values()] for row in rows]
    drawn = tabulate(cells, heads, tablefmt="simple", colalign=sides, disable_numparse=True)
    return "\n".join(f"  {line}".rstrip() for line in drawn.splitlines())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
