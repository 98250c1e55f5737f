# SPDX-License-Identifier: Apache-2.0
"""Rows and values as a table, JSON or YAML: rich draws, msgspec and PyYAML write."""

from typing import Any

import click
import msgspec
import yaml
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDE = 4096  # a row stays one line, whatever the terminal: grep works, and nothing is cut


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
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, value in rows[0].items():
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        drawn.add_column(name.replace("_", " "), justify="right" if numeric else "left")
    for row in rows:
        drawn.add_row(*(Text(_text(value)) for value in row.values()))
    console = Console(width=_WIDE)
    with console.capture() as captured:
        console.print(drawn)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    return "\n".join(f"  {line}" for line in lines if line)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
