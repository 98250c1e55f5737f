# SPDX-License-Identifier: Apache-2.0
"""``ebpflb explain``: why a connection goes where it goes."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from ebpflb.cli import common
from ebpflb.cli.output import (
    Output,
    Row,
    output_option,
    percent,
    print_as,
    print_table,
    show,
    watch_option,
)
from ebpflb.entries.services import Frontend
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.serve import status
from ebpflb.tools import pins
from ebpflb.tools.explain import answer
from ebpflb.tools.explain.answer import Explained
from ebpflb.tools.explain.asking import NamedService, Share, parse_question

PAGE = 20  # endpoints


def _clients(context: click.Context, option: click.Parameter, incomplete: str) -> list[str]:
    words = [word for word in ("node", "outside") if word.startswith(incomplete)]
    return words + common.pod_names(context, option, incomplete)


class _Question(click.ParamType):  # type: ignore[type-arg]
    name = "ADDRESS:PORT[/PROTOCOL]"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(name) for name in common.service_names(ctx, param, incomplete)]

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Frontend | NamedService:
        try:
            return parse_question(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command("explain")
@click.argument("to", metavar="ADDRESS:PORT|NAMESPACE/NAME[:PORT]", type=_Question())
@click.option(
    "--from",
    "sender",
    metavar="CLIENT",
    default="node",
    show_default=True,
    shell_complete=_clients,
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
@watch_option
@output_option("wide", "json", "yaml")
def explain(
    to: Frontend | NamedService,
    sender: str,
    from_port: int | None,
    page: int,
    state_dir: Path,
    run_dir: Path | None,
    watch: float | None,
    output: Output,
) -> None:
    """Explain why a connection goes where it goes, step by step.

    The destination is an address and port, with /udp or /sctp for other protocols than TCP, or a
    Service: NAMESPACE/NAME[:PORT], or its DNS name such as web.default.svc:80.

    Asks the programs and the pinned maps themselves; nothing is sent, nothing changes, and no agent
    has to run. Each step names the row of the map that it comes from.

    Exit status: 0 if an endpoint gets it, 3 if it is to no service, 4 if it is refused, 5 if it is
    dropped, 1 if that cannot be found out, 2 for wrong usage.

    \b
    $ ebpflb explain shop/cart:http
    $ ebpflb explain 10.96.0.10:53/udp --from shop/web-1
    $ ebpflb explain 192.0.2.1:30080 --from outside -o wide
    """
    common.require_capabilities()
    paths = pins.paths(state_dir, run_dir)

    def read() -> Explained:
        found = answer.explain(StateDir(paths.state), paths.cache, to, sender, from_port)
        published = status.read(paths)
        if published and (aside := published.set_aside.get(found.service)):
            found.notes.append(f"set aside, as they do not answer this node: {aside}")
        return found

    explained = show(read, lambda found: _print(found, page, output), watch)
    sys.exit(explained.status)


def _print(explained: Explained, page: int, output: Output) -> None:
    if output.is_data:
        print_as(output, _data(explained))
    else:
        _print_tables(explained, page, output)
    for note in explained.notes:
        click.echo(f"note: {note}", err=True)


def _data(explained: Explained) -> dict[str, Any]:
    """Return the whole answer, with the words of the tables."""
    return {
        **explained.as_data(),
        "protocol": explained.protocol.upper(),
        "steps": [*_steps(explained, wide=True)],
        "endpoints": [{**_endpoint(it), "chance": it.chance} for it in explained.shares],
    }


def _print_tables(explained: Explained, page: int, output: Output) -> None:
    """Print two tables: the steps, the last of which is the verdict, and the endpoints."""
    print_table([*_steps(explained, wide=output.is_wide)], output)
    if not explained.shares:
        return
    click.echo()
    shown = explained.shares[(page - 1) * PAGE : page * PAGE]
    print_table([_endpoint(share) for share in shown], output)
    pages = -(-len(explained.shares) // PAGE)
    if max(page, pages) > 1:
        click.echo(f"page {page} of {pages}, {len(explained.shares)} endpoints: --page", err=True)


def _steps(explained: Explained, *, wide: bool) -> Iterator[Row]:
    """Return the rows of steps; -o wide also names the row of the map that a step has read."""
    asked = f"{explained.asked}/{explained.protocol} from {explained.client}"
    steps = [
        ("connection", asked, ""),
        *((it.step, it.says, f"{it.map} {it.row}".strip()) for it in explained.rows),
    ]
    steps.append(("verdict", f"{explained.verdict}: {explained.says}", ""))
    for step, says, source in steps:
        yield {"step": step, "what": says, **({"read_from": source} if wide else {})}


def _endpoint(share: Share) -> Row:
    return {
        "chance": percent(share.chance, 1),
        "endpoint": share.endpoint,
        "pod": share.pod,
        "node": share.node,
        "zone": share.zone,
        "slot": share.slot,
        "note": share.note,
    }
