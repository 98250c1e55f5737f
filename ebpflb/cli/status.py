# SPDX-License-Identifier: Apache-2.0
"""``ebpflb status``: is an agent at work, do the hooks serve, is anything wrong."""

import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from ebpflb.cli import common
from ebpflb.cli.output import show
from ebpflb.datapath.attach import cgroup_links, device_programs
from ebpflb.datapath.maps.pins import StateDir
from ebpflb.datapath.maps.sweep import PROTOCOLS, FlowTable
from ebpflb.errors import NodeError
from ebpflb.node import kube_proxy_watch
from ebpflb.serve import status as words_of


@click.command()
@common.state_dir
@common.run_dir
@common.output
def status(state_dir: Path, run_dir: Path, output: str) -> None:
    """Say how it stands. Exit status 0: an agent runs, the hooks serve, nothing is wrong."""
    common.need_rights()
    paths = common.paths(state_dir, run_dir)
    words = words_of.read(paths)
    state = StateDir(paths.state)
    hooks = sorted(cgroup_links.attached(state))
    alive = words_of.alive(paths)
    said = msgspec.to_builtins(words) if words else {}
    report = {
        "agent": "runs" if alive else "does not run",
        "hooks": hooks,
        "devices": device_programs.attached(state),
        "ahead": {name: ", ".join(others) for name, others in device_programs.ahead(state).items()},
        "flows": _flows(state_dir),
        **said,
        "kube_proxy": _kube_proxy(words if alive else None),
    }
    if output == "table":
        _print(report)
    else:
        show(report, output)
    sys.exit(0 if alive and hooks and words and _well(words) else 1)


def _flows(state_dir: Path) -> dict[str, dict[str, int]]:
    """What the sweeps of each map of flows have done and left; nothing where there are no maps."""
    try:
        with common.pinned_maps(state_dir) as maps:
            return {name: FlowTable(maps, name).numbers._asdict() for name in PROTOCOLS}
    except NodeError:
        return {}


def _kube_proxy(words: words_of.AgentStatus | None) -> str | None:
    """Where rules are all that can be seen, the agent may know that they have come back."""
    try:
        found = kube_proxy_watch.detect()
    except NodeError as error:
        return f"cannot be looked at: {error}"
    if words and words.kube_proxy and found.rules and not found.running:
        return words.kube_proxy
    return found.message


def _well(words: words_of.AgentStatus) -> bool:
    lost = words.unplaced or words.unattached
    wrong = words.troubles or words.refused or lost or words.failed
    return words.complete and not wrong and words.programs == "current"


def _print(report: dict[str, Any]) -> None:
    for name, value in report.items():
        if isinstance(value, dict):
            for item, text in value.items():
                click.echo(f"{name:14} {item}: {_text(text)}")
        elif value not in (None, []):
            text = " ".join(value) if isinstance(value, list) else value
            click.echo(f"{name.replace('_', ' '):14} {_text(text)}")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{word} {number}" for word, number in value.items())
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
