# SPDX-License-Identifier: Apache-2.0
"""A node whose FORWARD drops by default, and accepts requests to pods only by kube-proxy's rules.
Every command that checks this reports it, before and after ebpflb starts to serve, until a rule
accepts the requests.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from socket import AF_INET, SOCK_STREAM

import pytest

from tests.kit import answers, kube_proxy_node
from tests.kit.cluster import NODEPORT
from tests.kit.kube_proxy_node import PODS, KubeProxyNode, iptables_nft

SECONDS = 10.0  # in which a segment that was lost is sent again three times
BEFORE = "iptables-nft: FORWARD drops by default, and only kube-proxy's chains accept requests"
AFTER = "iptables-nft: FORWARD drops by default, and no rule accepts requests"


@pytest.fixture(
    params=[
        pytest.param(("flows",), marks=pytest.mark.extended),
        ("netfilter",),
        ("netfilter", "--masquerade-local-backends"),
    ],
    ids=["flows", "netfilter", "masqueraded"],
)
def node(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[KubeProxyNode]:
    with kube_proxy_node.running(tmp_path, *request.param) as made:
        made.agent.paths.state.mkdir()  # commands that miss it point to others' in the bpffs
        iptables_nft(made)
        run(made, "iptables-nft -P FORWARD DROP")
        run(made, "iptables-nft -A FORWARD -i docker0 ! -o docker0 -j ACCEPT")
        yield made


def run(node: KubeProxyNode, command: str) -> None:
    subprocess.run([*node.node.enter, *command.split()], check=True)


def is_served(node: KubeProxyNode) -> bool:
    """Whether a client outside can connect by the NodePort."""
    with node.sockets(node.outside).open(AF_INET, SOCK_STREAM) as client:
        client.settimeout(SECONDS)
        try:
            client.connect((node.node.v4, NODEPORT))
        except TimeoutError:
            return False
    return True


def status(node: KubeProxyNode) -> dict[str, str]:
    """Return the two texts about FORWARD in status, the reason of the verdict and the line; "" if
    there is none.
    """
    found = json.loads(node.ebpflb("status", "-o", "json").stdout)
    reasons = [it["text"] for it in found["reasons"] if it["cause"] == "not forwarded"]
    lines = [f"{tool}: {text}" for tool, text in found["forwarding"].items()]
    return {"reason": "; ".join(reasons), "line": "; ".join(lines)}


def results(node: KubeProxyNode, *words: str) -> str:
    """Return the warnings of `check` or `doctor` about FORWARD."""
    found = answers.results(node.ebpflb(*words, "-o", "json").stdout)
    of_forward = (it for it in found if it["feature"] == "forwarded packets" and not it["ok"])
    return "; ".join(it["detail"] for it in of_forward)


def said(node: KubeProxyNode) -> dict[str, str]:
    """Return the output of every command."""
    dry_run = node.ebpflb("cleanup", "--kube-proxy", "--dry-run").stdout.splitlines()
    return {
        **status(node),
        "check": results(node, "check"),
        "doctor": results(node, "doctor", "--no-canary"),
        "dry run": "; ".join(it[9:] for it in dry_run if it.startswith("warning: ")),
    }


def test_each_command_says_it(node: KubeProxyNode) -> None:
    """Each command reports the drop, and a client outside confirms it."""
    masquerades = "--masquerade-local-backends" in node.agent.options
    assert is_served(node)
    before = said(node)
    assert (
        not before.pop("reason") and [it[: len(BEFORE)] for it in before.values()] == [BEFORE] * 4
    )
    node.agent.start()
    assert is_served(node) == masquerades
    beside = status(node)
    assert beside["line" if masquerades else "reason"].startswith(BEFORE if masquerades else AFTER)
    done = node.ebpflb("cleanup", "--kube-proxy")
    assert f"warning: {AFTER}" in done.stdout
    assert not is_served(node)
    after = said(node)
    assert not after.pop("line") and [it[: len(AFTER)] for it in after.values()] == [AFTER] * 4
    for way in "ds":
        run(node, f"iptables-nft -I FORWARD -{way} {PODS} -j ACCEPT")
    assert is_served(node)
    assert (status(node), results(node, "check")) == ({"reason": "", "line": ""}, "")
