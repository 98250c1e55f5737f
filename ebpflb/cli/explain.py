# SPDX-License-Identifier: Apache-2.0
"""``ebpflb explain``: why a connection goes where it goes."""

import sys
from pathlib import Path
from typing import Any

import click
from tabulate import tabulate

from ebpflb.cli import common
from ebpflb.cli.output import percent, print_as
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.plan.entries import Frontend
from ebpflb.tools import pins
from ebpflb.tools.explain.answer import Explained, explain
from ebpflb.tools.explain.asking import parse_question

PAGE = 20  # endpoints
_WIDTHS = [9, 42, 23]  # of the columns: 80 in all
# The same of those of endpoints; one that is empty is left out.
_ENDPOINTS = {"chance": 6, "endpoint": 21, "pod": 11, "node": 8, "zone": 8, "slots": 6, "": 8}


class _Question(click.ParamType):  # type: ignore[type-arg]
    name = "ADDRESS:PORT[/PROTOCOL]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Frontend:
        try:
            return parse_question(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command("explain")
@click.argument("to", metavar="ADDRESS:PORT[/tcp|udp|sctp]", type=_Question())
@click.option(
    "--from",
    "sender",
    metavar="CLIENT",
    default="node",
    show_default=True,
    help="The client: a pod (NAME or NAMESPACE/NAME), an address, a network namespace (name or "
    "path),"
    " a PID, node, or outside.",
)
@click.option(
    "--from-port",
    type=click.IntRange(1, 65535),
    help="The client's port; with it the endpoint of a packet is exact.  [default: any]",
)
@click.option(
    "--page", type=click.IntRange(1), default=1, help=f"Which {PAGE} of the endpoints to list."
)
@common.state_dir
@common.run_dir
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "wide", "json", "yaml"]),
    default="table",
    show_default=True,
    help="Output format: a table of 80 columns, one without line breaks, or data.",
)
def explain_(
    to: Frontend,
    sender: str,
    from_port: int | None,
    page: int,
    state_dir: Path,
    run_dir: Path | None,
    output: str,
) -> None:
    """Explain why a connection goes where it goes, step by step.

    Asks the programs and the pinned maps themselves; nothing is sent, nothing changes, and no agent
    has to run. Each step names the row of the map that it comes from.

    Exit status: 0 if an endpoint gets it, 3 if it is to no service, 4 if it is refused, 5 if it is
    dropped, 1 if that cannot be found out, 2 for wrong usage.
    """
    common.require_capabilities()
    paths = pins.paths(state_dir, run_dir)
    explained = explain(StateDir(paths.state), paths.cache, to, sender, from_port)
    if output in ("json", "yaml"):
        print_as(output, explained.as_data())
    else:
        click.echo(as_text(explained, page, wide=output == "wide"))
    for note in explained.notes:
        click.echo(f"note: {note}", err=True)
    sys.exit(explained.status)


def as_text(explained: Explained, page: int, *, wide: bool) -> str:
    """The answer as a table."""
    heading = f"{explained.asked}/{explained.protocol} from {explained.client}"
    rows = [
        (row.step, row.says, f"{row.map} {row.row}" if row.map else "") for row in explained.rows
    ]
    rows.append(("verdict", f"{explained.verdict}: {explained.says}", ""))
    parts = [heading, _table(rows, ["step", "what", "map, row"], _WIDTHS, wide=wide)]
    if explained.shares:
        parts.append(_endpoints(explained, page, wide=wide))
    return "\n\n".join(parts)


def _endpoints(explained: Explained, page: int, *, wide: bool) -> str:
    shares, first = explained.shares, (page - 1) * PAGE
    rows = [
        {
            "chance": percent(it.chance, 1),
            "endpoint": it.endpoint,
            "pod": it.pod,
            "node": it.node,
            "zone": it.zone,
            "slots": str(it.slot),
            "": it.note,
        }
        for it in shares[first : first + PAGE]
    ]
    heads = [name for name in _ENDPOINTS if any(row[name] for row in rows)]
    widths, shown = [_ENDPOINTS[name] for name in heads], [[row[n] for n in heads] for row in rows]
    table = _table(shown, heads, widths, wide=wide) if rows else "no such page"
    pages = -(-len(shares) // PAGE)
    more = f"\n\npage {page} of {pages}, {len(shares)} endpoints: --page" if pages > 1 else ""
    return table + more


def _table(rows: list[Any], heads: list[str], widths: list[int], *, wide: bool) -> str:
    table = tabulate(
        rows,
        heads,
        tablefmt="plain" if wide else "simple",
        maxcolwidths=None if wide else widths,
        disable_numparse=True,
    )
    return "\n".join(line.rstrip() for line in table.splitlines())
