# SPDX-License-Identifier: Apache-2.0
"""`ebpflb report`: its content, its omissions, and that it always ends."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ebpflb import redaction
from ebpflb.errors import NodeError, one_line
from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.model import annotations, objects
from ebpflb.model.packet_path import Engine
from ebpflb.options import Paths
from ebpflb.serve import status
from ebpflb.tools import report
from ebpflb.tools.report import ROWS, Pseudonyms, Row, Source, collect
from tests.cli.conftest import Done, Ebpflb
from tests.cli.doctors import on_node
from tests.kit.cluster import Cluster, running
from tests.kit.own_demo import EBPFLB

PLANT = "pLaNt3d"  # begins each secret
PEM = f"-----BEGIN EC PRIVATE KEY-----\n{PLANT}key\n{PLANT}==\n-----END EC PRIVATE KEY-----"
SECRETS = f"""
Authorization: Bearer {PLANT}token
GET failed, header 'authorization: Basic {PLANT}basic='
proxy http://user:{PLANT}proxy@192.0.2.1:3128/ and https://{PLANT}user@proxy
{PEM}
{json.dumps(PEM)}
users: [{{user: {{token: {PLANT}inline, password: "{PLANT} with blanks"}}}}]
    client-key-data: {PLANT}data
    token: |
      {PLANT}block
{{"client-key-data": "{PLANT}json", "id-token": "{PLANT}\\"quoted"}}
{json.dumps(json.dumps({"refresh-token": f"{PLANT}nested"}))}
--token={PLANT}flag AWS_SECRET_ACCESS_KEY={PLANT}aws
Service a/b: metadata.annotations[x.io/y]: "{PLANT}"annotation" is not one of random
"Service a/b": "metadata.annotations[x.io/y]: \\"{PLANT}\\" is not a duration"
"""
NAMES = ("shop", "cart", "cart-7d4f9-x2x4z", "worker-17", "ledger")


def members(data: bytes) -> dict[str, str]:
    """Return the texts of an archive by their names."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        found = {each.name.removeprefix("ebpflb-report/"): each for each in archive.getmembers()}
        assert {each.mode for each in found.values()} == {0o600}
        return {name: archive.extractfile(it).read().decode() for name, it in found.items()}  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield a cluster whose agent serves shop/cart, which has an annotation with an invalid
    value.
    """
    with running(tmp_path_factory.mktemp("cluster"), engine=Engine.NETFILTER) as made:
        port = {"name": "http", "port": 80, "protocol": "TCP"}
        pod = manifests.endpoint(made.web[0].v4, node=NAMES[3], target=NAMES[2])
        made.publish(
            manifests.service(
                "cart",
                ["10.96.0.77"],
                [port],
                namespace="shop",
                annotations={"ebpflb.io/scheduler": f"{PLANT}-annotation"},
            ),
            manifests.endpoint_slice("cart", "IPv4", [pod], [port], namespace="shop"),
        )
        wait_until("the warning is published", lambda: bool(warnings(made)))
        yield made


def warnings(cluster: Cluster) -> object:
    found = status.read(cluster.agent.paths)
    return found and found.object_warnings


def reported(cluster: Cluster, path: Path, *words: str) -> tuple[dict[str, str], Done]:
    command = ["env", f"EBPFLB_CGROUP_ROOT={cluster.node.cgroup}", *EBPFLB, "report"]
    done = on_node(cluster, *command, "--file", str(path), *words, *cluster.agent.where)
    assert done.status == 0, done.err
    assert path.stat().st_mode & 0o777 == 0o600
    return members(path.read_bytes()), done


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the texts of a report of a serving node."""
    folder = tmp_path_factory.mktemp("whole")
    texts, done = reported(cluster, folder / "a.tar.gz", *log_with_secrets(folder))
    assert done.err == ""
    return texts


def log_with_secrets(folder: Path) -> list[str]:
    log = folder / "log"
    log.write_text(f"Service shop/ledger: deleted, from 203.0.113.9\n{SECRETS}")
    return ["--log", str(log)]


def test_everything_is_read_and_no_secret(whole: dict[str, str]) -> None:
    """On a serving node every file is read, and none contains a planted secret."""
    texts = whole
    assert [*texts] == [*(row.file for row in ROWS), "README.md"]
    assert "| status.json | `status`" in texts["README.md"] and "not read" not in texts["README.md"]
    assert PLANT not in json.dumps(texts)
    assert "annotations[ebpflb.io/scheduler]: ***" in texts["status.json"]
    assert json.loads(texts["status.json"])["verdict"] == "OK"
    assert '"service": "shop/cart:http/TCP"' in texts["maps.json"]
    assert "$ ebpflb explain shop/cart:http/tcp --from outside\nSTEP" in texts["explain.txt"]
    for name, word in (
        ("nft.txt", "table inet ebpflb"),
        ("metrics.txt", "ebpflb_service_ports"),
        ("flags.txt", "manifests="),
        ("stacks.txt", "agent/loop.py"),
        ("log.txt", "shop/ledger"),
    ):
        assert word in texts[name], name


def test_names_are_replaced(
    cluster: Cluster,
    whole: dict[str, str],
    ebpflb: Ebpflb,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No file has the real names and addresses."""
    rows = [row._replace(origin=lambda _, text=whole[row.file]: text) for row in ROWS]  # type: ignore[misc]
    monkeypatch.setattr(report, "ROWS", rows)
    assert ebpflb("report", "--no-names", "--file", tmp_path / "a.tar.gz").status == 0
    texts = members((tmp_path / "a.tar.gz").read_bytes())
    del texts["versions.txt"], texts["kernel.txt"]  # "certifi" and paths hold parts of these words
    everything = json.dumps(texts)
    for name in (*NAMES, "10.96.0.77", cluster.web[0].v4, "203.0.113.9", PLANT):
        assert name not in everything, [file for file, text in texts.items() if name in text]
    assert texts["map-counts.txt"] and "name-" in texts["explain.txt"]
    assert named(texts) in texts["explain.txt"]


def named(texts: dict[str, str]) -> str:
    return str(json.loads(texts["services.json"])["items"][-1]["service"])


def test_a_dead_agent(cluster: Cluster, tmp_path: Path) -> None:
    """The README names what only an agent knows, and everything else is there."""
    cluster.agent.stop(signal.SIGKILL)
    try:
        words = ["--service", "shop/cart", *log_with_secrets(tmp_path)]
        texts, done = reported(cluster, tmp_path / "a.tar.gz", *words)
    finally:
        cluster.agent.start()
    lost = "services.json, metrics.txt, configuration.json, flags.txt, stacks.txt"
    assert done.err == f"not read, see its README.md: {lost}\n"
    assert "| metrics.txt | the agent's metrics | not read: no agent runs |" in texts["README.md"]
    assert json.loads(texts["status.json"])["agent"] == "does not run"
    assert (
        '"service": "shop/cart:http/TCP"' in texts["maps.json"]
        and "shop/cart" in texts["explain.txt"]
    )


@pytest.mark.parametrize("row", ROWS, ids=[row.file for row in ROWS])
def test_no_secret_of_any_input(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """No input's secret is in the report."""
    monkeypatch.setattr(report, "ROWS", [row._replace(origin=lambda _: SECRETS)])
    monkeypatch.setattr(redaction, "known_secrets", {})
    data, failed = collect(Source(Paths()), None)
    assert failed == [] and PLANT not in members(data)[row.file]
    assert "proxy http://***@192.0.2.1:3128/" in members(data)[row.file]


@pytest.mark.parametrize("name", sorted(annotations.OF_SERVICES | annotations.OF_SLICES))
def test_no_value_of_an_annotation(name: str) -> None:
    """Warnings about ebpflb's annotations quote values; a report does not contain these."""
    for value in (PLANT, f"{PLANT} x", f"5m,{PLANT}", f'10.0.0.1,{PLANT}" is not', PLANT * 99):
        meta = {"name": "a", "namespace": "b", "annotations": {name: value}}
        service = msgspec.convert({"metadata": meta, "spec": {}}, objects.Service)
        a_slice = {"metadata": meta, "addressType": "IPv4"}
        found = msgspec.convert(a_slice, objects.EndpointSlice)
        said: list[str] = [*annotations.slice_warnings(found)]
        annotations.read(service, "random", "off", (), "off", said)
        annotations.read_weight(found, said)
        texts = [*said, *map(one_line, said), *map(json.dumps, said)]
        assert said and PLANT not in redaction.without_secrets("\n".join(texts))


def test_the_secrets_of_the_agents_kubeconfig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubeconfig's secrets are redacted everywhere, even without a recognizable form."""
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(f"users:\n- user:\n    token: {PLANT}-a\n    password: '{PLANT} b'\n")
    client = {"clientConnection": {"kubeconfig": str(kubeconfig)}}
    texts = {
        "configuration.json": json.dumps({"kubeproxy.config.k8s.io": client}),
        "log.txt": f"a line with {PLANT}-a and {PLANT} b in it",
    }
    rows = [Row(name, "", lambda _, text=text: text) for name, text in texts.items()]  # type: ignore[misc]
    monkeypatch.setattr(report, "ROWS", rows)
    monkeypatch.setattr(redaction, "known_secrets", {})
    data, _ = collect(Source(Paths()), None)
    assert members(data)["log.txt"] == "a line with *** and *** in it"


def test_names_and_addresses_are_replaced() -> None:
    """Names, words that begin with one, addresses and MACs are replaced; other words stay."""
    made = Pseudonyms(b"k", {"shop", "cart", "ip-10-0-0-7.ec2.internal", "status"})

    def name(text: str) -> str:
        return made.replace(f"x {text} x").split()[1]

    assert name("cart-7d4f-x1:").startswith("name-") and name("shop/new:http").endswith(":http")
    assert name("cart.shop.svc:80") == f"{name('cart')}.{name('shop')}.svc:80"
    assert name("shop/cart") == f"{name('shop')}/{name('cart')}"
    assert name("other/new/TCP") == f"{name('other/new')}/TCP" and "new" not in name(
        "other/new/TCP"
    )
    assert "ec2" not in name("ip-10-0-0-7.ec2.internal")
    for text in ('"status": 1', "2026-11-29T08:14:27+00:00", "80/tcp", "1.2.3", "127.0.0.1", "::1",
                 "/sys/fs/bpf/ebpflb", "net/ipv4/ip_forward", "default/kubernetes:https/TCP",
                 "0.0.0.0:10256", "cartoon"):  # fmt: skip
        assert made.replace(text) == text
    v4 = [name(f"{each}") for each in ("10.1.2.3", "10.1.2.4", "10.1.3.3")]
    assert len({*v4}) == 3 and "10.1.2.3" not in v4
    assert [each.rpartition(".")[0] for each in v4[:2]] == [v4[0].rpartition(".")[0]] * 2
    assert name("[fd00:1::7]:53/udp").endswith("]:53/udp") and "fd00" not in name("[fd00:1::7]:53")
    assert name("10.1.2.0/24").startswith(v4[0].rpartition(".")[0])
    assert len(name("02:AA:00:00:00:07")) == 17 and name("02:AA:00:00:00:07") != "02:AA:00:00:00:07"


def test_an_endless_command_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that never ends is ended, because of its output or its time."""
    monkeypatch.setattr(report, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(report, "ROWS", [Row("a", "", lambda _: report._output(["yes"]))])  # noqa: SLF001
    assert members(collect(Source(Paths()), None)[0])["a"].endswith("y\n\n[cut here: 1 MiB]\n")
    monkeypatch.setattr(report, "SECONDS", 0.1)
    with pytest.raises(NodeError, match="did not end within"):
        report._output(["sleep", "600"])  # noqa: SLF001


def test_a_mistake_of_ours_does_not_end_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row("a", "", lambda _: [][0]), Row("b", "", lambda _: "text")]
    monkeypatch.setattr(report, "ROWS", rows)
    data, failed = collect(Source(Paths()), None)
    assert failed == ["a"] and members(data)["b"] == "text"


def commands(pids: list[str]) -> list[str]:
    """Return the command lines of these processes."""
    return [word for pid in pids for word in Path(f"/proc/{pid}/cmdline").read_text().split("\0")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    """No file is left, and soon no process: a process that is just being started ends by itself."""
    words = ["report", "--log", "-"]  # stdin has no end
    # A shell that starts the tests in the background has SIGINT ignored.
    command = ["env", "--default-signal=INT", sys.executable, "-P", "-m", "ebpflb", *words]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until("it runs a command", lambda: "status" in commands(children.read_text().split()))
        begun = children.read_text().split()
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        assert process.wait(60) == 1
    assert [*tmp_path.iterdir()] == []
    wait_until("all have ended", lambda: not any(Path(f"/proc/{pid}").exists() for pid in begun))


def test_not_to_a_terminal(ebpflb: Ebpflb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert "not written to a terminal" in ebpflb("report", "--file", "-").err
