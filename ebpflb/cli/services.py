# SPDX-License-Identifier: Apache-2.0
"""``ebpflb services``: which parts of a Service are served, and why the others are not."""

import sys
from collections.abc import Iterator

import click

from ebpflb.cli import common
from ebpflb.cli.output import (
    Output,
    Row,
    limit_option,
    list_option,
    percent,
    print_as,
    print_list,
    print_table,
)
from ebpflb.errors import escaped
from ebpflb.model.annotations import KEEP, RANDOM
from ebpflb.options import Paths
from ebpflb.serve import service_page
from ebpflb.tools import ask

# The tables of ``ebpflb services``.


def show_list(found: service_page.ServiceList, output: Output) -> None:
    """Print a row for each Service, and on stderr the facts that are unknown."""
    rows = [_list_row(row, output.is_wide) for row in found.services]
    notes, data = _more(found.more) + found.notes, found.services
    print_list(rows, output, data=data, notes=notes)


def _list_row(row: service_page.ServiceRow, wide: bool) -> Row:
    addresses = row.addresses if wide else row.addresses[:1]
    cells: dict[str, object] = {
        "service": row.service,
        "addresses": addresses,
        "ports": row.ports,
        "used": row.used,
        "unused": row.unused,
        "open": row.open,
        "opened": row.opened,
    }
    if wide:
        cells["policies"] = row.policies
    return {**cells, "problems": _problems(row.problems)}


def _problems(problems: list[str]) -> str:
    """Return each reason once, followed by its frontends."""
    places: dict[str, list[str]] = {}
    for problem in problems:
        place, _, reason = problem.partition(": ")
        places.setdefault(reason, []).append(place)
    return "; ".join(f"{reason} ({', '.join(each)})" for reason, each in places.items())


def show_page(page: service_page.ServicePage, output: Output, limit: int) -> None:
    """Print the frontends and the endpoints; at most ``limit`` rows of used and of unused
    endpoints.
    """
    if output.is_data:
        print_as(output, page)
        return
    print_table([*_frontends(page, output.is_wide)], output)
    rows = [(port.port, row) for port in page.ports for row in port.endpoints]
    rows += [(row.port, _unused(row)) for row in page.left_out]
    used = [each for each in rows if each[1].state == service_page.USED]
    unused = [each for each in rows if each[1].state != service_page.USED]
    shown = [*used[:limit], *unused[:limit]]
    if shown:
        click.echo()
        local = output.is_wide or any(row.local_share is not None for _, row in shown)
        cells = [_endpoint(*it, local=local, wide=output.is_wide) for it in shown]
        print_table(cells, output)
    problems = [f"{port.port}: {port.problem}" for port in page.ports if port.problem]
    for note in (*_more(len(rows) - len(shown)), *problems, *page.notes):
        click.echo(escaped(note), err=True)


def _more(number: int) -> list[str]:
    return [f"... and {number} more: --limit 0 shows all"] if number else []


def _frontends(page: service_page.ServicePage, wide: bool) -> Iterator[Row]:
    sticky = wide or any(port.affinity_seconds for port in page.ports)
    scheduled = wide or any(port.scheduler != RANDOM for port in page.ports)
    resets = wide or any(port.on_removal != KEEP for port in page.ports)
    for port in page.ports:
        for row in port.frontends:
            cells: dict[str, object] = {
                "service": page.service,
                "port": _short(port.port),
                "kind": row.kind,
                "frontend": row.frontend,
                "policy": row.policy,
            }
            if sticky:
                cells["affinity_seconds"] = port.affinity_seconds
            if scheduled:
                cells["scheduler"] = port.scheduler
            if resets:
                cells["on_removal"] = port.on_removal
            cells["endpoints"] = row.endpoints
            yield {**cells, **(port.counters if wide else {}), "problem": row.problem}


def _unused(row: service_page.LeftOutRow) -> service_page.EndpointRow:
    reason = f"{row.reason} (slice {row.slice})"
    return service_page.EndpointRow(
        row.endpoint, row.node, row.pod, service_page.UNUSED, reason=reason
    )


def _endpoint(port: str, row: service_page.EndpointRow, *, local: bool, wide: bool) -> Row:
    """Return the row of an endpoint; ``local``: with the shares under policy Local."""
    reason = row.reason
    if row.state != service_page.USED:
        reason = reason or "no new connections; the reason is unknown"
        reason += f"; {row.open} connections still open" if row.open else ""
    cells: dict[str, object] = {
        "port": _short(port),
        "endpoint": row.endpoint,
        "pod": row.pod,
        "node": row.node,
        "share": _percent(row.share),
    }
    if local:
        cells["local_share"] = _percent(row.local_share)
    cells |= {"open": row.open, "opened": row.opened}
    if wide:
        cells |= {"id": row.id or "", "not_local": row.not_local}
    return {**cells, "reason": reason}


def _short(port: str) -> str:
    """Return the port's name and protocol, without the Service's names."""
    name, _, protocol = port.rpartition("/")
    return f"{name.partition(':')[2]}/{protocol}".lstrip("/")


def _percent(share: float | None) -> str:
    return "-" if share is None else percent(share, 0 if share >= 0.1 else 1)


NOT_SERVED = 3  # exit status: a frontend serves nothing, or something does not fit


@click.group()
def services() -> None:
    """Show Services as this node serves them.

    The running agent answers over a socket in its run directory, only to root. Without an agent
    `ebpflb maps dump` shows what the maps hold.

    \b
    $ ebpflb services list
    $ ebpflb services list -n shop 'web-*'
    $ ebpflb services get shop/cart
    """


@services.command("list")
@click.argument("patterns", metavar="[NAME|NAMESPACE/NAME]...", nargs=-1)
@common.namespace
@limit_option
@common.agents_paths
@list_option
def list_(
    patterns: tuple[str, ...], namespace: str, limit: int | None, paths: Paths, output: Output
) -> None:
    """Print a row for each Service, of all namespaces.

    Names may be patterns, such as 'web-*' or 'shop/*'.

    \b
    $ ebpflb services list
    $ ebpflb services list -n shop 'web-*' -o wide
    $ ebpflb services list 'shop/*' -o json
    """
    names = tuple(
        name if "/" in name else f"{namespace or '*'}/{name}" for name in patterns or ("*",)
    )
    show_list(ask.services(paths, names, output.most_rows(limit)), output)


@services.command()
@click.argument("service", metavar="NAMESPACE/NAME", callback=common.parsed(common.parse_service))
@limit_option
@common.agents_paths
@list_option
def get(service: tuple[str, str], limit: int | None, paths: Paths, output: Output) -> None:
    """Print one Service: frontends, endpoints with their share, and why other endpoints are unused.

    A share is the chance of a new connection. Exit status 0 if every frontend leads to an endpoint,
    3 if one does not, or if something does not fit into the maps, 1 if there is no such Service.

    \b
    $ ebpflb services get shop/cart
    $ ebpflb services get shop/cart -o wide
    $ ebpflb services get shop/cart -o json
    """
    found = ask.service(paths, *service)
    show_page(found, output, output.most_rows(limit))
    sys.exit(NOT_SERVED if found.problems else 0)
