# SPDX-License-Identifier: Apache-2.0
"""``ebpflb monitor``: live events."""

import shutil
import sys
from contextlib import closing
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Any

import click

from ebpflb.cli import common
from ebpflb.cli.output import COLUMNS, WIDE, lines_output_option, print_row_as
from ebpflb.errors import NodeError, escaped, one_line
from ebpflb.kernel.monitoring import DECISIONS, FREQUENT, USUAL, decision_mask
from ebpflb.tools import pins
from ebpflb.tools.events import EventFilter, EventNames, EventStream, Teller, Told, require_service

# Events as lines: 80 columns, or as many as the terminal has; wide, JSON, YAML.

# The columns of the table, of 80; what a terminal has more goes to the last three.
_WIDTHS = {"TIME": 12, "VERDICT": 10, "HOOK": 7, "NS": 5, "FROM": 10, "FRONTEND": 14, "BACKEND": 16}
_ELASTIC = ("FROM", "FRONTEND", "BACKEND")
_LONGEST = 40  # characters that a column may have


class EventLines:
    """Prints an event as ``output`` says, each as soon as it is there."""

    def __init__(self, output: str) -> None:
        self._output, self._widths = output, dict(_WIDTHS)
        if output == "table" and sys.stdout.isatty():
            spare = shutil.get_terminal_size((COLUMNS, 24)).columns - COLUMNS
            for name in _ELASTIC:
                more = max(0, min(spare // len(_ELASTIC), _LONGEST - _WIDTHS[name]))
                self._widths[name] += more

    def head(self) -> None:
        if self._output == "table":
            self._line(dict(zip(self._widths, self._widths, strict=True)))

    def show(self, told: Told) -> None:
        if self._output in ("json", "yaml"):
            print_row_as(self._output, told)
        elif self._output == WIDE:
            click.echo(_wide(told))
        else:
            self._line(_cells(told))

    def _line(self, cells: dict[str, str]) -> None:
        parts = [_fitted(cells[name], width) for name, width in self._widths.items()]
        click.echo(" ".join(parts).rstrip())


def _cells(told: Told) -> dict[str, str]:
    return {
        "TIME": told.time[11:23],
        "VERDICT": told.verdict,
        "HOOK": told.hook,
        "NS": str(told.ns),
        "FROM": escaped(told.pod or _process(told) or told.client),
        "FRONTEND": told.frontend,
        "BACKEND": told.backend,
    }


def _wide(told: Told) -> str:
    """All that is known, with a word before what may be missing."""
    parts = {
        "process": _process(told),
        "pod": told.pod,
        "client": told.client,
        "device": told.device,
        "service": told.service,
        "frontend": told.frontend and f"{told.frontend}/{told.protocol}",
        "backend": told.backend,
        "endpoint": told.backend_pod,
    }
    said = [f"{name} {escaped(value)}" for name, value in parts.items() if value]
    return f"{told.time} {told.verdict:<16} {told.hook:<8} {told.ns:>6} ns  {'  '.join(said)}"


def _process(told: Told) -> str:
    return f"{told.process}/{told.pid}" if told.pid else ""


def _fitted(text: str, width: int) -> str:
    return f"{text:<{width}}" if len(text) <= width else f"{text[: width - 1]}…"


_ENDED = "the agent has stopped or reloaded its programs: run `ebpflb monitor` again"


class _Clients(click.ParamType):  # type: ignore[type-arg]
    name = "ADDRESS[/PREFIX]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> IPv4Network | IPv6Network:
        try:
            return ip_network(value)
        except ValueError:
            text = one_line(str(value))
            self.fail(f'"{text}" is not an address or network such as 10.244.1.0/24', param, ctx)


@click.command()
@click.option("--service", metavar="NAMESPACE/NAME", help="Only events of this Service.")
@click.option("--client", type=_Clients(), help="Only those of clients with these addresses.")
@click.option(
    "--verdict",
    "verdicts",
    type=click.Choice(sorted(DECISIONS)),
    multiple=True,
    help="Only these verdicts; may be repeated.  [default: all except those of packets of known "
    f"flows and of other traffic: {', '.join(sorted(FREQUENT))}]",
)
@click.option("--count", type=click.IntRange(1), help="Exit after this many events.")
@common.state_dir
@common.run_dir
@lines_output_option("one object a line")
def monitor(
    service: str | None,
    client: IPv4Network | IPv6Network | None,
    verdicts: tuple[str, ...],
    count: int | None,
    state_dir: Path,
    run_dir: Path | None,
    output: str,
) -> None:
    """Show what the datapath decides, as it does: until Ctrl-C.

    The running agent puts programs in force that tell their decisions, and the usual ones again
    when the last monitor ends, in whatever way. How many events were lost is said at the end, and
    when it happens.
    """
    common.require_capabilities()
    paths = pins.paths(state_dir, run_dir)
    with pins.pinned_maps(state_dir) as maps:
        if service:
            require_service(service, maps)
        click.echo("waiting for the agent to load the monitor's programs", err=True)
        mask = decision_mask(verdicts or USUAL)
        teller = Teller(EventNames(maps), EventFilter(service, client))
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
        """Whether its user has ended it, and not the agent."""
        wanted = {DECISIONS[word] for word in verdicts or USUAL}
        self._lines.head()
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
