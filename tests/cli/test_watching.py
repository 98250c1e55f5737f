# SPDX-License-Identifier: Apache-2.0
"""`--watch`: a value again, when it has changed, until Ctrl-C."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from tests.cli.conftest import NEVER, Ebpflb
from tests.kit.cluster import NODEPORT, Cluster, endpoint, web


@pytest.fixture(autouse=True)
def published(cluster: Cluster) -> None:
    cluster.publish(web(*map(endpoint, cluster.web), nodeport=NODEPORT))


@contextmanager
def watching(cluster: Cluster, shown: Path, *words: str) -> Iterator[None]:
    """Watch on the node; Ctrl-C ends it, as which exit status 0 counts."""
    # A shell that starts the tests in the background has SIGINT ignored.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "ebpflb", *words]
    watch = [*cluster.node.enter, *command, "--watch", "0.1"]
    with shown.open("w") as out, subprocess.Popen(watch, stdout=out) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0


def test_services(tmp_path: Path, cluster: Cluster, where: list[str]) -> None:
    """A Service that comes."""
    shown = tmp_path / "shown"
    with watching(cluster, shown, "services", "list", *where):
        wait_until("it shows them", lambda: "default/web" in shown.read_text())
        later = manifests.service("later", ["10.96.1.3"], [{"port": 1}])
        cluster.publish(web(*map(endpoint, cluster.web)), [later])
        wait_until("it shows the new one", lambda: "default/later" in shown.read_text())


def test_an_error_ends_it(ebpflb: Ebpflb) -> None:
    """An error prints one line, and there is no second look."""
    done = ebpflb("flows", "list", "--watch", "--state-dir", NEVER)
    assert (done.status, done.out) == (1, "")
    assert len(done.err.splitlines()) == 1
