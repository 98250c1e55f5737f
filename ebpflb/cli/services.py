# SPDX-License-Identifier: Apache-2.0
"""``ebpflb services``: what is used of a Service, and why the rest is not."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click

from ebpflb.cli import common
from ebpflb.cli.output import wide_output_option
from ebpflb.cli.service_tables import show_list, show_page
from ebpflb.cli.watching import show, watch_option
from ebpflb.datapath.maps.bpf_map import Map
from ebpflb.diagnose import service_pages as pages
from ebpflb.diagnose.service_pages import Wanted
from ebpflb.errors import NodeError, one_line
from ebpflb.model import served_services
from ebpflb.plan.service_page import ServiceList, ServicePage

TABLE_ROWS = 100  # of a table, unless --limit says more
NOT_SERVED = 3  # exit status: a frontend serves nothing, or something does not fit
UNLIMITED = sys.maxsize

limit_option = click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=None,
    help=f"Rows of a table at most; 0: all.  [default: {TABLE_ROWS}; all in JSON and YAML]",
)


def _name(_context: object, _argument: object, text: str) -> tuple[str, str]:
    namespace, slash, name = text.rpartition("/")
    if not name or "/" in namespace or (slash and not namespace):
        raise click.BadParameter(f'"{one_line(text)}" is not NAMESPACE/NAME such as default/web')
    return namespace, name


def _selector(_context: object, _option: object, text: str) -> str:
    try:
        return served_services.show(served_services.parse(text))
    except ValueError as error:
        raise click.BadParameter(one_line(str(error))) from error


@click.group()
def services() -> None:
    """Show Services as this node serves them.

    The running agent answers over a socket in its run directory, for root alone. Without an agent
    the pinned maps are shown: what is used, but not why the rest is not.
    """


@services.command("list")
@click.argument("patterns", metavar="[NAME|NAMESPACE/NAME]...", nargs=-1)
@click.option("-n", "--namespace", default="*", help="Only Services of this namespace.")
@click.option(
    "-l",
    "--selector",
    default="",
    callback=_selector,
    help="Only Services with these labels, as in kubectl: app=web,tier!=db,stage in (test,canary).",
)
@limit_option
@watch_option
@common.state_dir
@common.run_dir
@wide_output_option
def list_(
    patterns: tuple[str, ...],
    namespace: str,
    selector: str,
    limit: int | None,
    watch: float | None,
    state_dir: Path,
    run_dir: Path | None,
    output: str,
) -> None:
    """Print a row for each Service, of all namespaces.

    Names may be patterns, such as 'web-*' or 'shop/*'. Exit status 1 if none is found.
    """
    common.require_capabilities()
    paths = common.paths(state_dir, run_dir)
    names = tuple(name if "/" in name else f"{namespace}/{name}" for name in patterns or ("*",))
    wanted = Wanted(names, _rows(limit, output), selector)

    def read() -> ServiceList:
        with maps_if_any(state_dir) as maps:
            return pages.listed(paths, maps, wanted)

    found = show(read, lambda value: show_list(value, output), watch)
    sys.exit(0 if found.services else 1)


@services.command()
@click.argument("service", metavar="NAMESPACE/NAME", callback=_name)
@click.option(
    "-n",
    "--namespace",
    default="",
    help="Where SERVICE is only a NAME.  [default: default, or the only one that has it]",
)
@limit_option
@watch_option
@common.state_dir
@common.run_dir
@wide_output_option
def get(
    service: tuple[str, str],
    namespace: str,
    limit: int | None,
    watch: float | None,
    state_dir: Path,
    run_dir: Path | None,
    output: str,
) -> None:
    """Print one Service: frontends, endpoints with their share, and why others are not used.

    A share is the chance of a new connection. Exit status 0 if every frontend leads to an endpoint,
    3 if one does not or something does not fit, 1 if there is no such Service.
    """
    common.require_capabilities()
    paths = common.paths(state_dir, run_dir)

    def read() -> ServicePage:
        with maps_if_any(state_dir) as maps:
            within = service[0] or namespace or pages.namespace_of(paths, maps, service[1])
            return pages.page(paths, maps, within, service[1])

    found = show(read, lambda value: show_page(value, output, _rows(limit, output)), watch)
    sys.exit(NOT_SERVED if found.problems else 0)


def _rows(limit: int | None, output: str) -> int:
    if limit is None:
        return UNLIMITED if output in ("json", "yaml") else TABLE_ROWS
    return limit or UNLIMITED


@contextmanager
def maps_if_any(state_dir: Path) -> Iterator[dict[str, Map] | None]:
    """None where there are none of this version: an agent may answer nevertheless."""
    with ExitStack() as stack:
        try:
            maps = stack.enter_context(common.pinned_maps(state_dir))
        except NodeError:
            yield None
        else:
            yield maps
