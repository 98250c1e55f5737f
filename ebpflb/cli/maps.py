# SPDX-License-Identifier: Apache-2.0
"""``ebpflb maps dump``: the content of every map."""

from pathlib import Path

import click

from ebpflb.cli import common
from ebpflb.cli.history import time_option
from ebpflb.cli.output import WIDE, print_as, print_first_columns, wide_output_option
from ebpflb.history.past import Past
from ebpflb.tools import pins
from ebpflb.tools.dump import ROWS, dump_maps, past_maps

CHANGED = "warning: the agent changed the maps during the dump; rows may not fit together"


@click.group()
def maps() -> None:
    """Inspect the maps in the kernel."""


@maps.command()
@click.argument("names", metavar="[MAP]...", nargs=-1, type=click.Choice(list(ROWS)))
@click.option(
    "--at",
    metavar="TIME",
    callback=time_option,
    help="Show the maps as they were at a time, such as 14:03, 2026-11-22T14:03:10 or 10m (ago); "
    "only maps that the agent writes, and no counters.",
)
@common.state_dir
@common.run_dir
@wide_output_option
def dump(
    names: tuple[str, ...], at: float | None, state_dir: Path, run_dir: Path | None, output: str
) -> None:
    """Print all maps, or those named, with names instead of ids and with counters.

    Reads the pinned maps; no agent has to run. "conntrack" is the kernel's own table: its entries
    that lead to an address and port of a service. "translations" are the elements of netfilter's
    table: the endpoint of each backend id.
    """
    common.require_capabilities()
    if at is None:
        with pins.pinned_maps(state_dir) as pinned:
            dumped = dump_maps(pinned, names)
    else:
        past = Past(pins.paths(state_dir, run_dir))
        dumped = past_maps(past, at, names)
        for note in past.notes:
            click.echo(f"history: {note}", err=True)
    if output in ("json", "yaml"):
        print_as(output, dumped._asdict())
        return
    for name, rows in dumped.maps.items():
        print_first_columns(name, rows, wide=output == WIDE)
    if dumped.changed_while_reading:
        click.echo(CHANGED, err=True)
