# SPDX-License-Identifier: Apache-2.0
"""Whose sockets the hooks see, and whether the node has a route to the endpoints that it uses."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.node import clients, process, routes
from ebpflb.tools.check_result import CheckResult
from ebpflb.tools.snapshot import Snapshot

_MOST_ASKED = 5000  # endpoints to which a route is asked for
_NAMED = 4  # in one line


def reach_results(state: StateDir, maps: Mapping[str, Map]) -> Iterator[CheckResult]:
    """In the network namespace of this thread. Raises KernelError, or OSError."""
    yield _processes(cgroup_links.cgroup_of(state))
    yield _routes(maps)


def _processes(cgroup: Path) -> CheckResult:
    """Those of containers too, where this process sees them. Threads of the kernel do not count:
    their sockets are no business of services.
    """
    if not process.sees_the_machine():
        detail = "unknown: a container sees only its own processes"
        remedy = "run doctor on the node itself, or in a container with the node's PID namespace"
        return CheckResult("processes", False, False, detail, remedy)
    there = {each: name for each in clients.processes() if (name := _name(each))}
    outside = [each for each in there if not clients.in_cgroup(each, cgroup)]
    if not outside:
        return CheckResult("processes", True, False, f"all {len(there)} in reach of the hooks", "")
    named = _some([f"{there[each]} ({each.name})" for each in outside])
    return CheckResult(
        "processes",
        False,
        False,
        f"{len(outside)} of {len(there)} are outside {cgroup}: {named}",
        "no hook sees their sockets: packets of pods are translated at their device, those of the"
        " node itself are not. Let --cgroup-root be the root of cgroup v2",
    )


def _name(folder: Path) -> str:
    """ "" for a thread of the kernel, and for a process that has ended."""
    with suppress(OSError):
        if os.readlink(f"{folder}/exe"):
            return (folder / "comm").read_text().strip()
    return ""


def _routes(maps: Mapping[str, Map]) -> CheckResult:
    slots = Snapshot(maps).slots.values()
    addresses = {backend.address for backend in slots if backend.service}
    asked = list(islice(addresses, _MOST_ASKED))
    lacking = [f"{address} ({why})" for address, why in routes.without_route(asked)]
    if not lacking:
        detail = f"routes exist to {_of(len(asked), len(addresses))} endpoints"
        return CheckResult("routes", True, False, detail, "")
    detail = f"no route to {len(lacking)} of {_of(len(asked), len(addresses))}: {_some(lacking)}"
    remedy = "connections to such an endpoint fail: check the CNI's routes (ip route)"
    return CheckResult("routes", False, False, detail, remedy)


def _of(asked: int, number: int) -> str:
    return f"{number}" if asked == number else f"{asked} (of {number})"


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
