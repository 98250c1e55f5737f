# SPDX-License-Identifier: Apache-2.0
"""``ebpflb report``: one file with everything that somebody else needs to understand this node."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import IO

import click

from ebpflb import files
from ebpflb.cli import common
from ebpflb.options import Paths
from ebpflb.tools.report import Source, collect


@click.command()
@click.option(
    "--file",
    metavar="FILE",
    help="Where to write; - is stdout.  [default: ebpflb-report-TIME.tar.gz]",
)
@click.option(
    "--service",
    "services",
    metavar="NAMESPACE/NAME[:PORT]",
    multiple=True,
    help="Explain this Service; may be repeated.  [default: the first 10 ports]",
)
@click.option(
    "--no-names",
    is_flag=True,
    help="Replace the names of namespaces, Services, nodes and pods, and addresses.",
)
@click.option(
    "--key",
    help="With --no-names: the same key gives the same names, on other nodes too.  "
    "[default: random]",
)
@click.option(
    "--log",
    type=click.File("rb"),
    help="The agent's log; - is stdin.  [default: what systemd has of the unit ebpflb]",
)
@common.agents_paths
def report(
    file: str | None,
    services: tuple[str, ...],
    no_names: bool,
    key: str | None,
    log: IO[bytes] | None,
    paths: Paths,
) -> None:
    """Write one file with what somebody else needs to understand this node.

    Status, doctor, Services, explain, maps, the nft table, counts of flows, history, log, metrics,
    sysctls, versions, kernel and devices, as a tar.gz for root alone. Its README explains each
    file, and names those that could not be read. No agent has to run, nothing on the node changes.
    Secrets and the values of annotations are left out.

    \b
    $ ebpflb report
    $ ebpflb report --no-names --service shop/cart
    $ ebpflb report --log - --file /tmp/report.tar.gz
    """
    if file == "-" and sys.stdout.isatty():
        raise click.UsageError("--file -: the report is not written to a terminal")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends a started command, too
    secret = (key.encode() if key else os.urandom(32)) if no_names else None
    data, failed = collect(Source(paths, services, log), secret)
    name = file or f"ebpflb-report-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz"
    if name == "-":
        sys.stdout.buffer.write(data)
    else:
        files.replace(Path(name).absolute(), data)
        click.echo(f"{name}  ({len(data) / 1e6:.1f} MB)")
    if failed:
        click.echo(f"not read, see its README.md: {', '.join(failed)}", err=True)
