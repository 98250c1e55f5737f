# SPDX-License-Identifier: Apache-2.0
"""Whether kube-proxy runs on this node, and whether programs without an agent overrule it."""

from datetime import datetime
from pathlib import Path

from ebpflb import files
from ebpflb.errors import NodeError
from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.maps import state_dir
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.node import kube_proxy
from ebpflb.model.kube_proxy import Detection
from ebpflb.options import Paths


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
