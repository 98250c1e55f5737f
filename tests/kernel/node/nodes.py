# SPDX-License-Identifier: Apache-2.0
"""A network namespace with rules of kube-proxy and of other programs."""

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from pyroute2 import netns

from ebpflb.kernel.netfilter.firewall import Tool, tools
from ebpflb.kernel.netfilter.table import NetfilterTable
from ebpflb.kernel.node import kube_proxy
from ebpflb.lab.netns import ip as run_ip
from tests.kernel.node import rules
from tests.kernel.node.rules import FAMILIES


def _works(tool: Tool) -> bool:
    """Whether the tool is installed and the kernel has its tables (Debian 13 lacks the legacy
    tables).
    """
    words = ["unshare", "--net", str(tool.command), "--wait", "--list-rules"]
    return bool(tool.command) and not subprocess.run(words, capture_output=True).returncode


class SharedTable(NetfilterTable):
    """The engine's table as on kernels before 6.9, where other programs can change it."""

    flags = (0,)


TOOLS = [tool for tool in tools() if _works(tool)]


@contextmanager
def fresh(name: str) -> Iterator[None]:
    """Yield a new namespace, which the test's thread has entered."""
    run_ip("netns", "add", name)
    try:
        with entered(name):
            yield
    finally:
        netns.remove(name)


@contextmanager
def entered(name: str) -> Iterator[None]:
    """Enter an existing namespace with the test's thread."""
    netns.pushns(name)
    try:
        yield
    finally:
        netns.popns()


def run(*words: str, said: str = "") -> str:
    """Return the output of a command in this namespace."""
    done = subprocess.run(words, input=said, capture_output=True, text=True, check=False)
    assert not done.returncode, f"{words}: {done.stderr}\n{said}"
    return done.stdout


def load(tool: Tool, *texts: str) -> None:
    """Add these rules after the existing ones."""
    for text in texts:
        said = text.format(**FAMILIES[tool.family], set=set_prefix(tool))
        run(f"{tool.command}-restore", "--noflush", said=said.lstrip())


def set_prefix(tool: Tool) -> str:
    return "KUBE-" if tool.family == "iptables" else "KUBE-6-"


def make_sets(tool: Tool) -> None:
    """Make the sets of the ipvs mode, one set with a member."""
    family = "inet" if tool.family == "iptables" else "inet6"
    start = set_prefix(tool)
    lines = [
        f"create {start}{name} {kind} "
        + ("range 0-65535" if kind == "bitmap:port" else f"family {family}")
        for name, kind in rules.IPVS_SETS.items()
    ]
    run("ipset", "restore", said="\n".join([*lines, f"add {start}NODE-PORT-TCP 30080", ""]))


def load_nft() -> None:
    """Load kube-proxy's tables of both families, and other tables with similar names."""
    for family, where in (("ip", "10.244.1.11"), ("ip6", "[fd00:244:1::11]")):
        pod = FAMILIES["iptables" if family == "ip" else "ip6tables"]["pod"]
        run("nft", "-f", "-", said=rules.NFTABLES_MODE.format(family=family, pod=pod, where=where))


def send() -> None:
    """Send a packet of each family, for rules to count."""
    run("ip", "link", "set", "lo", "up")
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"?", (address, 9))


def translate(address: str, port: int) -> None:
    """Open a UDP flow that netfilter sends to another port of loopback; then remove the rule."""
    run("ip", "link", "set", "lo", "up")
    rule = f"ip daddr {address} udp dport {port} dnat to 127.0.0.1:{port + 1}"
    chain = f"chain c {{\n type nat hook output priority -100\n {rule}\n }}"
    run("nft", "-f", "-", said=f"table ip once {{\n {chain}\n}}\n")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.sendto(b"?", (address, port))
    run("nft", "delete", "table", "ip", "once")


def everything() -> str:
    """Return all rules of this namespace with their counters, without the time of day."""
    return run("nft", "list", "ruleset") + saved()


def saved() -> str:
    """Return all rules of iptables only, whose chains have an order.

    The counters of policies are left out: every iptables-legacy-restore sets them to 0.
    """
    lines = (line for t in TOOLS for line in run(f"{t.command}-save", "-c").splitlines())
    rules = (line.partition(" [")[0] if line.startswith(":") else line for line in lines)
    return "\n".join(line for line in rules if not line.startswith("#"))


def remove() -> list[str]:
    """Remove every leftover of kube-proxy; return what was found."""
    found = kube_proxy.survey().removable
    for leftover in found:
        leftover.remove()
    return [leftover.what for leftover in found]
