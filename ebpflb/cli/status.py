# SPDX-License-Identifier: Apache-2.0
"""``ebpflb status``: whether an agent runs, whether the hooks serve, and what is wrong."""

import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from ebpflb.cli import common
from ebpflb.cli.output import output_option, print_as
from ebpflb.datapath.attach import cgroup_links, device_programs
from ebpflb.datapath.maps.state_dir import StateDir
from ebpflb.datapath.maps.sweep import FLOW_MAPS, FlowTable
from ebpflb.errors import NodeError
from ebpflb.node import ctnetlink, kube_proxy_watch
from ebpflb.serve import status as agent_status
from ebpflb.serve.metrics_conntrack import count_connections
from ebpflb.serve.status import AgentStatus

_LABEL = 18  # columns of the longest label


@click.command()
@common.state_dir
@common.run_dir
@output_option
def status(state_dir: Path, run_dir: Path, output: str) -> None:
    """Show the state of the agent and of the hooks.

    Exit status 0 if an agent is running, the hooks are attached and there is no error.
    """
    common.require_capabilities()
    paths = common.paths(state_dir, run_dir)
    published = agent_status.read(paths)
    runs = agent_status.is_running(paths)
    state = StateDir(paths.state)
    socket_hooks = sorted(cgroup_links.attached(state))
    ahead = device_programs.programs_before_ours(state)
    report = {
        "agent": "runs" if runs else "does not run",
        "socket_hooks": socket_hooks,
        "devices": device_programs.attached_devices(state),
        "programs_ahead": {device: ", ".join(others) for device, others in ahead.items()},
        "flows": _flows(state_dir),
        "conntrack": _conntrack(state_dir),
        **(msgspec.to_builtins(published) if published else {}),
        "kube_proxy": _kube_proxy(published if runs else None),
    }
    if output == "table":
        _print(report)
    else:
        print_as(output, report)
    sys.exit(0 if runs and socket_hooks and published and _is_healthy(published) else 1)


def _flows(state_dir: Path) -> dict[str, dict[str, int]]:
    """Map of flows -> what its sweeps have removed and left; empty where there are no maps."""
    try:
        with common.pinned_maps(state_dir) as maps:
            return {name: FlowTable(maps, name).numbers._asdict() for name in FLOW_MAPS}
    except NodeError:
        return {}


def _conntrack(state_dir: Path) -> dict[str, int]:
    """Its entries of all kinds, and those that are flows; empty where nothing is tracked."""
    if not ctnetlink.count():
        return {}
    numbers = {"entries": ctnetlink.count(), "limit": ctnetlink.limit()}
    try:
        with common.pinned_maps(state_dir) as maps:
            return {"flows": count_connections(maps).total(), **numbers}
    except NodeError:
        return numbers


def _kube_proxy(published: AgentStatus | None) -> str | None:
    """Where only rules can be seen, the running agent may know that they have come back."""
    try:
        found = kube_proxy_watch.detect()
    except NodeError as error:
        return f"cannot be checked: {error}"
    if published and published.kube_proxy and found.rules and not found.running:
        return published.kube_proxy
    return found.message


def _is_healthy(published: AgentStatus) -> bool:
    wrong = (
        published.source_errors
        or published.invalid_objects
        or published.not_programmed
        or published.devices_not_served
        or published.sync_error
    )
    current = published.programs == agent_status.CURRENT_PROGRAMS
    return published.lists_complete and current and not wrong


def _print(report: dict[str, Any]) -> None:
    for name, value in report.items():
        label = name.replace("_", " ").ljust(_LABEL)
        if isinstance(value, dict):
            for item, text in value.items():
                click.echo(f"{label} {item}: {_text(text)}")
        elif value not in (None, []):
            click.echo(f"{label} {' '.join(value) if isinstance(value, list) else _text(value)}")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{word} {number}" for word, number in value.items())
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
