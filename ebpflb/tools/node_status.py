# SPDX-License-Identifier: Apache-2.0
"""The state of this node as `ebpflb status` shows it."""

import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ebpflb import files
from ebpflb.errors import NodeError
from ebpflb.kernel.attach import cgroup_links, device_programs
from ebpflb.kernel.attach.cgroup_links import HeldLinks
from ebpflb.kernel.maps import state_dir
from ebpflb.kernel.maps.state_dir import StateDir, mount_of, state_directories, why_hidden
from ebpflb.kernel.maps.sweep import FLOW_MAPS, FlowTable
from ebpflb.kernel.netfilter import conntrack, nft
from ebpflb.kernel.netfilter.table import TABLE
from ebpflb.kernel.node import kube_proxy
from ebpflb.model.devices import Device
from ebpflb.model.kube_proxy import RULES_RETURNED, Detection
from ebpflb.options import Paths
from ebpflb.serve import status as agent_status
from ebpflb.serve.conditions import Facts, judge
from ebpflb.serve.status import AgentStatus
from ebpflb.tools import ask, pins
from ebpflb.tools.firewall import dropping

_NO_TABLE = (
    f"the nft table {TABLE.family} {TABLE.table} was removed: no packet is translated, and "
    "translated connections have ended; start the agent"
)


class NodeStatus(NamedTuple):
    """The facts behind the verdict, the state found on the node, and the rest of the published
    status.
    """

    facts: Facts
    node: dict[str, Any]
    published: dict[str, Any]

    def as_data(self) -> dict[str, Any]:
        """The status as `-o json` prints it."""
        verdict, reasons = judge(self.facts)
        heads = {"verdict": verdict, "reasons": [reason._asdict() for reason in reasons]}
        running = {"agent": "runs" if self.facts.runs else "does not run"}
        return {**heads, **running, **self.node, **self.published}


def read_status(paths: Paths) -> NodeStatus:
    """Return the state. Raises NodeError if the state directory cannot be seen, KernelError or
    OSError.
    """
    facts = facts_of(paths)
    _require_seen(facts)
    node = _node(paths, StateDir(paths.state), facts)
    published = _published(facts.published).items()
    return NodeStatus(facts, node, {name: value for name, value in published if name not in node})


def facts_of(paths: Paths) -> Facts:
    """Return the facts on which the verdict on this node rests."""
    runs, pulse, hangs = agent_status.is_running(paths), None, False
    if runs:
        try:
            pulse = ask.pulse(paths)
        except ask.Hangs:
            hangs = True
    return Facts(
        paths=paths,
        runs=runs,
        socket_hooks=sorted(cgroup_links.attached(StateDir(paths.state))),
        published=agent_status.read(paths),
        now=datetime.now(UTC),
        forwarding={str(each): each.now for each in dropping(paths.state)},
        pulse=pulse,
        hangs=hangs,
        conntrack=(conntrack.count(), conntrack.limit()),
        overruled="" if runs else overruled(paths.state),
        table="" if runs else _table(paths.state),
        faults=[] if runs else _faults(paths.state),
    )


def _faults(path: Path) -> list[str]:
    """Return the missing links, programs and pins; nothing if no socket hook is attached.

    The devices that should have programs are those of the map `devices`.
    """
    state, names = StateDir(path), dict(socket.if_nameindex())
    if not cgroup_links.attached(state):
        return []
    found = cgroup_links.faults(state, None)
    try:
        with pins.pinned_maps(path) as maps:
            wanted = [] if pins.why_elsewhere(maps) else sorted(maps["devices"].items())
            for index, _ in wanted:
                if index in names:
                    device = Device(index, names[index], False, True, 0, (), ())
                    attacher = device_programs.attacher(state)
                    found += attacher.faults(device, {}, HeldLinks(), {})
    except NodeError as error:
        return [*map(str, found), str(error)]
    return [*map(str, found)]


def _table(state: Path) -> str:
    """Return what is wrong with the engine's nft table; only a running agent can repair it."""
    with pins.maps_if_any(state) as maps:
        if maps is None or pins.why_elsewhere(maps):
            return ""
        flags = maps["settings"].get(0).flags
        if "netfilter" not in flags or "shadow" in flags:
            return ""
    try:
        return "" if nft.exists(TABLE) else _NO_TABLE
    except NodeError as error:
        return f"unknown whether packets are translated: {error}"


def _published(status: AgentStatus | None) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(status) if status else {}
    return found


def _require_seen(facts: Facts) -> None:
    """Raise NodeError if the state directory cannot be seen from here.

    A node without any state is DOWN, which is no error. A running agent keeps its programs attached
    even if the directory cannot be seen.
    """
    mount, kind = mount_of(facts.paths.state)
    is_hidden = kind != "bpf" or (not facts.published and state_directories(mount))
    if why_hidden(facts.paths.state) or (is_hidden and not facts.runs):
        pins.require_state_directory(facts.paths.state)


def _node(paths: Paths, state: StateDir, facts: Facts) -> dict[str, Any]:
    """Return the state found on the node itself, whether an agent runs or not."""
    try:
        with pins.pinned_maps(paths.state) as maps:
            flows = {name: FlowTable(maps, name).numbers._asdict() for name in FLOW_MAPS}
            elsewhere = pins.why_elsewhere(maps)
    except NodeError:
        flows, elsewhere = {}, ""
    seen = {"maps": state.foreign_maps(), "socket_hooks": facts.socket_hooks, "flows": flows}
    if elsewhere:
        return seen | {"network": f"unknown: {elsewhere}"}
    ahead = device_programs.others_programs(state).before
    entries, limit = facts.conntrack
    return seen | {
        "devices": device_programs.attached_devices(state),
        "other_programs_first": {device: ", ".join(others) for device, others in ahead.items()},
        "conntrack": {"entries": entries, "limit": limit} if entries else {},
        "forwarding": dict(
            it.split(": ", 1) for it, is_now in facts.forwarding.items() if not is_now
        ),
        "kube_proxy": _kube_proxy(paths.state, facts.published if facts.runs else None),
    }


def _kube_proxy(state: Path, published: AgentStatus | None) -> str | None:
    """Return the current state of kube-proxy; the agent's published state may be a minute old.

    Only the agent knows whether kube-proxy's rules were gone before.
    """
    try:
        found = detect(state)
    except NodeError as error:
        return f"cannot be checked: {error}"
    if published:
        found = found._replace(left_to_it=published.left_to_kube_proxy)
    if published and not published.left_to_kube_proxy:
        were_gone = not published.kube_proxy or RULES_RETURNED in published.kube_proxy
        found = found._replace(rules_returned=bool(found.rules) and were_gone)
    return found.message


# Whether kube-proxy runs on this node, and whether programs without an agent overrule it.


def detect(state: Path) -> Detection:
    """Return what can be detected of kube-proxy, and whether this state directory's programs run
    without an agent.

    Raises NodeError if something cannot be read.
    """
    return kube_proxy.detect()._replace(unattended=unattended(state))


def overruled(state: Path) -> str:
    """Return a line for the operator if kube-proxy has no effect because of our programs;
    else "".
    """
    try:
        found = detect(state)
    except NodeError:
        return ""
    return found.log_message or "" if found.is_overruled else ""


def unattended(state: Path) -> str:
    """Return, in words, when an agent was last seen, if its programs run without one.

    Return "" if an agent runs, or if no programs are attached to sockets.
    """
    if files.is_locked(state) or not cgroup_links.attached(StateDir(state)):
        return ""
    paths = state_dir.read_record(state) or Paths(state)
    try:
        written = datetime.fromtimestamp(paths.status_file.stat().st_mtime).astimezone()
    except OSError:
        return f"there is no status of one in {paths.run}"
    return f"the last one wrote its status at {written.isoformat(timespec='seconds')}"
