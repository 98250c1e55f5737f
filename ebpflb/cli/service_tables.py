# SPDX-License-Identifier: Apache-2.0
"""The tables of ``ebpflb services``."""

from collections.abc import Iterable, Iterator
from itertools import islice

import click

from ebpflb.cli.output import WIDE, percent, print_as, print_narrow_table
from ebpflb.diagnose.snapshot import Row
from ebpflb.errors import escaped
from ebpflb.model.on_removal import KEEP
from ebpflb.model.scheduler import RANDOM
from ebpflb.plan.service_page import (
    USED,
    EndpointRow,
    LeftOutRow,
    PortPage,
    ServiceList,
    ServicePage,
    ServiceRow,
)


def show_list(found: ServiceList, output: str) -> None:
    """Prints a row for each Service, and what is not known."""
    if output in ("json", "yaml"):
        print_as(output, found)
        return
    wide = output == WIDE
    rows = [_list_row(row, wide) for row in found.services]
    print_narrow_table("services", rows, wide=wide, whole=("service",))
    for note in (*_more(found.more), *found.notes):
        click.echo(note)


def _list_row(row: ServiceRow, wide: bool) -> Row:
    """An exclamation mark stands for problems, which the wide table has."""
    counts = {"open": _count(row.open), "opened": _count(row.opened)}
    numbers = {"used": row.used, "not_used": row.unused, **counts}
    ports = ",".join(row.ports)
    if wide:
        many = {"addresses": ",".join(row.addresses), "policies": ",".join(row.policies)}
        problems = {"problems": "; ".join(row.problems)}
        return {"service": row.service, "ports": ports, **numbers, **many, **problems}
    address = row.addresses[0] if row.addresses else "none"
    mark = {"": "!" if row.problems else ""}
    return {"service": row.service, "address": address, "ports": ports, **numbers, **mark}


def show_page(page: ServicePage, output: str, limit: int) -> None:
    """Prints three tables: frontends, what is used, and what is not; ``limit`` rows at most."""
    if output in ("json", "yaml"):
        print_as(output, page)
        return
    wide = output == WIDE
    click.echo(f"{escaped(page.service)}\n")
    whole = ("frontend", "problem", "scheduler", "on_removal")
    print_narrow_table("frontends", [*_frontends(page, wide)], wide=wide, whole=whole)
    used = [(port, row) for port in page.ports for row in port.endpoints if row.state == USED]
    unused = [(port, row) for port in page.ports for row in port.endpoints if row.state != USED]
    _table("endpoints", (_used(port, row, wide) for port, row in used), len(used), limit, wide)
    others = [_unused(port, row, wide) for port, row in islice(unused, limit)]
    left = [_left_out(row, wide) for row in page.left_out]
    if others or left:
        count = len(unused) + len(left)
        _table("not used, and why", [*others, *left], count, limit, wide)
    notes = [f"{port.port}: {port.problem}" for port in page.ports if port.problem]
    for note in (*notes, *page.notes):
        click.echo(escaped(note))


def _table(title: str, rows: Iterable[Row], count: int, limit: int, wide: bool) -> None:
    whole = ("endpoint", "reason")
    print_narrow_table(title, [*islice(rows, limit)], wide=wide, whole=whole)
    for line in _more(max(0, count - limit)):
        click.echo(line)


def _more(count: int) -> list[str]:
    return [f"  ... and {count} more: --limit 0 shows all\n"] if count else []


def _frontends(page: ServicePage, wide: bool) -> Iterator[Row]:
    sticky = wide or any(port.affinity_seconds for port in page.ports)
    scheduled = wide or any(port.scheduler != RANDOM for port in page.ports)
    resets = wide or any(port.on_removal not in ("", KEEP) for port in page.ports)
    for port in page.ports:
        affinity = f"{port.affinity_seconds} s" if port.affinity_seconds else "none"
        for row in port.frontends:
            yield {
                "port": _port(port, wide),
                "kind": row.kind,
                "frontend": row.frontend,
                "policy": row.policy,
                **({"affinity": affinity} if sticky else {}),
                **({"scheduler": port.scheduler} if scheduled else {}),
                **({"on_removal": port.on_removal or "not known"} if resets else {}),
                "endpoints": row.endpoints,
                "problem": row.problem,
                **(port.counters if wide else {}),
            }


def _used(port: PortPage, row: EndpointRow, wide: bool) -> Row:
    more = {"id": row.id, "not_local_because": row.not_local} if wide else {}
    return {
        "port": _port(port, wide),
        "endpoint": row.endpoint,
        "pod": row.pod,
        "node": row.node,
        "share": _percent(row.share),
        "local": _percent(row.local_share),
        "open": _count(row.open),
        "opened": _count(row.opened),
    } | more


def _unused(port: PortPage, row: EndpointRow, wide: bool) -> Row:
    still = f"; {row.open} connections still open" if row.open else ""
    reason = row.reason or "no new connections; why is not known"
    return _reason(_port(port, wide), row.endpoint, row.pod, row.node, f"{reason}{still}")


def _left_out(row: LeftOutRow, wide: bool) -> Row:
    port = row.port if wide or not row.port else _short(row.port)
    return _reason(port, row.endpoint, row.pod, row.node, f"{row.reason} (slice {row.slice})")


def _reason(port: str, endpoint: str, pod: str, node: str, reason: str) -> Row:
    return {"port": port, "endpoint": endpoint, "pod": pod, "node": node, "reason": reason}


def _port(port: PortPage, wide: bool) -> str:
    return port.port if wide else _short(port.port)


def _short(port: str) -> str:
    """The port's name and protocol, without those of the Service."""
    name, _, protocol = port.rpartition("/")
    return f"{name.partition(':')[2]}/{protocol}".lstrip("/")


def _percent(share: float | None) -> str:
    return "-" if share is None else percent(share, 0 if share >= 0.1 else 1)


def _count(number: int | None) -> int | str:
    return "?" if number is None else number
