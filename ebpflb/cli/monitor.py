# SPDX-License-Identifier: Apache-2.0
"""``ebpflb monitor``: live events."""

import sys
from contextlib import closing
from ipaddress import IPv4Network, IPv6Network, ip_network

import click

from ebpflb.cli import common
from ebpflb.cli.output import (
    Output,
    Row,
    cell,
    microseconds,
    output_option,
    print_row_as,
    table_lines,
)
from ebpflb.errors import NodeError
from ebpflb.kernel.monitoring import DECISIONS, FREQUENT, USUAL, decision_mask
from ebpflb.options import Paths
from ebpflb.tools import pins
from ebpflb.tools.events import EventFilter, EventNames, EventStream, Teller, Told
from ebpflb.tools.snapshot import require_service

# Columns begin with these widths; a longer cell widens its column from then on.
_WIDTHS = {
    "time": 29,
    "verdict": 13,
    "hook": 8,
    "duration": 8,
    "from": 24,
    "service": 24,
    "frontend": 20,
    "backend": 18,
}


class EventLines:
    """Prints each event at once, in the chosen format; a table begins with its headings."""

    def __init__(self, output: Output) -> None:
        self._output, self._headers, self._widths = output, output.headers, {**_WIDTHS}

    def show(self, told: Told) -> None:
        row = _wide(told) if self._output.is_whole else narrow_row(told)
        if self._output.is_data:
            own = {"duration": told.ns, "frontend": told.frontend, "process": told.process}
            print_row_as(self._output, {**row, **own, "pid": told.pid, "protocol": told.protocol})
            return
        for name, value in row.items():
            self._widths[name] = max(self._widths.get(name, 0), len(cell(value)))
        for line in table_lines([row], headers=self._headers, least=self._widths):
            click.echo(line)
        self._headers = False


def narrow_row(told: Told) -> Row:
    """Return the columns that fit a terminal; `-o wide` has more."""
    return {
        "time": told.time,
        "verdict": told.verdict,
        "hook": told.hook,
        "duration": microseconds(told.ns),
        "from": told.pod or told.client or _process(told),
        "service": told.service,
        "frontend": told.frontend and f"{told.frontend}/{told.protocol}",
        "backend": told.backend,
    }


def _wide(told: Told) -> Row:
    return {
        **narrow_row(told),
        "process": _process(told),
        "pod": told.pod,
        "client": told.client,
        "device": told.device,
        "backend_pod": told.backend_pod,
    }


def _process(told: Told) -> str:
    return f"{told.process}/{told.pid}" if told.pid else ""


_ENDED = "the agent has stopped or reloaded its programs: run `ebpflb monitor` again"


def _parse_clients(text: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(text)
    except ValueError:
        raise ValueError(f'"{text}" is not an address or network such as 10.244.1.0/24') from None


@click.command()
@common.service
@common.namespace
@click.option(
    "--client",
    metavar="ADDRESS[/PREFIX]",
    callback=common.parsed(_parse_clients),
    help="Only events of clients with these addresses.",
)
@click.option(
    "--verdict",
    "verdicts",
    type=click.Choice(sorted(DECISIONS)),
    multiple=True,
    help="Only these verdicts; may be repeated.  [default: all except those of packets of known "
    f"flows and of other traffic: {', '.join(sorted(FREQUENT))}]",
)
@click.option("--count", type=click.IntRange(1), help="Exit after this many events.")
@common.agents_paths
@output_option("wide", "json", "yaml", more="; JSON is an object a line, YAML a document for it")
def monitor(
    service: tuple[str, str] | None,
    namespace: str,
    client: IPv4Network | IPv6Network | None,
    verdicts: tuple[str, ...],
    count: int | None,
    paths: Paths,
    output: Output,
) -> None:
    """Show the decisions of the datapath, live, until Ctrl-C.

    The running agent attaches programs that emit events. When the last monitor has ended, it
    attaches the usual programs again. The number of lost events is printed when it grows, and at
    the end.

    \b
    $ ebpflb monitor --service shop/cart
    $ ebpflb monitor --verdict refused --count 10
    $ ebpflb monitor --client 10.244.1.0/24 -o json
    """
    with pins.pinned_maps(paths.state) as maps:
        name = "/".join(service) if service else None
        if name:
            require_service(maps, name)
        click.echo("waiting for the agent to load the monitor's programs", err=True)
        mask = decision_mask(verdicts or USUAL)
        teller = Teller(EventNames(maps), EventFilter(name, client, namespace))
        with closing(EventStream(paths, mask)) as stream:
            click.echo("watching; press Ctrl-C to stop", err=True)
            ended = _Watch(stream, teller, EventLines(output)).run(verdicts, count)
    if not ended:
        raise NodeError(_ENDED)


class _Watch:
    def __init__(self, stream: EventStream, teller: Teller, lines: EventLines) -> None:
        self._stream, self._teller, self._lines = stream, teller, lines
        self._shown = self._lost = 0

    def run(self, verdicts: tuple[str, ...], count: int | None) -> bool:
        """Show events; return True if the user stopped the monitor, False if the agent ended."""
        wanted = {DECISIONS[word] for word in verdicts or USUAL}
        try:
            for part in self._stream.parts():
                self._tell_lost(part.lost)
                for event in part.events:
                    told = self._teller.tell(event) if event.verdict in wanted else None
                    if told:
                        self._lines.show(told)
                        self._shown += 1
                    if self._shown == count:
                        return True
                sys.stdout.flush()
            return False
        except KeyboardInterrupt:
            return True
        finally:
            click.echo(f"{self._shown} events shown, {self._lost} lost", err=True)

    def _tell_lost(self, lost: int) -> None:
        if lost > self._lost:
            click.echo(f"{lost - self._lost} events lost", err=True)
            self._lost = lost
