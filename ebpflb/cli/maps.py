# SPDX-License-Identifier: Apache-2.0
"""``ebpflb maps dump``: the content of every map."""

from pathlib import Path

import click

from ebpflb.cli import common
from ebpflb.cli.output import output_option, print_as, print_table
from ebpflb.diagnose.dump import ROWS, dump_maps

CHANGED = "warning: the agent changed the maps during the dump; rows may not fit together"


@click.group()
def maps() -> None:
    """Inspect the maps in the kernel."""


@maps.command()
@click.argument("names", metavar="[MAP]...", nargs=-1, type=click.Choice(list(ROWS)))
@common.state_dir
@output_option
def dump(names: tuple[str, ...], state_dir: Path, output: str) -> None:
    """Print all maps, or those named, with names instead of ids and with counters.

    Reads the pinned maps; no agent has to run. "conntrack" is the kernel's own table: its entries
    that lead to an address and port of a service.
    """
    common.require_capabilities()
    with common.pinned_maps(state_dir) as pinned:
        dumped = dump_maps(pinned, names)
    if output != "table":
        print_as(output, dumped._asdict())
        return
    for name, rows in dumped.maps.items():
        print_table(name, rows)
    if dumped.changed_while_reading:
        click.echo(CHANGED, err=True)
