# SPDX-License-Identifier: Apache-2.0
"""This node compared with what it should be, for ``ebpflb audit`` and ``ebpflb doctor``."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ebpflb.errors import ClusterError, NodeError, one_line
from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.map_writer import capacity_of
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.model.drift import Drift
from ebpflb.options import Options, Paths
from ebpflb.plan.allocators import Capacity
from ebpflb.plan.space import Shares
from ebpflb.serve import status as agent_status
from ebpflb.serve.recorded_options import read_recorded
from ebpflb.serve.status import AgentStatus
from ebpflb.tools import fresh_list, node_audit, pins
from ebpflb.tools.node_audit import Damage, Planned

AGAIN_SECONDS = 1.0  # until it looks again at what differs: an agent may have been writing it


class Compared(NamedTuple):
    """``not_listed``: why the cluster's objects could not be compared, if so."""

    drift: list[Drift]
    not_listed: str


def compare(paths: Paths, cgroup_root: Path | None) -> Compared:
    """What differs twice in a row. Raises EbpflbError where it cannot be found out."""
    published = agent_status.read(paths)
    options = _options(published, paths)
    cgroup = cgroup_links.cgroup_root(cgroup_root or (options.cgroup if options else None))
    found = _compare(paths.state, cgroup, options)
    if not found.drift:
        return found
    time.sleep(AGAIN_SECONDS)
    again = _compare(paths.state, cgroup, options)
    drift = sorted(set(found.drift) & set(again.drift))
    return Compared(drift, found.not_listed or again.not_listed)


def _options(published: AgentStatus | None, paths: Paths) -> Options | None:
    """Of the last agent. Raises NodeError for what are none."""
    if not (published and published.options):
        return None
    try:
        return read_recorded(published.options, paths)
    except ValueError as error:
        raise NodeError(f"{paths.status_file}: {one_line(str(error))}") from None


def _compare(state: Path, cgroup: Path, options: Options | None) -> Compared:
    """All that differs now. Raises EbpflbError where it cannot be found out."""
    not_listed, asked = "" if options else "no agent's status here; see --run-dir", Planned([])
    with pins.pinned_maps(state) as maps:
        pins.require_namespace(maps)
        found = _try(lambda: list(node_audit.attachments(StateDir(state), cgroup, maps)))
        contents = node_audit.contents(maps)
        found += node_audit.wrong_bits(maps, contents)
        damage = node_audit.damage(maps, contents)
        found += damage.drifts
        found += node_audit.inconsistent(maps, damage.contents)
        if options is not None:
            try:
                asked = _not_as_asked(options, damage, capacity_of(maps))
            except ClusterError as error:
                not_listed = str(error)
        found += asked.drifts
        found += node_audit.table(maps, options, damage, asked.ids)
        found += node_audit.in_flowtable(maps)
    return Compared(found, not_listed)


def _not_as_asked(options: Options, damage: Damage, capacity: Capacity) -> Planned:
    """Without entries of backend_slots that contradict the slots: these are named already."""
    contents = replace(damage.contents, wrong_backend_slots=[])
    cluster, shares = fresh_list.listed(options), Shares(options.namespace_share)
    missing = fresh_list.missing(cluster, contents, capacity, shares, damage.names)
    return node_audit.planned(missing.plan, contents.entries, missing.entries)


def _try(look: Callable[[], list[Drift]]) -> list[Drift]:
    try:
        return look()
    except OSError as error:
        raise NodeError(f"{error.filename}: {error.strerror}") from error
