# SPDX-License-Identifier: Apache-2.0
"""``ebpflb top``: services and backends by rate."""

import shutil
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import click

from ebpflb.cli import common
from ebpflb.cli.output import (
    Output,
    print_none_found,
    print_row_as,
    print_table,
    stream_option,
)
from ebpflb.tools import pins, rates
from ebpflb.tools.rates import Rate

_AROUND = 3  # lines of a screen that are no rows
ALL = "all"  # of the endpoints and pods of a service


@click.command()
@click.option("--once", is_flag=True, help="Print one table and end; always if not to a terminal.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    help="Seconds in which connections are counted for a rate.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=None,
    help="Rows at most; 0 means all.  [default: those that a terminal shows, elsewhere all]",
)
@common.namespace
@common.state_dir
@stream_option("an object a line, for each service port and backend")
def top(
    once: bool,
    interval: float,
    limit: int | None,
    namespace: str,
    state_dir: Path,
    output: Output,
) -> None:
    """Show Services and their backends by new connections a second, the fastest first.

    Of a Service the connections of sockets and the flows of packets on this node are counted, of a
    backend those of sockets alone. Refreshed in place until Ctrl-C. No agent has to run.

    \b
    $ ebpflb top
    $ ebpflb top --once -n shop
    $ ebpflb top --once --interval 10 -o json
    """
    common.require_capabilities()
    is_live = sys.stdout.isatty() and not once
    ended_by_user = suppress(KeyboardInterrupt) if is_live else nullcontext()
    with pins.pinned_maps(state_dir) as maps, ended_by_user:
        after = rates.sample(maps)
        while True:
            time.sleep(interval)
            before, after = after, rates.sample(maps)
            every = rates.rates(maps, before, after)
            found = [row for row in every if common.is_in(namespace, row.service)]
            if is_live:
                click.clear()
            height = shutil.get_terminal_size().lines
            _show(found, output, output.most_rows(limit, max(1, height - _AROUND)))
            if not is_live:
                return


def _show(rows: list[Rate], output: Output, limit: int) -> None:
    table = [
        {
            "service": row.service,
            "endpoint": row.backend or ALL,
            "pod": row.pod if row.backend else ALL,
            "new": row.new,
            "refused": None if row.backend else row.refused,
            "open": row.open,
            **({"share": row.share} if output.is_whole else {}),
        }
        for row in rows[:limit]
    ]
    if output.is_data:
        for each in table:
            print_row_as(output, each)
        return
    print_table(table, output)
    if not rows:
        print_none_found()
    if len(rows) > limit:
        click.echo(f"{len(rows) - limit} more rows: --limit", err=not sys.stdout.isatty())
