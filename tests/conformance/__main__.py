# SPDX-License-Identifier: Apache-2.0
"""Play the cases with real packets against service proxies, and print what each passes.

    python -m tests.conformance ebpflb-netfilter kube-proxy-nftables
    python -m tests.conformance 'another-proxy --kubeconfig {kubeconfig} --node {node}'

Needs root, and what the proxies need. The exit status is 1 if a row fails, except for what a proxy
is known to do differently on purpose (targets.py).
"""

import os
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ebpflb.errors import NodeError
from tests.conformance import served
from tests.conformance.cases import CASES
from tests.conformance.served import Served
from tests.conformance.targets import TARGETS, Target, named
from tests.kit import cells, requests
from tests.kit.cells import FORBIDDEN, REFUSED, SILENT, Case, Met, Row
from tests.kit.interrupted import interrupted_alone
from tests.kit.lab_cluster import started

SECONDS = 3.0  # that an answer may take, with the SYN's first retransmission
SENDS = {"TCP": requests.tcp, "UDP": requests.udp}


class Result(NamedTuple):
    """``seen`` is a client's result if it differs from the expected one, or "". ``on_purpose``
    means that this proxy is known to do that.
    """

    case: str
    asked: str
    wanted: str
    seen: str
    on_purpose: bool = False


def play(
    target: str, cases: Mapping[str, Case], patience: float = served.SECONDS
) -> Iterator[Result]:
    """Return the results of each case's clients, in the order of the case; see ``Served``."""
    proxy = named(target)
    with (
        tempfile.TemporaryDirectory() as folder,
        started(lambda lab: Served(lab, Path(folder), proxy, patience)) as two,
    ):
        for name, case in cases.items():
            two.delete_all_flows()
            try:
                two.publish(*case.published(two))
            except NodeError as error:
                yield Result(name, "the proxy follows", "a change", str(error))
                continue
            for row in case.rows:
                yield from _ask(two, proxy, name, row)


def _ask(two: Served, proxy: Target, case: str, row: Row) -> Iterator[Result]:
    cell = row.kube_proxy or row.cell
    for who in row.clients.split():
        for kind in row.kinds.split():
            other = proxy.differs(row, who, kind)
            for v6 in (False, True):
                where = cells.at(two, row.number, kind, v6=v6)
                for protocol, send in SENDS.items():
                    found = cells.meet(two, who, where, cell, send, SECONDS)
                    fits = cells.fits(two, who, where, cell, found) or _is_forbidden(cell, found)
                    asked = f"{who} asks {kind} {row.number} by {protocol}, IPv{6 if v6 else 4}"
                    seen = "" if fits else ", ".join(sorted(" ".join(it).strip() for it in found))
                    known = bool(other) and cells.fits(two, who, where, other, found)
                    yield Result(case, asked, cell, seen, bool(seen) and known)


def _is_forbidden(cell: str, found: Met) -> bool:
    """Whether the kernel told a process of the node at once that its request is forbidden."""
    return found == {FORBIDDEN} and cell in (REFUSED, SILENT)


def report(target: str, results: list[Result]) -> None:
    """Print how many rows of each case pass, how many differ on purpose, and those that fail."""
    print(f"\n{target}")
    for case in dict.fromkeys(result.case for result in results):
        rows = [result for result in results if result.case == case]
        _count(case, rows)
        for row in filter(_has_failed, rows):
            print(f"      {row.asked}: wanted {row.wanted}; met {row.seen}")
    _count("all", results)


def _count(name: str, rows: list[Result]) -> None:
    passed = sum(not row.seen for row in rows)
    differ = sum(row.on_purpose for row in rows)
    more = f", {differ} differ on purpose" if differ else ""
    print(f"  {name:26} {passed:4} of {len(rows):4}{more}", flush=True)


def _has_failed(row: Result) -> bool:
    return bool(row.seen) and not row.on_purpose


def main() -> int:
    parser = ArgumentParser(
        "conformance", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="+", help=f"{', '.join(TARGETS)}, or a command")
    parser.add_argument("--case", action="append", choices=CASES, help="only this one")
    said = parser.parse_args()
    for target in said.targets:
        try:
            named(target)
        except ValueError as error:
            parser.error(f"{target}: {error}")
    if os.geteuid():
        parser.error("needs root, to make network namespaces and cgroups")
    interrupted_alone()
    try:
        return _play_all(said.targets, said.case or CASES)
    except KeyboardInterrupt:
        sys.exit("interrupted; the lab is removed")


def _play_all(targets: list[str], cases: Collection[str]) -> int:
    """Return the exit status."""
    chosen = {name: case for name, case in CASES.items() if name in cases}
    failed = False
    for target in targets:
        results = list(play(target, chosen))
        report(target, results)
        failed = failed or any(map(_has_failed, results))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
