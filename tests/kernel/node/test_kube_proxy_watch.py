# SPDX-License-Identifier: Apache-2.0
"""A kube-proxy on the node is detected by its process, its answer or its rules.

Our own agent does not count.
"""

import os
from collections.abc import Iterator
from errno import EMFILE
from pathlib import Path
from queue import SimpleQueue
from socket import create_server
from typing import Any

import pytest

from ebpflb.kernel.netfilter import nft
from ebpflb.kernel.node.kube_proxy import KubeProxyWatch, detect
from ebpflb.model.events import SourceStatus
from ebpflb.model.kube_proxy import PROXY_MODE_PORT, PROXY_MODES, Detection
from tests.kernel.node import answering, nodes, rules
from tests.kernel.node.nodes import TOOLS, load, load_nft, run

NAME = f"ebpflb-test-{os.getpid()}-kubeproxy"
WAIT_SECONDS = 60.0  # seconds that news may take


@pytest.fixture(autouse=True)
def netns() -> Iterator[None]:
    with nodes.fresh(NAME):
        run("ip", "link", "set", "lo", "up")
        yield


@pytest.fixture
def emitted() -> Iterator[SimpleQueue[Detection]]:
    """Return the events of a KubeProxyWatch with a short interval."""
    queue: SimpleQueue[Any] = SimpleQueue()
    watcher = KubeProxyWatch(queue.put, 0.01)
    watcher.start()
    yield queue
    watcher.stop()


def test_a_process_called_kube_proxy_counts(tmp_path: Path) -> None:
    """A process called kube-proxy in our network namespace counts."""
    with answering.process(tmp_path) as pid:
        assert detect().pids == (pid,)
        assert detect().running
    assert not detect().pids


def test_process_of_another_node(tmp_path: Path) -> None:
    """A process in another network namespace belongs to another node."""
    with nodes.fresh(f"{NAME}-other"), answering.process(tmp_path) as pid:
        assert detect().pids == (pid,)
        with nodes.entered(NAME):
            assert not detect().pids


@pytest.mark.parametrize("mode", PROXY_MODES)
def test_an_answer_with_a_mode_counts(mode: str) -> None:
    """A program that answers /proxyMode with a mode counts, even without a visible process."""
    with answering.answer(mode):
        assert detect() == Detection(proxy_modes=((f"127.0.0.1:{PROXY_MODE_PORT}", mode),))
        assert detect().running


def test_a_silent_server_causes_no_long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that accepts a connection and does not answer causes no long wait."""
    monkeypatch.setattr("ebpflb.kernel.node.kube_proxy.TIMEOUT", 0.05)
    with create_server(("127.0.0.1", PROXY_MODE_PORT)):
        assert detect() == Detection()


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_chains_alone_are_leftovers(tool: nodes.Tool) -> None:
    """Chains without a process or an answer are leftovers, in each family and variant."""
    load(tool, rules.IPTABLES_MODE)
    assert detect() == Detection(rules=(f"chains of {tool.name}",))
    assert not detect().running


def test_watcher_renewed(emitted: SimpleQueue[Detection]) -> None:
    """Rules that come back mean an invisible kube-proxy, until they are gone again."""
    emitted.get(timeout=WAIT_SECONDS)
    load_nft()
    while not (news := emitted.get(timeout=WAIT_SECONDS)).rules[
        1:
    ]:  # the second family comes later
        assert news.running
    assert news.running
    assert news.log_message is not None
    assert "have come back" in news.log_message
    for family in ("ip", "ip6"):
        nft.delete(nft.Name(family, "kube-proxy"))
    while (news := emitted.get(timeout=WAIT_SECONDS)).rules:
        pass
    assert not news.running


def test_blind_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error the detection stays as it was, and no rule counts as having come back."""
    emitted: SimpleQueue[Detection | SourceStatus] = SimpleQueue()
    watcher = KubeProxyWatch(emitted.put, 0.01)
    load_nft()
    with monkeypatch.context() as blind:
        blind.setattr(nft, "open_nf_tables", refused)
        watcher.start()
        failure = emitted.get(timeout=WAIT_SECONDS)
        assert failure == SourceStatus("kube-proxy", "nf_tables: Too many open files")
    there = emitted.get(timeout=WAIT_SECONDS)
    assert isinstance(there, Detection)
    assert there.rules
    assert emitted.get(timeout=WAIT_SECONDS) == SourceStatus("kube-proxy", None)
    with monkeypatch.context() as blind:
        blind.setattr(nft, "open_nf_tables", refused)
        failure = emitted.get(timeout=WAIT_SECONDS)  # it may be in the middle of a look
        assert isinstance(failure, SourceStatus)
        assert str(failure.error).endswith("Too many open files")
    assert emitted.get(timeout=WAIT_SECONDS) == SourceStatus("kube-proxy", None), (
        "and not that they are new"
    )
    watcher.stop()


def refused() -> None:
    raise OSError(EMFILE, "Too many open files")
