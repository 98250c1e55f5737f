# SPDX-License-Identifier: Apache-2.0
"""``ebpflb history``: how, when and why Services have changed in the maps."""

import time
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from typing import Any

import click
from msgspec.structs import asdict

from ebpflb.cli import common
from ebpflb.cli.output import Output, limit_option, list_option, print_list
from ebpflb.entries.services import service_of
from ebpflb.history.records import Change, ServiceChange, WriteCause, latest_changes, parse_time
from ebpflb.options import Paths
from ebpflb.serve.conditions import span

FEW = 3  # names of one sort in a cell of a narrow table


@click.command()
@common.service
@common.namespace
@click.option(
    "--since",
    metavar="TIME",
    callback=common.parsed(lambda text: parse_time(text, time.time())),
    help="Only records since a time, such as 10m (ago), 14:03 or 2026-11-22T14:03:10.",
)
@limit_option
@common.agents_paths
@list_option
def history(
    service: tuple[str, str] | None,
    namespace: str,
    since: float | None,
    limit: int | None,
    paths: Paths,
    output: Output,
) -> None:
    """Show how Services have changed in the maps, and which object or event was the cause.

    Reads the files that the agent keeps in its run directory; no agent has to run. They are
    bounded: a note says when they begin.

    \b
    $ ebpflb history --since 10m
    $ ebpflb history --service shop/cart -o wide
    $ ebpflb history -n shop --limit 20
    """
    most = output.most_rows(limit)
    wanted = service or ((namespace, "") if namespace else None)
    found = latest_changes(paths, wanted, since, most)
    make = _items if output.is_data else partial(_rows, wide=output.is_wide)
    every = [row for change in found.changes for row in make(change)]
    rows = every[-most:]
    notes = [f"history begins at {found.begins}", *found.notes]
    if found.earlier or len(rows) < len(every):
        notes.append("earlier changes are not shown: --limit 0 shows all")
    print_list(rows, output, notes=notes, what="changes")


def _items(change: Change) -> Iterator[dict[str, Any]]:
    """Return the rows as data, with the changes and all causes."""
    causes = [asdict(each) for each in change.causes]
    rows = _rows(change, wide=True)
    for number, row in enumerate(rows):
        changed = asdict(change.services[number]) if change.services else {}
        changed.pop("service", None)
        yield {**row, "change": changed, "cause": causes, "more_causes": change.more_causes}


def _rows(change: Change, *, wide: bool) -> list[dict[str, str]]:
    """Return a row for each service, or one row for a record without services."""
    age = span(datetime.now().astimezone() - datetime.fromisoformat(change.time))
    words = [(it.service, _service(it, wide=wide)) for it in change.services]
    return [
        {
            "time": change.time,
            "age": age,
            "service": name,
            "change": text,
            "cause": _causes(change, name, wide=wide),
        }
        for name, text in words or [("", "")]
    ]


def _causes(change: Change, service: str, *, wide: bool) -> str:
    """Return the causes, with those of the service first: names of its slices begin with its
    name.
    """
    name = service_of(service)
    ordered = sorted(change.causes, key=lambda it: not it.name.startswith(name))
    named = ordered if wide else ordered[:1]
    more = change.more_causes + len(ordered) - len(named)
    return "; ".join(map(_cause, named)) + (f" (+{more})" if more else "")


def _cause(cause: WriteCause) -> str:
    version = f"@{cause.version}" if cause.version else ""
    return " ".join(filter(None, (cause.kind, f"{cause.name}{version}", cause.event)))


def _service(change: ServiceChange, *, wide: bool) -> str:
    parts = [
        ("+", change.endpoints_added),
        ("-", change.endpoints_removed),
        ("~", change.endpoints_changed),
        ("+", change.frontends_added),
        ("-", change.frontends_removed),
        ("~", change.frontends_changed),
    ]
    return ", ".join(word for sign, names in parts for word in _some(sign, names, wide=wide))


def _some(sign: str, names: list[str], *, wide: bool) -> list[str]:
    shown = names if wide else names[:FEW]
    more = len(names) - len(shown)
    return [f"{sign}{name}" for name in shown] + ([f"{sign}{more} more"] if more else [])
