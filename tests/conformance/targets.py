# SPDX-License-Identifier: Apache-2.0
"""The service proxies that the cases are played against.

A target names the command that starts a node's proxy. The proxy watches the API server of its
kubeconfig, serves the network namespace that it runs in, and is ended by SIGTERM. Any other proxy
is a command in which {node}, {kubeconfig}, {folder} and {cgroup} are replaced.
"""

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from string import Formatter

import yaml

from ebpflb.kernel.attach import uplink_program
from ebpflb.kernel.attach.device_programs import unpin_all
from ebpflb.kernel.maps.state_dir import BPFFS, StateDir
from ebpflb.lab import cni
from ebpflb.lab.hosts import Host
from ebpflb.options import Paths
from ebpflb.serve import status
from tests.kit import cells
from tests.kit.cells import REFUSED, SILENT, UNANSWERED, Row


@dataclass(frozen=True)
class Place:
    """A node, the kubeconfig for its proxy, and a folder for the proxy."""

    node: Host
    kubeconfig: Path
    folder: Path


def _nothing(place: Place) -> None:
    """Do nothing, because the proxy only changes its namespace."""


@dataclass(frozen=True)
class Target:
    """``clean`` removes what the proxy leaves outside its namespace. ``differs`` returns the
    proxy's own cell of a row, for a client and a kind of frontend, if the proxy is known to differ.
    ``ready``: whether it has found out about the network what it must know.
    """

    command: Callable[[Place], list[str]]
    clean: Callable[[Place], None] = _nothing
    differs: Callable[[Row, str, str], str] = lambda row, who, kind: ""
    ready: Callable[[Place], bool] = lambda place: True


def _state(place: Place) -> Path:
    return BPFFS / place.node.netns


def ebpflb(packet_path: str, *more: str) -> Target:
    def command(place: Place) -> list[str]:
        options = {
            "kubeconfig": place.kubeconfig,
            "node-name": place.node.name,
            "cgroup-root": place.node.cgroup,
            "state-dir": _state(place),
            "run-dir": place.folder / "run",
            "packet-path": packet_path,
            "cluster-cidr": ",".join(cni.NETWORKS),
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        return [sys.executable, "-P", "-m", "ebpflb", "run", *words, *more]

    def differs(row: Row, who: str, kind: str) -> str:
        return row.cell if row.kube_proxy else ""

    return Target(command, lambda place: unpin_all(StateDir(_state(place))), differs)


def handing_over(packet_path: str) -> Target:
    """Return the target with hand-over: no node drops for policy Local what another one serves."""
    usual = ebpflb(packet_path, "--hand-over=auto")

    def differs(row: Row, who: str, kind: str) -> str:
        is_local = (row.number, row.cell) == (cells.POLICIES["external local"][0], SILENT)
        is_handed = is_local and who == "outside" and kind in ("external", "balancer")
        return "there=client" if is_handed else usual.differs(row, who, kind)

    def ready(place: Place) -> bool:
        said = status.read(Paths(_state(place), place.folder / "run"))
        programs = uplink_program.HAND_OVER.recorded(StateDir(_state(place)))
        return bool(programs and said and said.hand_over.startswith("to 1 "))

    return replace(usual, differs=differs, ready=ready)


def kube_proxy(mode: str) -> Target:
    """Return the target kube-proxy; its binary is KUBE_PROXY, or the one that the shell's path
    has.
    """

    def command(place: Place) -> list[str]:
        path = place.folder / "config.yaml"
        at_once = {"minSyncPeriod": "10ms"}
        config = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": mode,
            "hostnameOverride": place.node.name,
            "clientConnection": {
                "kubeconfig": str(place.kubeconfig),
                "contentType": "application/json",
            },
            "featureGates": {"NFTablesProxyMode": True} if mode == "nftables" else {},
            "clusterCIDR": ",".join(cni.NETWORKS),
            "conntrack": {"maxPerCore": 0, "min": 0},
            "iptables": at_once,
            "nftables": at_once,
        }
        path.write_text(yaml.safe_dump(config))
        return [os.environ.get("KUBE_PROXY") or "kube-proxy", f"--config={path}"]

    def differs(row: Row, who: str, kind: str) -> str:
        """Return the difference: kube-proxy leaves unknown ports to routers (kube-proxy.md 12)."""
        own = who == "near" and kind in ("external", "balancer")
        refused = mode == "iptables" and row.cell == REFUSED
        return UNANSWERED if refused and (own or kind.endswith("+1")) else ""

    return Target(command, differs=differs)


WORDS = ("node", "kubeconfig", "folder", "cgroup")


def other(template: str) -> Target:
    """Return a target by its command. Raises ValueError if it is empty, or braces are wrong."""
    words = shlex.split(template)
    names = {name for word in words for _, name, *_ in Formatter().parse(word) if name is not None}
    if not words or not names <= {*WORDS}:
        known = ", ".join(f"{{{word}}}" for word in WORDS)
        raise ValueError(f"a command is needed; in braces it may have only {known}")

    def command(place: Place) -> list[str]:
        values = place.node.name, place.kubeconfig, place.folder, place.node.cgroup
        return [word.format(**dict(zip(WORDS, values, strict=True))) for word in words]

    return Target(command)


TARGETS = {
    "ebpflb-netfilter": ebpflb("netfilter"),
    "ebpflb-flows": ebpflb("flows"),
    "ebpflb-masquerading": ebpflb("netfilter", "--masquerade-local-backends"),
    "ebpflb-hand-over": handing_over("netfilter"),
    "ebpflb-hand-over-flows": handing_over("flows"),
    "kube-proxy-nftables": kube_proxy("nftables"),
    "kube-proxy-iptables": kube_proxy("iptables"),
}


def named(text: str) -> Target:
    """Return one of TARGETS, or the proxy of this command. Raises ValueError as ``other`` does."""
    return TARGETS.get(text) or other(text)
