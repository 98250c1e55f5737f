# SPDX-License-Identifier: Apache-2.0
"""``ebpflb flows``: list and delete the flows of the packet path."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ebpflb.cli import common
from ebpflb.cli.output import Output, list_option, print_list
from ebpflb.entries.flows import FlowState
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.model.addresses import Address, parse_address
from ebpflb.tools import flow_list, pins
from ebpflb.tools.snapshot import require_service

_NARROW = ("protocol", "state", "client", "frontend", "backend")


client = click.option(
    "--client",
    metavar="ADDRESS",
    callback=common.parsed(parse_address),
    help="Only the flows of this client.",
)


@click.group()
def flows() -> None:
    """List and delete the flows whose packets are translated.

    Reads the pinned maps and the kernel's conntrack; no agent has to run. An entry of conntrack is
    a flow if it is translated and was sent to an address and port of a service. Connections that
    were translated at their socket are not among the flows: their packets carry the backend's
    address from the start.

    \b
    $ ebpflb flows list --client 198.51.100.7
    $ ebpflb flows list --service shop/cart -o wide
    $ ebpflb flows flush --service shop/cart
    """


@flows.command("list")
@common.service
@client
@common.namespace
@click.option(
    "--state",
    "states",
    type=click.Choice([*map(str, FlowState), flow_list.PARTIAL]),
    multiple=True,
    help="Only flows in this state; may be repeated.",
)
@common.state_dir
@list_option
def list_(
    service: tuple[str, str] | None,
    client: Address | None,
    namespace: str,
    states: tuple[str, ...],
    state_dir: Path,
    output: Output,
) -> None:
    """Print a row for each flow.

    -o wide adds service, pod, node, masquerading, the packets of replies, age and engine.

    \b
    $ ebpflb flows list --service shop/cart -o wide
    $ ebpflb flows list --client 198.51.100.7
    $ ebpflb flows list --state opening
    """
    common.require_capabilities()
    found = _read(state_dir, flow_list.FlowFilter(service, client))
    found = [row for row in found if common.is_in(namespace, row["service"])]
    rows = [row for row in found if not states or row["state"] in states]
    shown = rows if output.is_whole else [{name: row[name] for name in _NARROW} for row in rows]
    print_list(shown, output, what="flows")


@contextmanager
def _maps(state_dir: Path, only: flow_list.FlowFilter) -> Iterator[dict[str, Map]]:
    """Open the maps. Raises NodeError, also if the chosen Service is unknown."""
    with pins.pinned_maps(state_dir) as maps:
        if only.service:
            require_service(maps, "/".join(only.service))
        yield maps


def _read(state_dir: Path, only: flow_list.FlowFilter) -> list[dict[str, Any]]:
    with _maps(state_dir, only) as maps:
        rows = [*flow_list.list_flows(maps, only), *flow_list.list_connections(maps, only)]
    return sorted(rows, key=lambda row: (row["service"], row["client"], row["frontend"]))


@flows.command()
@common.service
@client
@click.option("--all", "every", is_flag=True, help="All flows of this node.")
@common.state_dir
def flush(
    service: tuple[str, str] | None, client: Address | None, every: bool, state_dir: Path
) -> None:
    """Delete the flows of a service or of a client, or all of them, without a confirmation.

    A TCP connection breaks when its flow is deleted; the next UDP datagram opens a new flow.

    \b
    $ ebpflb flows flush --client 198.51.100.7
    $ ebpflb flows flush --service shop/cart
    $ ebpflb flows flush --all
    """
    if not (service or client or every):
        raise click.UsageError("choose flows by --service or --client, or all by --all")
    common.require_capabilities()
    only = flow_list.FlowFilter(service, client)
    with _maps(state_dir, only) as maps:
        parts = (flow_list.flush_flows(maps, only), flow_list.flush_connections(maps, only))
    flows, entries = map(sum, zip(*parts, strict=True))
    click.echo(f"flows flushed: {flows} ({entries} entries)")
