# SPDX-License-Identifier: Apache-2.0
"""``ebpflb doctor``: everything that can be wrong on this node, problems first."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import click

from ebpflb.cli import common
from ebpflb.cli.output import Output, list_option, print_results
from ebpflb.errors import EbpflbError, NodeError, in_words
from ebpflb.files import DOCS
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.model.events import AuditReport
from ebpflb.options import Paths
from ebpflb.serve.conditions import judge
from ebpflb.tools import ask, pins
from ebpflb.tools.check import check_node
from ebpflb.tools.node_checks import (
    OK,
    WARNING,
    WRONG,
    CheckResult,
    routes_result,
    settings_results,
)
from ebpflb.tools.node_status import facts_of


@click.command()
@common.cgroup_root
@common.agents_paths
@click.option(
    "--canary/--no-canary",
    default=True,
    show_default=True,
    help="Test every path with real connections to a temporary endpoint.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print nothing about what is ok.")
@list_option
def doctor(
    cgroup_root: Path | None, paths: Paths, output: Output, canary: bool, quiet: bool
) -> None:
    """Look for everything that can be wrong on this node, and say what to do.

    Gathers `check` and `status`, and adds sysctls, how full the maps are, processes that no hook
    sees, and routes to the endpoints. The running agent compares its copies with the cluster's
    objects, and the kernel with what it has written. At the end doctor connects through each path
    (sockets, packets, NodePorts) to an endpoint of its own: for a few seconds this adds two network
    namespaces, and service ports that only doctor uses. With --no-canary it changes nothing.
    Problems come first. Exit status 0 if nothing is wrong; warnings do not count.

    \b
    $ ebpflb doctor
    $ ebpflb doctor --quiet --no-canary
    $ ebpflb doctor -o json
    """
    pins.require_state_directory(paths.state)
    found = _results(paths, cgroup_root, canary=canary)
    results = sorted(found, key=lambda each: (WRONG, WARNING, OK).index(each.result))
    shown = [each for each in results if not (quiet and each.ok)]
    print_results(shown, output, "WRONG")
    wrong, warnings = (sum(each.result == it for each in results) for it in (WRONG, WARNING))
    if shown and output.has_sentences:
        click.echo(f"\nwrong: {wrong}, warnings: {warnings}")
    sys.exit(1 if wrong else 0)


def _results(paths: Paths, cgroup: Path | None, *, canary: bool) -> Iterator[CheckResult]:
    """Yield all results. Raises NodeError if the agent serves another network namespace."""
    with ExitStack() as opened:
        maps, lacking = None, ""
        try:
            maps = opened.enter_context(pins.pinned_maps(paths.state))
        except NodeError as error:
            lacking = str(error)
        if maps:
            pins.require_namespace(maps)
        yield from check_node(paths, cgroup)
        yield from _verdict(paths)
        if maps:
            yield from _of_maps(paths, maps, canary=canary)
        else:
            yield CheckResult("maps", WRONG, "cannot be read", lacking)


def _of_maps(paths: Paths, maps: Mapping[str, Map], *, canary: bool) -> Iterator[CheckResult]:
    """Yield the results that need the pinned maps."""
    steps: dict[str, Callable[[], Iterable[CheckResult]]] = {
        "settings": lambda: settings_results(maps),
        "routes": lambda: [routes_result(maps)],
        "audit": lambda: _audit(paths),
    }
    if canary:
        from ebpflb.tools.canary_check import canary_results

        steps["canary"] = lambda: canary_results(StateDir(paths.state), paths, maps)
    for name, step in steps.items():
        try:
            yield from list(step())
        except (EbpflbError, OSError) as error:
            yield CheckResult(name, WRONG, "cannot be read", in_words(error))


def _verdict(paths: Paths) -> Iterator[CheckResult]:
    verdict, reasons = judge(facts_of(paths))
    if not reasons:
        yield CheckResult("status", OK, str(verdict))
    for reason in reasons:
        text = f"{reason.text} ({DOCS}/runbook.md)"
        yield CheckResult(f"status: {reason.cause}", WRONG, str(reason.verdict), text)


def _audit(paths: Paths) -> Iterator[CheckResult]:
    """Yield the agent's findings: differences between its copies and the cluster's objects, and
    between the kernel and its plan.
    """
    try:
        report = ask.audit(paths)
    except ask.NoAnswer as reason:
        text = "unknown: only a running agent compares objects and maps"
        yield CheckResult("audit", WARNING, text, str(reason))
        return
    found = list(_findings(report))
    yield from found or [CheckResult("audit", OK, "nothing differs")]


def _findings(report: AuditReport) -> Iterator[CheckResult]:
    put_back = "the agent repairs it within seconds; if not, `ebpflb status` says why"
    if not report.repairs:
        put_back = "the agent only reports it (--audit=report); its next start repairs it"
    for each in report.drift:
        yield CheckResult(f"audit: {each.part}", WRONG, str(each), put_back)
    for name, how in report.objects.items():
        lists = "restart the agent, which then lists all objects, and report this as a bug"
        yield CheckResult("audit: objects", WRONG, f"{name}: {how}", lists)
    if report.not_listed:
        text = "unknown: not compared with the cluster"
        yield CheckResult("audit: objects", WARNING, text, report.not_listed)
    for name, error in report.errors.items():
        yield CheckResult("audit", WRONG, f"the {name} cannot be compared", error)
    for name in report.unfinished:
        text = f"unknown: the {name} are still being compared"
        yield CheckResult("audit", WARNING, text, "`ebpflb status` names what differs")
