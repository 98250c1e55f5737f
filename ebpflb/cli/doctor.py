# SPDX-License-Identifier: Apache-2.0
"""``ebpflb doctor``: everything that can be wrong on this node, problems first."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import click

from ebpflb.cli import common
from ebpflb.cli.output import Output, list_option, show, watch_option
from ebpflb.cli.results import print_results
from ebpflb.errors import EbpflbError, NodeError, in_words
from ebpflb.files import DOCS
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.options import REPORT, Paths
from ebpflb.serve import agent_lock
from ebpflb.serve import status as agent_status
from ebpflb.serve.conditions import judge
from ebpflb.tools import pins
from ebpflb.tools.check import check_node
from ebpflb.tools.check_result import CheckResult
from ebpflb.tools.comparison import compare
from ebpflb.tools.node_checks import reach_results, settings_results
from ebpflb.tools.node_status import facts_of


@click.command()
@common.cgroup_root
@common.state_dir
@common.run_dir
@click.option(
    "--canary/--no-canary",
    default=True,
    show_default=True,
    help="Test every path with real connections to a temporary endpoint.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print nothing about what is ok.")
@watch_option
@list_option
def doctor(
    cgroup_root: Path | None,
    state_dir: Path,
    run_dir: Path | None,
    watch: float | None,
    output: Output,
    canary: bool,
    quiet: bool,
) -> None:
    """Look for everything that can be wrong on this node, and say what to do.

    Gathers `check`, `status` and `audit`, and adds sysctls, how full the maps are, processes
    that no hook sees, and routes to the endpoints. Last it connects through each path (sockets,
    packets, NodePorts) to an endpoint of its own: for some seconds there are two network
    namespaces, and service ports that serve nobody else. With --no-canary it changes nothing.
    Problems come first; on a terminal they are coloured, unless NO_COLOR is set. Exit status 0
    if nothing is wrong; warnings do not count.

    \b
    $ ebpflb doctor
    $ ebpflb doctor --quiet --no-canary
    $ ebpflb doctor -o json
    """
    common.require_capabilities()
    paths = pins.paths(state_dir, run_dir)
    pins.require_state_directory(paths.state)

    def read() -> list[CheckResult]:
        found = _results(paths, cgroup_root, canary=canary)
        return sorted(found, key=lambda each: (each.ok, not each.required))

    def print_(found: list[CheckResult]) -> None:
        _print([each for each in found if not (quiet and each.ok)], output)

    results = show(read, print_, watch)
    sys.exit(1 if _count_wrong(results) else 0)


def _print(results: list[CheckResult], output: Output) -> None:
    print_results(results, output, "WRONG")
    if results and output.has_sentences:
        wrong = _count_wrong(results)
        warnings = sum(not each.ok for each in results) - wrong
        click.echo(f"\nwrong: {wrong}, warnings: {warnings}")


def _count_wrong(results: list[CheckResult]) -> int:
    return sum(each.required and not each.ok for each in results)


def _results(paths: Paths, cgroup: Path | None, *, canary: bool) -> Iterator[CheckResult]:
    """Raises NodeError in another network namespace than the agent's."""
    with ExitStack() as opened:
        maps, lacking = None, ""
        try:
            maps = opened.enter_context(pins.pinned_maps(paths.state))
        except NodeError as error:
            lacking = str(error)
        if maps:
            pins.require_namespace(maps)
        yield from check_node(paths.state, cgroup)
        yield from _verdict(paths)
        if maps:
            yield from _of_maps(paths, cgroup, maps, canary=canary)
        else:
            yield CheckResult("maps", False, True, "cannot be read", lacking)


def _of_maps(
    paths: Paths, cgroup: Path | None, maps: Mapping[str, Map], *, canary: bool
) -> Iterator[CheckResult]:
    """Of what the pinned maps say."""
    state = StateDir(paths.state)
    steps: dict[str, Callable[[], Iterable[CheckResult]]] = {
        "settings": lambda: settings_results(maps),
        "reach": lambda: reach_results(state, maps),
        "audit": lambda: _audit(paths, cgroup),
    }
    if canary:
        from ebpflb.tools.canary_check import canary_results

        steps["canary"] = lambda: canary_results(state, paths, maps)
    for name, step in steps.items():
        try:
            yield from list(step())
        except (EbpflbError, OSError) as error:
            yield CheckResult(name, False, True, "cannot be read", in_words(error))


def _verdict(paths: Paths) -> Iterator[CheckResult]:
    verdict, reasons = judge(facts_of(paths))
    if not reasons:
        yield CheckResult("status", True, True, str(verdict), "")
    for reason in reasons:
        what = f"status: {reason.cause}"
        yield CheckResult(
            what, False, True, str(reason.verdict), f"{reason.text} ({DOCS}/runbook.md)"
        )


def _audit(paths: Paths, cgroup: Path | None) -> Iterator[CheckResult]:
    drift, not_listed = compare(paths, cgroup)
    if not_listed:
        yield CheckResult("audit", False, False, "not compared with the cluster", not_listed)
    if not drift:
        yield CheckResult("audit", True, True, "nothing differs", "")
    for each in drift:
        yield CheckResult(f"audit: {each.part}", False, True, str(each), _put_back(paths))


def _put_back(paths: Paths) -> str:
    """Who puts back what differs."""
    if not agent_lock.is_running(paths):
        return "no agent is running; the next start of `ebpflb run` repairs it"
    published = agent_status.read(paths)
    if published and published.options.get("audit") == REPORT:
        return "the agent only reports it (--audit=report); its next start repairs it"
    return "the agent repairs it within seconds; if not, `ebpflb status` says why"
