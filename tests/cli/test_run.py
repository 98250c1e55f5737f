# SPDX-License-Identifier: Apache-2.0
"""`ebpflb run` that cannot start: one line says why, and nothing is attached."""

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ebpflb.config import config_file
from ebpflb.entries.flows import STREAM_AFTER
from ebpflb.entries.services import Settings
from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.netfilter import probe
from ebpflb.kernel.node import sysctls
from ebpflb.options import ConntrackOptions, Flag, Options, Paths, flags_of
from tests.cli.conftest import NEVER, Done, Ebpflb
from tests.config.files import write


@pytest.fixture
def options(tmp_path: Path) -> list[object]:
    """Return all options that are needed, all valid."""
    return ["--manifests", tmp_path, "--state-dir", NEVER, "--run-dir", tmp_path / "run"]


@pytest.fixture
def run(ebpflb: Ebpflb) -> Ebpflb:
    """Run `ebpflb run`, which must attach nothing and create no state."""

    def refused(*words: object) -> Done:
        before = cgroup_links.foreign_programs(cgroup_links.cgroup_root(), ())
        done = ebpflb("run", *words)
        assert cgroup_links.foreign_programs(cgroup_links.cgroup_root(), ()) == before
        assert not NEVER.exists()
        return done

    return refused


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("--manifests /nowhere", "'EBPFLB_MANIFESTS'): Directory '/nowhere' does not exist"),
        ("--kubeconfig /nowhere", "--kubeconfig"),
        (
            "--kubeconfig /dev/null --manifests /tmp",
            "--manifests and --kubeconfig cannot be combined",
        ),
        ("--manifest /tmp", "No such option"),
    ],
)
def test_wrong_calls(run: Ebpflb, case: str, why: str) -> None:
    """A missing path, two sources at a time and an unknown option are usage errors."""
    done = run(*case.split())
    assert done.status == 2
    assert why in done.err


@pytest.mark.parametrize(
    ("case", "lacks", "remedy"),
    [
        ("", "BCC: missing; BCC is missing", "apt install python3-bpfcc"),
        ("--cgroup-root /tmp", "cgroup v2: /tmp is not a cgroup v2", "--cgroup-root"),
        ("--state-dir /tmp/state", "/tmp/state is not in a bpffs", ""),
    ],
    ids=["BCC", "cgroup", "bpffs"],
)
def test_what_the_node_lacks(
    run: Ebpflb,
    options: list[object],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    lacks: str,
    remedy: str,
) -> None:
    """The missing feature is named, with the remedy."""
    if not case:
        monkeypatch.setitem(sys.modules, "bcc", None)
    done = run(*options, *case.split())
    assert done.status == 1
    (line,) = [line for line in done.err.splitlines() if lacks in line]
    assert remedy in line


@pytest.fixture
def chosen(would_serve: Callable[..., tuple[Any, ...]]) -> Callable[..., Options]:
    """Return the Options that `ebpflb run` makes from its arguments."""
    return lambda *words: would_serve(*words)[0]


REMOVED = (
    *("--packet-path=conntrack", "--endpoint-health=nodes"),
    *("--node-health-key", "--node-health-service"),
)
OTHER_VALUES = {
    "--api-server": "192.0.2.1:6443",
    "--audit": "report",
    "--devices": "eth*",
    "--endpoint-health": "passive",
    "--external-ips": "none",
    "--fast-forward": "auto",
    "--hand-over": "auto",
    "--l2-pool": "192.0.2.200-192.0.2.250",
    "--load-balancer-unknown-ports": "reject",
    "--local-api-server": "127.0.0.1:7445",
    "--map-size": "flows=1048576",
    "--masquerade-ports": "40000-40099",
    "--namespace-share": "50",
    "--namespaces": "shop",
    "--node-local-addresses": "192.0.2.53",
    "--node-readiness": "condition",
    "--nodeport-source-ranges": "192.0.2.0/24",
    "--packet-mark": "0x4000/0x4000",
    "--packet-path": "flows",
    "--readyz-bind-address": "",
    "--reply-path": "request-device",
    "--scheduler": "maglev",
    "--service-metrics": "50",
    "--services": "app=web",
    "--socket-translation": "host",
}


@pytest.mark.parametrize(("name", "flag", "default"), list(flags_of(Options)))
def test_each_option_alone(
    chosen: Callable[..., Options],
    options: list[object],
    tmp_path: Path,
    name: str,
    flag: Flag,
    default: object,
) -> None:
    """An option changes its own field and nothing else."""
    if flag.is_directory:
        word = f"{flag.name}={cgroup_links.cgroup_root() if name == 'cgroup' else tmp_path}"
        assert getattr(chosen(*options, word), name) == Path(word.partition("=")[2])
        return
    on_or_off = flag.name.replace("--", "--no-", 1) if default else flag.name
    word = on_or_off if isinstance(default, bool) else f"{flag.name}={OTHER_VALUES[flag.name]}"
    usual, other = chosen(*options), chosen(*options, word)
    assert getattr(other, name) != default
    as_before: dict[str, Any] = {name: default}
    assert replace(other, **as_before) == usual


def test_directories_by_the_environment(
    chosen: Callable[..., Options], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each option for a directory has a variable; the command line wins."""
    root, other = cgroup_links.cgroup_root(), NEVER.with_name(f"{NEVER.name}-either")
    monkeypatch.setenv("EBPFLB_MANIFESTS", str(tmp_path))
    monkeypatch.setenv("EBPFLB_STATE_DIR", str(NEVER))
    monkeypatch.setenv("EBPFLB_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("EBPFLB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("EBPFLB_CGROUP_ROOT", str(root))
    made = chosen()
    assert made.paths == Paths(NEVER, tmp_path / "run", tmp_path / "cache")
    assert (made.manifests, made.cgroup) == (tmp_path, root)
    assert chosen("--state-dir", other).paths.state == other


def test_removed_settings_have_no_effect(
    chosen: Callable[..., Options], options: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    """An agent starts with a former version's options, and names each once in its log."""
    values = dict(zip(REMOVED[2:], "ab", strict=True))
    words = (*options, *REMOVED[:2], *(f"{name}={value}" for name, value in values.items()))
    made = chosen(*words)
    assert list(made.removed_settings) == list(REMOVED)
    assert [line.partition(": ")[0] for line in caplog.messages] == list(REMOVED)
    assert replace(made, removed_settings={}) == chosen(
        *options, "--packet-path=netfilter", "--endpoint-health=passive"
    )


@pytest.mark.parametrize(
    ("words", "is_now"),
    [
        ((), "off"),
        (("--fast-forward",), "on"),
        (("--fast-forward=on",), "on"),
        (("--fast-forward=off",), "off"),
        (("--fast-forward=auto",), "auto"),
    ],
)
def test_fast_forward(
    chosen: Callable[..., Options], options: list[object], words: tuple[str, ...], is_now: str
) -> None:
    """--fast-forward without a value means on."""
    made = chosen(*options, *words)
    assert made.fast_forward == is_now
    assert made.conntrack_wanted.be_liberal == (is_now != "off")


def test_fast_forward_with_the_flow_tables(
    chosen: Callable[..., Options], options: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    """The log says once that the option has no effect."""
    made = chosen(*options, "--packet-path=flows", "--fast-forward=auto")
    assert list(made.removed_settings) == ["--fast-forward"]
    assert [line.partition(": ")[0] for line in caplog.messages] == ["--fast-forward"]
    assert not made.has_flowtable
    assert not made.conntrack_wanted.be_liberal


LIBERAL = "--conntrack-tcp-be-liberal"


@pytest.mark.parametrize(
    ("words", "file", "expected"),
    [
        ((), None, "off"),
        ((f"{LIBERAL}=auto",), None, "auto"),
        ((LIBERAL,), None, "on"),
        ((f"{LIBERAL}=false",), None, "off"),
        ((f"{LIBERAL}=auto", "--fast-forward"), None, "on"),
        ((f"{LIBERAL}=auto", "--shadow"), None, "off"),
        ((f"{LIBERAL}=auto", "--packet-path=flows"), None, "off"),
        ((f"{LIBERAL}=auto",), {}, "auto"),
        ((f"{LIBERAL}=auto",), {"tcpBeLiberal": None}, "auto"),
        ((f"{LIBERAL}=auto",), {"tcpBeLiberal": False}, "off"),
        ((f"{LIBERAL}=auto",), {"tcpBeLiberal": True}, "on"),
        ((LIBERAL,), {}, "off"),
        ((), {"tcpBeLiberal": "auto"}, "auto"),
    ],
)
def test_be_liberal(
    chosen: Callable[..., Options],
    options: list[object],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    words: tuple[str, ...],
    file: dict[str, Any] | None,
    expected: str,
) -> None:
    """auto has an effect beside a file that does not decide; another option decides too. The log
    names what the file overrides.
    """
    if file is not None:
        words = (*words, "--config", str(write(tmp_path / "config.conf", conntrack=file)))
    made = chosen(*options, *words)
    on = "on" if made.conntrack_wanted.be_liberal else "off"
    assert ("auto" if made.liberal_by_rules else on) == expected
    is_overridden = file is not None and bool(words[:-2]) and expected != "auto"
    assert (f"overridden by --config: {LIBERAL}" in caplog.text) == is_overridden


def test_all_that_programs_are_told(chosen: Callable[..., Options], options: list[object]) -> None:
    """The options for programs are in the map settings."""
    made = chosen(
        *(*options, "--masquerade-all", "--masquerade-local-backends", "--socket-translation=host"),
        *("--masquerade-ports=40000-40099", "--packet-mark=0x4000/0x4000", "--shadow"),
        "--reply-path=request-device",
    )
    flags = "guard_nodeports masquerade_all masquerade_here host_sockets reply_to_device shadow"
    assert made.map_settings == Settings(
        flags=frozenset(flags.split()),
        first_port=40000,
        last_port=40099,
        mark=0x4000,
        mark_mask=0x4000,
        stream_after=STREAM_AFTER,
    )


# `ebpflb run` with flags that end it before it serves (kube-proxy.md 15).


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.conf"


def test_write_config_to(ebpflb: Ebpflb, file: Path) -> None:
    """The flags are written as a complete file that reads back the same."""
    words = ["--cluster-cidr=10.0.0.0/8", "--iptables-min-sync-period=2s", "--node-name=a"]
    assert ebpflb("run", "--write-config-to", file, *words).status == 0
    found = config_file.read(file)
    assert (found.cluster_cidr, found.hostname_override) == ("10.0.0.0/8", "a")
    assert found.mode_section.min_sync_period == 2 * 10**9
    other = file.with_suffix(".other")
    assert ebpflb("run", "--config", file, "--write-config-to", other).status == 0
    assert other.read_text() == file.read_text()


def test_init_only(ebpflb: Ebpflb, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--init-only sets conntrack's sysctls, records what the kernel can do, and ends."""
    seen: list[Any] = []
    monkeypatch.setattr(sysctls, "set_up_conntrack", seen.append)
    write(file, conntrack={"maxPerCore": 0, "tcpCloseWaitTimeout": "5s"})
    monkeypatch.setattr(probe, "leave_answers", seen.append)
    assert ebpflb("run", "--init-only", "--config", file).status == 0
    assert seen == [ConntrackOptions(max_per_core=0, close_wait=5), Paths.run / "kernel.json"]


def test_the_flag_cleanup_removes_everything(
    ebpflb: Ebpflb, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """--cleanup removes what ebpflb and kube-proxy left, even with an invalid file, and ends."""
    seen: list[Any] = []
    monkeypatch.setattr(import_module("ebpflb.cli.cleanup"), "remove_all", seen.append)
    where = ["--state-dir", NEVER, "--run-dir", tmp_path]
    assert ebpflb("run", "--cleanup", "--config=/nowhere", *where).status == 0
    assert [paths.state for paths in seen] == [NEVER]
