# SPDX-License-Identifier: Apache-2.0
"""``ebpflb maps dump``: every map, names joined to numbers."""

from pathlib import Path

import click

from ebpflb.cli import common
from ebpflb.cli.output import show, table
from ebpflb.diagnose import dump as dumping

CHANGED = "the agent wrote while this was read: rows may be from before and after"


@click.group()
def maps() -> None:
    """Look into the maps in the kernel."""


@maps.command()
@click.argument("names", metavar="[MAP]...", nargs=-1, type=click.Choice(list(dumping.ROWS)))
@common.state_dir
@common.output
def dump(names: tuple[str, ...], state_dir: Path, output: str) -> None:
    """Print the maps, with names for numbers and live counters beside each row.

    Reads the pins alone: no agent need run.
    """
    common.need_rights()
    with common.pinned_maps(state_dir) as pinned:
        found = dumping.dump(pinned, names)
    if output != "table":
        show(found._asdict(), output)
        return
    for name, rows in found.maps.items():
        table(name, rows)
    if found.changed_while_reading:
        click.echo(CHANGED, err=True)
