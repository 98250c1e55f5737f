# SPDX-License-Identifier: Apache-2.0
"""`ebpflb check`: whether this node can run ebpflb, and what to do about missing features."""

import gzip
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest

from ebpflb.errors import NodeError
from ebpflb.kernel import probe
from ebpflb.kernel.attach import cgroup_links, device_programs, tcx
from ebpflb.kernel.netfilter import firewall, nft
from ebpflb.kernel.node import namespaces, sock_diag
from ebpflb.tools import check
from tests.cli.conftest import NEVER, Ebpflb
from tests.kit import answers

FEATURES = [
    "capabilities", "monotonic clock",
    "BCC", "bpffs", "cgroup v2", "kernel hooks",
    "tcx",
    "clsact filters",
    "errno from hooks", "destroying UDP sockets", "other programs at the hooks",
    "programs before ebpflb's at devices", "firewall rules",
]  # fmt: skip
AS_NOBODY = """
import importlib, os, sys
from ebpflb.cli import main
importlib.import_module(f"ebpflb.cli.{sys.argv[1]}")
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
main()
"""


def as_nobody(*words: str) -> "subprocess.CompletedProcess[str]":
    """Change to the user nobody after the imports, which that user may be unable to read."""
    command = [sys.executable, "-c", AS_NOBODY, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def missing(output: str) -> set[str]:
    return {it["feature"] for it in answers.results(output) if it["required"] and not it["ok"]}


def test_this_machine_passes(ebpflb: Ebpflb) -> None:
    done = ebpflb("check", "--state-dir", NEVER)
    assert (done.status, done.err) == (0, "")
    for feature in FEATURES:
        assert feature in done.out
    assert "MISSING" not in done.out


def test_a_time_namespace() -> None:
    """A time namespace fails the check, as programs count by the machine's clock."""
    shifted = ["unshare", "--time", "--monotonic", "1000", sys.executable, "-m", "ebpflb"]
    done = subprocess.run(
        [*shifted, "check", "--state-dir", str(NEVER), "-o", "json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, missing(done.stdout)) == (1, {"monotonic clock"})


def test_each_feature_has_a_row(ebpflb: Ebpflb) -> None:
    """Each feature has a row; -o wide adds the remedy; --no-headers prints rows only, without
    sentences.
    """
    done = ebpflb("check", "--state-dir", NEVER)
    assert done.out.split()[:3] == ["RESULT", "CHECK", "FOUND"]
    wide = ebpflb("check", "--state-dir", NEVER, "-o", "wide").out.splitlines()
    rows = answers.results(ebpflb("check", "--state-dir", NEVER, "-o", "json").out)
    for row in rows:
        named = rf"\S+ +{re.escape(row['feature'])}  "
        assert sum(bool(re.match(named, line)) for line in wide) == 1
    alone = ebpflb("check", "--state-dir", NEVER, "--no-headers").out.splitlines()
    assert len(alone) == len(rows)


def test_leaves_nothing(ebpflb: Ebpflb) -> None:
    """The check leaves no attachment and no object behind."""
    before = cgroup_links.foreign_programs(cgroup_links.cgroup_root(), ())
    ebpflb("check", "--state-dir", NEVER)
    assert cgroup_links.foreign_programs(cgroup_links.cgroup_root(), ()) == before
    assert not NEVER.exists()


def firewall_rules(ebpflb: Ebpflb) -> list[dict[str, Any]]:
    done = ebpflb("check", "--state-dir", NEVER, "-o", "json")
    assert done.status == 0
    return [each for each in answers.results(done.out) if each["feature"] == "firewall rules"]


def test_rules_that_cannot_be_read(ebpflb: Ebpflb, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that a tool cannot read give one line, and no failure."""
    says = "Operation not permitted (you must be root)"

    def refuse(command: list[str]) -> str:
        raise NodeError(f"{command[0]}: {says}")

    monkeypatch.setattr(firewall, "run", refuse)
    monkeypatch.setattr(nft, "tables_in_force", lambda: {nft.Name("inet", "site")})
    found = firewall_rules(ebpflb)
    assert f"table inet site: nft: {says}" in [each["detail"] for each in found]
    assert all(each["remedy"] for each in found if not each["ok"])


LACKS = [
    (tcx, "works", False, "tcx", "clsact filters are used instead"),
    (probe, "clsact_filters", False, "clsact filters", "required without tcx"),
    (probe, "set_retval", False, "errno from hooks", "bind() to a NodePort succeeds"),
    (probe, "coarse_clock", False, "coarse clock", "the exact clock"),
    (probe, "route_source", False, "source of a route", "own address"),
    (namespaces, "own_cookie", None, "SO_NETNS_COOKIE", "a program attached briefly"),
    (sock_diag, "can_destroy", False, "destroying UDP sockets", "keep a removed endpoint"),
    (
        namespaces,
        "capabilities",
        set(namespaces.NEEDED_CAPABILITIES),
        "listing pods' UDP sockets",
        "removed backend",
    ),
    (
        cgroup_links,
        "foreign_programs",
        {"connect4": ["mine #5"]},
        "other programs at the hooks",
        "check what they do: a filter may refuse connections",
    ),
    (
        device_programs,
        "others_programs",
        device_programs.OthersPrograms({"eth0": ["bpf mine"]}, {}),
        "before ebpflb's at devices",
        "may drop or redirect",
    ),
    (
        device_programs,
        "others_programs",
        device_programs.OthersPrograms({}, {"eth0": ["bpf mine"]}),
        "after ebpflb's at devices",
        "they run after ebpflb",
    ),
]


@pytest.mark.skipif(not tcx.works(), reason="without tcx the rest of it is needed")
@pytest.mark.parametrize(("module", "name", "answer", "feature", "lost"), LACKS)
def test_way_round(
    ebpflb: Ebpflb,
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    name: str,
    answer: object,
    feature: str,
    lost: str,
) -> None:
    """If an optional feature is missing, the exit status is 0 and the output says what does not
    work.
    """
    monkeypatch.setattr(module, name, lambda *_: answer)
    done = ebpflb("check", "--state-dir", NEVER, "-o", "wide")
    assert done.status == 0
    (line,) = [line for line in done.out.splitlines() if f" {feature} " in f"{line} "]
    assert lost in line


WITH_LOCK, LOCK = "CONFIG_PREEMPT_RT=y\n", "CONFIG_PREEMPT_RT_NEEDS_BH_LOCK"


@pytest.mark.parametrize(
    ("realtime", "config", "ok", "said"),
    [
        ("", f"# {LOCK} is not set\n", True, "yes"),
        ("1\n", f"{WITH_LOCK}{LOCK}=y\n", True, "yes"),
        ("1\n", WITH_LOCK, True, "yes"),
        ("1\n", f"{WITH_LOCK}# {LOCK} is not set\n", False, f"no: PREEMPT_RT without {LOCK}"),
        ("1\n", None, False, "unknown: "),
    ],
    ids=["no RT", "RT with the lock", "RT before 6.18", "RT without the lock", "RT, unknown"],
)
def test_a_realtime_kernel(
    ebpflb: Ebpflb,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    realtime: str,
    config: str | None,
    ok: bool,
    said: str,
) -> None:
    """A kernel that may handle two packets on a CPU at once is named, with the consequence."""
    (tmp_path / "realtime").write_text(realtime)
    if config is not None:
        (tmp_path / "config.gz").write_bytes(gzip.compress(config.encode()))
    monkeypatch.setattr(check, "REALTIME", tmp_path / "realtime")
    monkeypatch.setattr(check, "CONFIGS", (str(tmp_path / "config.gz"),))
    rows = answers.results(ebpflb("check", "--state-dir", NEVER, "-o", "json").out)
    (row,) = [row for row in rows if row["feature"] == "one packet a CPU"]
    assert (row["ok"], row["required"]) == (ok, False)
    assert row["detail"].startswith(said)
    assert ok or "another one" in row["remedy"]


NEEDED = [
    ({"hook": False}, "kernel hooks", "missing: cgroup/connect4"),
    ({"works": False, "clsact_filters": False}, "clsact filters", "modprobe -a sch_ingress"),
]


@pytest.mark.parametrize(("answers", "feature", "said"), NEEDED)
def test_without_a_needed_feature_it_fails(
    ebpflb: Ebpflb,
    monkeypatch: pytest.MonkeyPatch,
    answers: dict[str, object],
    feature: str,
    said: str,
) -> None:
    """Without a feature that the packet path needs, the check fails."""
    for name, answer in answers.items():
        module = tcx if name == "works" else probe
        monkeypatch.setattr(module, name, lambda *_, answer=answer: answer)
    done = ebpflb("check", "--state-dir", NEVER, "-o", "wide")
    assert done.status == 1
    (line,) = [line for line in done.out.splitlines() if "MISSING" in line]
    assert feature in line
    assert said in line


@pytest.mark.parametrize("by_links", [True, False])
def test_not_tried(ebpflb: Ebpflb, monkeypatch: pytest.MonkeyPatch, by_links: bool) -> None:
    """A feature that could not be tried is not reported as missing."""

    def sandboxed() -> bool:
        raise OSError(1, "cannot make a namespace: Operation not permitted")

    monkeypatch.setattr(tcx, "works", lambda: by_links)
    monkeypatch.setattr(probe, "clsact_filters", sandboxed)
    done = ebpflb("check", "--state-dir", NEVER, "-o", "wide")
    assert done.status == 0
    assert "cannot be checked" in done.out


def test_nobody_may_check() -> None:
    """Without root the check says so, and reports only what it can find out."""
    done = as_nobody("check", "-o", "wide")
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if "MISSING" in line]
    assert "CAP_BPF" in line
    assert "run as root" in line


COMMANDS = [
    *("run --manifests /tmp", "maps dump", "status", "cleanup", "demo", "monitor"),
    *("services list", "services get default/web"),
]


@pytest.mark.parametrize("words", COMMANDS)
def test_nobody_may_do(words: str) -> None:
    """Every other command names its missing capabilities in one line, even if an agent running as
    root made the directory.
    """
    with TemporaryDirectory() as private:
        where = ("--run-dir", private) if words.startswith("run") else ()
        done = as_nobody(*words.split(), *where)
    assert (done.returncode, done.stdout) == (1, "")
    needed = "CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON"
    assert done.stderr == f"ebpflb: missing capabilities: {needed}: run as root, or grant them\n"


@pytest.mark.parametrize("cgroup", ["/tmp", "/nowhere"])
def test_no_cgroup(ebpflb: Ebpflb, cgroup: str) -> None:
    """A path that is not a cgroup v2 is named, and so is the option that sets another path."""
    done = ebpflb("check", "--state-dir", NEVER, "--cgroup-root", cgroup, "-o", "wide")
    assert done.status == 1
    (line,) = [line for line in done.out.splitlines() if "MISSING" in line]
    assert "cgroup v2" in line
    assert cgroup in line
    assert "--cgroup-root" in line
    assert "Errno" not in done.out + done.err
