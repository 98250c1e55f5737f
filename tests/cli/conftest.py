# SPDX-License-Identifier: Apache-2.0
"""The command line, called like the program `ebpflb`."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pyroute2 import netns

from ebpflb.cli import main
from ebpflb.kernel.maps.state_dir import BPFFS
from ebpflb.kernel.node import namespaces, sysctls
from ebpflb.lab.netns import Namespace
from ebpflb.model.packet_path import Engine
from tests.kit.cluster import Cluster, running


class Done(NamedTuple):
    """A command's exit status and output."""

    status: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The line of a command that fails and says nothing else."""
        assert (self.status, self.out) == (1, "") and self.err.count("\n") == 1, self
        return self.err


Ebpflb = Callable[..., Done]
NEVER = BPFFS / f"ebpflb-test-{os.getpid()}-never"  # a state directory that no agent has made


@pytest.fixture(scope="session")
def own_netns() -> Iterator[str]:
    """Return the name of this worker's network namespace, with loopback up."""
    made = Namespace(f"ebpflb-test-cli-{os.getpid()}")
    made.create()
    yield made.netns
    netns.remove(made.netns)


@pytest.fixture
def network(own_netns: str) -> Iterator[None]:
    """Move this process into ``own_netns``: on the machine there may be a kube-proxy, or another
    worker.
    """
    netns.pushns(own_netns)
    yield
    netns.popns()


@pytest.fixture
def machine_left_alone(network: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a command in this process change no setting of the kernel or of the process."""
    monkeypatch.setattr(sysctls, "set_up_conntrack", lambda *_: None)
    monkeypatch.setattr(namespaces, "adjust_oom_score", lambda *_: None)
    monkeypatch.setattr(namespaces, "raise_file_limit", lambda: None)
    monkeypatch.setattr(sysctls, "reserve_ports", lambda *_: None)


@pytest.fixture
def ebpflb(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, machine_left_alone: None
) -> Ebpflb:
    """Run a command in this process."""

    def run(*words: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["ebpflb", *map(str, words)])
        capsys.readouterr()
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        hooks = sys.excepthook, threading.excepthook
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            sys.excepthook, threading.excepthook = hooks
            for number, handler in before.items():
                signal.signal(number, handler)
        status = ended.value.code
        return Done(status if isinstance(status, int) else 0, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield a node with a running agent, for the tests of this file."""
    with running(tmp_path_factory.mktemp("cluster"), engine=Engine.NETFILTER) as made:
        yield made


@pytest.fixture(scope="module")
def where(cluster: Cluster) -> list[str]:
    """Return --state-dir and --run-dir of the agent."""
    return cluster.agent.where


@pytest.fixture(scope="module")
def state(cluster: Cluster) -> list[str]:
    """Return only --state-dir of the agent."""
    return ["--state-dir", str(cluster.agent.paths.state)]


@pytest.fixture
def nowhere(tmp_path: Path) -> list[str]:
    """Return options of an agent that never ran."""
    return ["--state-dir", str(NEVER), "--run-dir", str(tmp_path / "never")]


@pytest.fixture
def bpffs(tmp_path: Path) -> Iterator[Path]:
    """Return a bpffs that has no state directory yet."""
    folder = tmp_path / "bpffs"
    folder.mkdir()
    subprocess.run(["mount", "-t", "bpf", "bpf", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def would_serve(ebpflb: Ebpflb, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, ...]]:
    """Run `ebpflb run` until it would serve; return the agent's arguments."""
    seen: list[tuple[Any, ...]] = []
    module = import_module("ebpflb.cli.run")
    monkeypatch.setattr(module, "serve_until_stopped", lambda *given: seen.append(given))

    def run(*words: object) -> tuple[Any, ...]:
        done = ebpflb("run", *words)
        assert seen, done.err
        return seen.pop()

    return run
