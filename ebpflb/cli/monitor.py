# SPDX-License-Identifier: Apache-2.0
"""``ebpflb monitor``: live events."""

import sys
from collections.abc import Mapping
from contextlib import closing
from difflib import get_close_matches
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Any

import click

from ebpflb.cli import common
from ebpflb.cli.event_table import EventLines
from ebpflb.cli.output import lines_output_option
from ebpflb.datapath.maps.bpf_map import Map
from ebpflb.datapath.monitoring import decisions
from ebpflb.diagnose.event_names import EventNames
from ebpflb.diagnose.event_stream import EventStream
from ebpflb.diagnose.event_words import EventFilter, Teller
from ebpflb.errors import NodeError, one_line

_ENDED = "the agent has ended, or loaded its programs again: run `ebpflb monitor` again"


class _Clients(click.ParamType):  # type: ignore[type-arg]
    name = "ADDRESS[/PREFIX]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> IPv4Network | IPv6Network:
        try:
            return ip_network(value)
        except ValueError:
            text = one_line(str(value))
            self.fail(f'"{text}" is no address or network such as 10.244.1.0/24', param, ctx)


@click.command()
@click.option("--service", metavar="NAMESPACE/NAME", help="Only events of this Service.")
@click.option("--client", type=_Clients(), help="Only those of clients with these addresses.")
@click.option(
    "--verdict",
    "verdicts",
    type=click.Choice(sorted(decisions.DECISIONS)),
    multiple=True,
    help="Only these verdicts; may be repeated.  [default: all but those that every packet of a"
    f" known flow or nobody's packet gets: {', '.join(sorted(decisions.FREQUENT))}]",
)
@click.option("--count", type=click.IntRange(1), help="End after so many events.")
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
    paths = common.paths(state_dir, run_dir)
    with common.pinned_maps(state_dir) as maps:
        if service:
            require_service(service, maps)
        click.echo("waiting for the agent to load the monitor's programs", err=True)
        mask = decisions.mask(verdicts or decisions.USUAL)
        teller = Teller(EventNames(maps), EventFilter(service, client))
        with closing(EventStream(paths, mask)) as stream:
            click.echo("watching; Ctrl-C ends it", err=True)
            ended = _Watch(stream, teller, EventLines(output)).run(verdicts, count)
    if not ended:
        raise NodeError(_ENDED)


class _Watch:
    def __init__(self, stream: EventStream, teller: Teller, lines: EventLines) -> None:
        self._stream, self._teller, self._lines = stream, teller, lines
        self._shown = self._lost = 0

    def run(self, verdicts: tuple[str, ...], count: int | None) -> bool:
        """Whether its user has ended it, and not the agent."""
        wanted = {decisions.DECISIONS[word] for word in verdicts or decisions.USUAL}
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


def require_service(wanted: str, maps: Mapping[str, Map]) -> None:
    """Raises NodeError where no port of it is served on this node."""
    names = maps["service_names"].items()
    known = {f"{name.namespace}/{name.service}" for _, name in names}
    if wanted not in known:
        close = get_close_matches(wanted, sorted(known))
        hint = f"did you mean {' or '.join(close)}?" if close else "see `ebpflb services list`"
        raise NodeError(f"no Service {one_line(wanted)} is served here: {hint}")
