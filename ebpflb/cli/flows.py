# SPDX-License-Identifier: Apache-2.0
"""``ebpflb flows``: what goes through the packet path now, and how to end it."""

from pathlib import Path

import click

from ebpflb.cli import common
from ebpflb.cli.output import show, table
from ebpflb.diagnose import flow_list as finding
from ebpflb.diagnose.flow_list import Choice
from ebpflb.model.addresses import Address, parse_address


def _service(_context: object, _option: object, text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    namespace, _, name = text.partition("/")
    if not namespace or not name or "/" in name:
        raise click.BadParameter(f'"{text}" is not NAMESPACE/NAME')
    return namespace, name


def _client(_context: object, _option: object, text: str | None) -> Address | None:
    try:
        return None if text is None else parse_address(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


service = click.option(
    "--service",
    metavar="NAMESPACE/NAME",
    callback=_service,
    help="Only the flows of this service.",
)
client = click.option(
    "--client",
    metavar="ADDRESS",
    callback=_client,
    help="Only the flows of this client.",
)


@click.group()
def flows() -> None:
    """Look at the flows whose packets are translated, and end them.

    Reads the pins alone: no agent need run. Connections that are translated at their socket are
    not among them: those are made to the backend, and need no translation afterwards.
    """


@flows.command("list")
@service
@client
@common.state_dir
@common.output
def list_(
    service: tuple[str, str] | None, client: Address | None, state_dir: Path, output: str
) -> None:
    """Print a row for each flow."""
    common.need_rights()
    with common.pinned_maps(state_dir) as maps:
        rows = finding.listed(maps, Choice(service, client))
    if output == "table":
        table("flows", rows)
    else:
        show(rows, output)


@flows.command()
@service
@client
@common.state_dir
def flush(service: tuple[str, str] | None, client: Address | None, state_dir: Path) -> None:
    """Delete flows without asking: all of them, or those of a service or a client.

    A connection breaks with its flow; the next datagram begins a new one.
    """
    common.need_rights()
    with common.pinned_maps(state_dir) as maps:
        flushed = finding.flush(maps, Choice(service, client))
    click.echo(f"flows flushed: {flushed.flows} ({flushed.entries} entries)")
