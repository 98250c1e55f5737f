# SPDX-License-Identifier: Apache-2.0
"""``ebpflb explain``: why a connection goes where it goes."""

import sys

import click

from ebpflb.cli import common
from ebpflb.cli.output import Output, limit_option, output_option, percent, print_as, print_table
from ebpflb.entries.services import Frontend
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.options import Paths
from ebpflb.tools.explain import answer
from ebpflb.tools.explain.answer import Explained
from ebpflb.tools.explain.asking import NamedService, parse_question


@click.command("explain")
@click.argument(
    "to",
    metavar="ADDRESS:PORT|NAMESPACE/NAME[:PORT]",
    callback=common.parsed(parse_question),
)
@click.option(
    "--from",
    "sender",
    metavar="CLIENT",
    default="node",
    show_default=True,
    help="The client: a pod (NAME or NAMESPACE/NAME), an address, node, or outside.",
)
@click.option(
    "--from-port",
    type=click.IntRange(1, 65535),
    help="The client's port; with it the endpoint of a packet is exact.  [default: any]",
)
@limit_option
@common.agents_paths
@output_option("wide", "json", "yaml")
def explain(
    to: Frontend | NamedService,
    sender: str,
    from_port: int | None,
    limit: int | None,
    paths: Paths,
    output: Output,
) -> None:
    """Explain why a connection goes where it goes, step by step.

    The destination is an address and port, with /udp or /sctp for other protocols than TCP, or a
    Service: NAMESPACE/NAME[:PORT], or its DNS name such as web.default.svc:80.

    Asks the programs and the pinned maps themselves; nothing is sent, nothing changes, and no agent
    has to run.

    Exit status: 0 if an endpoint gets it, 3 if its destination is no service, 4 if it is refused,
    5 if it is dropped, 1 if that cannot be found out, 2 for wrong usage.

    \b
    $ ebpflb explain shop/cart:http
    $ ebpflb explain 10.96.0.10:53/udp --from shop/web-1
    $ ebpflb explain 192.0.2.1:30080 --from outside
    """
    found = answer.explain(StateDir(paths.state), paths.cache, to, sender, from_port)
    found.notes += answer.agents_notes(paths, found)
    if output.is_data:
        print_as(output, found.as_data())
    else:
        _print_tables(found, output.most_rows(limit), output)
    for note in found.notes:
        click.echo(f"note: {note}", err=True)
    sys.exit(found.status)


def _print_tables(explained: Explained, most: int, output: Output) -> None:
    """Print two tables: the steps, the last of which is the verdict, and the endpoints."""
    print_table([*explained.steps()], output)
    if shares := explained.shares:
        click.echo()
        shown = [{**it._asdict(), "chance": percent(it.chance, 1)} for it in shares[:most]]
        print_table(shown, output)
        if len(shares) > most:
            click.echo(f"{len(shares) - most} more endpoints: --limit 0 shows all", err=True)
