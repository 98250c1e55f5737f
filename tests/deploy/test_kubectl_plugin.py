# SPDX-License-Identifier: Apache-2.0
"""`kubectl ebpflb`, called by the real kubectl, which talks to a fake API server."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from ebpflb.lab.agents import wait_until
from tests.cli.conftest import NEVER
from tests.kit import api_exec

ROOT = Path(__file__).parents[2]
KUBECTL = Path(sys.executable).parent / "kubectl"
OURS = {"app.kubernetes.io/name": "ebpflb"}
SECRET = "pLaNt3d"
LOG = f"Service shop/cart: changed\nAuthorization: Bearer {SECRET}\n"
PODS = [
    api_exec.pod("ebpflb-a", "worker-a", "192.0.2.1", labels=OURS),
    api_exec.pod("ebpflb-b", "worker-b", "192.0.2.2", labels=OURS),
    api_exec.pod("other", "worker-a", "192.0.2.9"),
    api_exec.pod("web-1", "worker-b", "10.244.2.7", "shop"),
    api_exec.pod("host-1", "worker-a", "192.0.2.1", "shop", host=True),
]
# In a pod; tests/cli/test_report.py tests the other files.
REPORT = """
from ebpflb.cli import main
from ebpflb.tools import report
report.ROWS = [row for row in report.ROWS if row.file == "log.txt"]
main()
"""
LISTS = {
    "ebpflb-a": "SERVICE    USED  PROBLEMS\nshop/cart     2\nshop/web     12  no endpoint (VIP)\n",
    "ebpflb-b": "SERVICE               USED  PROBLEMS\nshop/a-longer-name       3  is set aside\n",
}


class Done(NamedTuple):
    status: int
    out: str
    err: str


class Kubectl:
    """kubectl with the plugin in its PATH; ``asked`` has the commands that pods were sent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[str, str]] = []
        self.logs_read = 0
        self.logs, self.reports = threading.Event(), threading.Event()  # pods wait for them
        self.logs.set()
        self.reports.set()
        self.url = ""

    def execute(self, pod: str, command: list[str], stdin: bytes) -> tuple[int, bytes, bytes]:
        self.asked.append((pod, " ".join(command[1:])))
        assert command[0] == "ebpflb"
        if command[1:3] == ["services", "list"] and "json" not in command:
            return 0, LISTS[pod].encode(), b"a note\n"
        if command[1] == "services":
            item = {"service": f"shop/{pod}"}
            return 0, json.dumps({"items": [item], "notes": ["n"]}).encode(), b""
        if command[1] == "status":
            return (3, b"ebpflb 1.0\nDEGRADED\n", b"") if pod == "ebpflb-b" else (0, b"OK\n", b"")
        if command[1] == "monitor":
            self.reports.wait()
            return 0, b"TIME  VERDICT\n14:03:10  " + pod.encode() + b"\n", b""
        if command[1] == "report":
            environment = {**os.environ, "EBPFLB_STATE_DIR": str(NEVER)}
            self.reports.wait()
            words = [sys.executable, "-P", "-c", REPORT, *command[1:]]
            done = subprocess.run(
                words, input=stdin, capture_output=True, env=environment, check=False
            )
            return done.returncode, done.stdout, done.stderr
        return 0, b"STEP  WHAT\nverdict  ok\n", b""

    def log(self) -> str:
        self.logs_read += 1
        self.logs.wait()
        return LOG

    def words(self, *words: str) -> list[str]:
        return [str(KUBECTL), "ebpflb", f"--kubeconfig={self.folder / 'config'}", *words]

    @property
    def environment(self) -> dict[str, str]:
        path = f"{ROOT / 'deploy/kubectl'}:{KUBECTL.parent}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "HOME": str(self.folder)}

    def __call__(self, *words: str) -> Done:
        done = subprocess.run(
            self.words(*words),
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def pods() -> list[api_exec.Pod]:
    return PODS


@pytest.fixture
def kubectl(tmp_path: Path, pods: list[api_exec.Pod]) -> Iterator[Kubectl]:
    made = Kubectl(tmp_path)
    with api_exec.serving(pods, made.execute, made.log) as url:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": ""}}],
            "current-context": "c",
        }
        (tmp_path / "config").write_text(json.dumps(config))
        yield made


def test_tables_become_one(kubectl: Kubectl) -> None:
    """The table has a column NODE and is aligned again; each stderr line has the node's name."""
    done = kubectl("services", "list", "-n", "shop")
    assert done.status == 0
    assert done.out.splitlines() == [
        "NODE      SERVICE             USED  PROBLEMS",
        "worker-a  shop/cart           2",
        "worker-a  shop/web            12    no endpoint (VIP)",
        "worker-b  shop/a-longer-name  3     is set aside",
    ]
    assert done.err == "worker-a: a note\nworker-b: a note\n"
    assert sorted(kubectl.asked) == [(f"ebpflb-{it}", "services list -n shop") for it in "ab"]


def test_json_becomes_one_list(kubectl: Kubectl) -> None:
    found = json.loads(kubectl("services", "list", "-o", "json").out)
    assert [it["node_asked"] for it in found["items"]] == ["worker-a", "worker-b"]
    assert found["notes"] == ["worker-a: n", "worker-b: n"]


def test_exit_status_is_the_greatest(kubectl: Kubectl) -> None:
    """The exit status is the greatest of all nodes. Each line of text begins with the node's name;
    --node asks only some nodes.
    """
    done = kubectl("status")
    assert (done.status, done.err) == (3, "")
    assert done.out.splitlines() == ["worker-a  OK", "worker-b  ebpflb 1.0", "worker-b  DEGRADED"]
    assert kubectl("--node", "worker-a", "status") == Done(0, "worker-a  OK\n", "")
    assert kubectl("--node=worker-x", "status").err == "no pod of ebpflb is on node worker-x\n"


def test_each_line_of_a_stream_names_its_node(kubectl: Kubectl) -> None:
    lines = kubectl("monitor", "--count", "1").out.splitlines()
    assert lines[0] == "NODE      TIME  VERDICT"
    assert sorted(lines[1:]) == [f"worker-{it}  14:03:10  ebpflb-{it}" for it in "ab"]


@pytest.mark.parametrize(
    ("client", "pod", "sent"),
    [
        ("web-1", "ebpflb-b", "10.244.2.7"),
        ("shop/web-1", "ebpflb-b", "10.244.2.7"),
        ("10.244.2.7", "ebpflb-b", "10.244.2.7"),
        ("shop/host-1", "ebpflb-a", "node"),
    ],
)
def test_explain_on_the_node_of_the_pod(kubectl: Kubectl, client: str, pod: str, sent: str) -> None:
    """A pod without a namespace is in the Service's namespace; the agent finds it by its
    address.
    """
    done = kubectl("explain", "shop/cart:http", "--from", client)
    assert (done.status, done.err) == (0, "")
    assert kubectl.asked == [(pod, f"explain shop/cart:http --from={sent}")]


def test_explain_without_a_pod_asks_all(kubectl: Kubectl) -> None:
    kubectl("explain", "shop/cart", "--from=outside")
    assert len(kubectl.asked) == 2
    assert 'pods "no-1" not found' in kubectl("explain", "shop/cart", "--from", "no-1").err


def test_what_changes_something_names_its_nodes(kubectl: Kubectl) -> None:
    """doctor needs named nodes, because it connects through all their paths; cleanup is refused."""
    assert "name nodes with --node, or --all" in kubectl("doctor").err
    assert kubectl("doctor", "--all", "-q").status == 0
    assert sorted(kubectl.asked) == [(f"ebpflb-{it}", "doctor -q") for it in "ab"]
    assert kubectl("doctor", "--no-canary").status == 0
    assert kubectl("flows", "flush", "--all").status == 2
    assert kubectl("cleanup").status == 2 and kubectl("run").status == 2
    assert kubectl("--help").status == 0
    assert "use -o json" in kubectl("status", "-o", "yaml").err


@pytest.mark.parametrize("anonymous", [False, True])
def test_report_of_all_nodes(kubectl: Kubectl, anonymous: bool) -> None:
    """One file, private to its owner, has the archive of each node with the log of its pod."""
    done = kubectl("report", "--file=all.tar", *["--no-names"] * anonymous)
    assert (done.status, done.out) == (0, "all.tar\n"), done.err
    assert {it.name for it in kubectl.folder.iterdir()} >= {"all.tar", "config"}
    assert (kubectl.folder / "all.tar").stat().st_mode & 0o777 == 0o600
    names = ["node-1", "node-2"] if anonymous else ["worker-a", "worker-b"]
    logs = []
    with tarfile.open(kubectl.folder / "all.tar") as whole:
        assert whole.getnames() == [*(f"{it}.tar.gz" for it in names), "README.txt"]
        for name in names:
            inner = whole.extractfile(f"{name}.tar.gz")
            assert inner
            with tarfile.open(fileobj=io.BytesIO(inner.read())) as archive:
                log = archive.extractfile("ebpflb-report/log.txt")
                assert log
                logs.append(log.read().decode())
    assert SECRET not in logs[0] and logs[0].count("Authorization: ") == 2  # --previous, and now
    assert ("shop/cart" in logs[0]) != anonymous
    assert logs[0] == logs[1]  # with one key


@pytest.mark.parametrize(
    "pods", [[PODS[0], api_exec.pod("ebpflb-b", "worker-b", "", labels=OURS, runs=False)]]
)
def test_a_pod_that_does_not_run(kubectl: Kubectl) -> None:
    """The pod that does not run is named, the other pods are asked, and the exit status is not
    0.
    """
    done = kubectl("status")
    assert (done.status, done.out) == (1, "worker-a  OK\n")
    assert done.err == "worker-b: not asked: ebpflb-b does not run (Running)\n"
    done = kubectl("report", "--file", "all.tar")
    with tarfile.open(kubectl.folder / "all.tar") as whole:
        assert whole.getnames() == ["worker-a.tar.gz", "README.txt"]
        said = whole.extractfile("README.txt")
        assert said and b"worker-b: its pod does not run" in said.read()


@pytest.mark.parametrize("pods", [[]])
def test_no_pods(kubectl: Kubectl) -> None:
    assert "no pods app.kubernetes.io/name=ebpflb in namespace kube-system" in kubectl("status").err


@pytest.mark.parametrize("amid", ["logs", "reports"])
def test_ctrl_c_leaves_nothing(kubectl: Kubectl, amid: str) -> None:
    """Neither a file nor a command that begins afterwards."""
    waits = getattr(kubectl, amid)
    waits.clear()
    # A shell that starts the tests in the background has SIGINT ignored.
    command = ["env", "--default-signal=INT", *kubectl.words("report")]
    with subprocess.Popen(
        command, env=kubectl.environment, cwd=kubectl.folder, start_new_session=True
    ) as process:
        wait_until(
            "pods are asked", lambda: bool(kubectl.asked or (amid == "logs" and kubectl.logs_read))
        )
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        waits.set()  # a pod may have been asked just then
        assert process.wait(60) == 130
    assert amid == "reports" or not kubectl.asked
    assert [
        it.name for it in kubectl.folder.iterdir() if "report" in it.name or ".ebpflb" in it.name
    ] == []


def test_a_stream_ends_with_the_plugin(kubectl: Kubectl) -> None:
    kubectl.reports.clear()
    with subprocess.Popen(kubectl.words("monitor"), env=kubectl.environment) as process:
        wait_until("pods are asked", lambda: len(kubectl.asked) == 2)
        process.terminate()
        try:
            assert process.wait(60) == 1
        finally:
            kubectl.reports.set()
