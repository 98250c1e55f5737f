# SPDX-License-Identifier: Apache-2.0
"""``ebpflb maps dump``: the content of every map."""

from pathlib import Path

import click

from ebpflb.cli import common
from ebpflb.cli.output import (
    Output,
    Row,
    list_option,
    print_as,
    print_list,
    print_none_found,
    print_table,
)
from ebpflb.entries.services import service_of
from ebpflb.kernel.maps.records import BackendCounters, ServiceCounters
from ebpflb.tools import pins
from ebpflb.tools.dump import ROWS, Dump, dump_maps
from ebpflb.tools.snapshot import require_service

CHANGED = "warning: the agent changed the maps during the dump; rows may not fit together"


@click.group()
def maps() -> None:
    """Inspect the maps in the kernel.

    \b
    $ ebpflb maps dump
    $ ebpflb maps dump verdicts
    $ ebpflb maps dump --service shop/cart
    """


@maps.command()
@click.argument("names", metavar="[MAP]...", nargs=-1, type=click.Choice(list(ROWS)))
@click.option("--all", "every", is_flag=True, help="The entries of all maps.")
@common.service
@common.state_dir
@list_option
def dump(
    names: tuple[str, ...],
    every: bool,
    service: tuple[str, str] | None,
    state_dir: Path,
    output: Output,
) -> None:
    """Print the entries of maps, with names instead of ids and with counters.

    Without MAP, --all and --service: how many entries each map has. With --service alone: the
    entries of that Service in every map.

    Reads the pinned maps; no agent has to run. "translations" are the elements of netfilter's
    table: the endpoint of each backend id.

    \b
    $ ebpflb maps dump verdicts
    $ ebpflb maps dump services slots --service shop/cart
    $ ebpflb maps dump --all -o json
    """
    common.require_capabilities()
    with pins.pinned_maps(state_dir) as pinned:
        if service:
            require_service(pinned, "/".join(service))
        dumped = dump_maps(pinned, names)
    if service:
        dumped = _of_service(dumped, "/".join(service))
    print_ = _print if names or every or service else _print_counts
    print_(dumped, output)


def _of_service(dumped: Dump, service: str) -> Dump:
    """Return the rows that name a port of this Service."""
    maps = {
        name: [row for row in rows if service_of(row.get("service", "")) == service]
        for name, rows in dumped.maps.items()
    }
    return dumped._replace(maps=maps)


def _print_counts(dumped: Dump, output: Output) -> None:
    """Print how many entries each map has."""
    rows = [{"map": name, "entries": len(rows)} for name, rows in dumped.maps.items() if rows]
    notes = [CHANGED] if dumped.changed_while_reading else []
    print_list(rows, output, notes=notes, what="entries")
    if output.has_sentences:
        click.echo("`ebpflb maps dump MAP` prints the entries of a map, --all prints all", err=True)


def _print(dumped: Dump, output: Output) -> None:
    """Print a table for each map that has entries; if there are several maps, each row names its
    map.
    """
    if output.is_data:
        items = [{"map": name} | row for name, rows in dumped.maps.items() for row in rows]
        notes = [CHANGED] if dumped.changed_while_reading else []
        print_as(output, {"items": items, "notes": notes})
        return
    tables = {name: rows for name, rows in dumped.maps.items() if rows}
    for number, (name, rows) in enumerate(tables.items()):
        first = {"map": name} if len(dumped.maps) > 1 else {}
        if number:
            click.echo()
        print_table([first | _columns(row, output) for row in rows], output)
    if not tables:
        print_none_found("entries")
    if dumped.changed_while_reading:
        click.echo(CHANGED, err=True)


_COUNTERS = {*ServiceCounters._fields, *BackendCounters._fields, "open"}


def _columns(row: Row, output: Output) -> dict[str, object]:
    """Return the columns, without counters unless all are wanted."""
    return {key: it for key, it in row.items() if output.is_wide or key not in _COUNTERS}
