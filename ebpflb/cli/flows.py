# SPDX-License-Identifier: Apache-2.0
"""``ebpflb flows``: lists and deletes the flows of the packet path."""

from pathlib import Path
from typing import Any

import click

from ebpflb.cli import common
from ebpflb.cli.output import (
    Output,
    list_option,
    print_as,
    print_names,
    print_none_found,
    print_table,
    show,
    watch_option,
)
from ebpflb.model.addresses import Address, parse_address
from ebpflb.tools import pins
from ebpflb.tools.flow_list import (
    FlowFilter,
    check_service,
    flush_connections,
    flush_flows,
    list_connections,
    list_flows,
)

_NARROW = ("protocol", "state", "client", "frontend", "backend")


def _service(_context: object, _option: object, text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    namespace, _, name = text.partition("/")
    if not namespace or not name or "/" in name:
        raise click.BadParameter(f'"{text}" is not NAMESPACE/NAME such as default/web')
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
    """List and delete the flows whose packets are translated.

    Reads the pinned maps and the kernel's conntrack; no agent has to run. Of conntrack's entries,
    those that are translated and lead to an address and port of a service are flows. Connections
    that were translated at their socket are not among the flows: their packets carry the backend's
    address from the start.
    """


@flows.command("list")
@service
@client
@watch_option
@common.state_dir
@list_option
def list_(
    service: tuple[str, str] | None,
    client: Address | None,
    watch: float | None,
    state_dir: Path,
    output: Output,
) -> None:
    """Print a row for each flow.

    -o wide adds service, pod, node, masquerading, the packets of replies, age and engine.
    """
    common.require_capabilities()
    only = FlowFilter(service, client)
    show(lambda: _read(state_dir, only), lambda rows: _print(rows, output), watch)


def _read(state_dir: Path, only: FlowFilter) -> list[dict[str, Any]]:
    with pins.pinned_maps(state_dir) as maps:
        check_service(maps, only)
        rows = [*list_flows(maps, only), *list_connections(maps, only)]
    return sorted(rows, key=lambda row: (row["service"], row["client"], row["frontend"]))


def _print(rows: list[dict[str, Any]], output: Output) -> None:
    if output.is_data:
        print_as(output, rows)
    elif output.form == "name":
        print_names(f"{row['client']}->{row['frontend']}/{row['protocol']}" for row in rows)
    elif output.is_wide:
        print_table(rows, output)
    else:
        print_table([{name: row[name] for name in _NARROW} for row in rows], output)
    if not rows and not output.is_data:
        print_none_found("flows")


@flows.command()
@service
@client
@common.state_dir
def flush(service: tuple[str, str] | None, client: Address | None, state_dir: Path) -> None:
    """Delete all flows, or those of a service or a client, without a confirmation.

    A TCP connection breaks when its flow is deleted; the next UDP datagram opens a new flow.
    """
    common.require_capabilities()
    with pins.pinned_maps(state_dir) as maps:
        only = FlowFilter(service, client)
        check_service(maps, only)
        parts = (flush_flows(maps, only), flush_connections(maps, only))
    flows, entries = map(sum, zip(*parts, strict=True))
    click.echo(f"flows flushed: {flows} ({entries} entries)")
