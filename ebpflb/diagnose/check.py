# SPDX-License-Identifier: Apache-2.0
"""Can this node run it: feature by feature, what is lost without it and what to do.

Everything is tried, nothing is guessed from the kernel's version. `ebpflb run` refuses to start
where something required is missing, before it has attached anything.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from ebpflb.datapath import compiler, kernel, links, probe, state
from ebpflb.datapath.programs import SECTIONS
from ebpflb.errors import EbpflbError


class Finding(NamedTuple):
    """One feature of this node; ``remedy`` says what to do, or what is lost, where it is not ok."""

    feature: str
    ok: bool
    required: bool
    detail: str
    remedy: str


def check(state_directory: Path, cgroup: Path | None) -> list[Finding]:
    """All findings; without root nothing else can be known."""
    root = _root()
    return [root, *_findings(state_directory, cgroup)] if root.ok else [root, _bcc()]


def required(state_directory: Path, cgroup: Path | None) -> list[Finding]:
    """Only what the node cannot do without."""
    return [finding for finding in check(state_directory, cgroup) if finding.required]


def missing(findings: list[Finding]) -> list[str]:
    """A line for each required feature that is not there."""
    return [f"{f.feature}: {f.detail}; {f.remedy}" for f in findings if f.required and not f.ok]


def _findings(state_directory: Path, cgroup: Path | None) -> Iterator[Finding]:
    yield _tried("bpf(2)", _bpf, "run as root, outside a sandbox")
    yield _tried("bpffs", lambda: _bpffs(state_directory), "mount -t bpf bpf /sys/fs/bpf")
    yield _tried("cgroup v2", lambda: _cgroup(cgroup), "mount cgroup v2, or name it: --cgroup-root")
    yield _bcc()
    yield from _hooks()
    yield _feature("mappable arrays", probe.mappable_arrays(), "5.5", "needed", required=True)
    yield _feature("batch writes", probe.batch(), "5.6", "large updates take longer")
    yield _feature(
        "errno from hooks", probe.set_retval(), "5.18", "refusals go by loopback; no bind guard"
    )
    yield _feature(
        "netns cookie of the agent",
        probe.netns_cookie() is not None,
        "5.14",
        "a program tells it, attached for a moment at the start",
    )
    yield _other_programs(state_directory, cgroup)


def _root() -> Finding:
    detail = f"uid {os.geteuid()}"
    return Finding("root", os.geteuid() == 0, True, detail, "run as root")


def _bcc() -> Finding:
    version = compiler.bcc_version()
    return Finding("BCC", version is not None, True, version or "missing", compiler.NO_BCC)


def _tried(feature: str, attempt: Callable[[], str], remedy: str) -> Finding:
    try:
        return Finding(feature, True, True, attempt(), "")
    except (EbpflbError, OSError) as error:
        return Finding(feature, False, True, str(error), remedy)


def _bpf() -> str:
    probe.map_works()
    return "works"


def _bpffs(state_directory: Path) -> str:
    state.mount_bpffs(state_directory)
    return str(state_directory)


def _cgroup(cgroup: Path | None) -> str:
    root = cgroup or links.cgroup_root()
    target = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        kernel.query(target, SECTIONS["cgroup/connect4"].point)
    except EbpflbError as error:
        raise NotADirectoryError(f"{root} is no cgroup v2: {error}") from error
    finally:
        os.close(target)
    return str(root)


def _hooks() -> Iterator[Finding]:
    for section in SECTIONS:
        yield _feature(f"hook {section}", probe.hook(section), "5.10", "needed", required=True)


def _feature(feature: str, ok: bool, since: str, lost: str, *, required: bool = False) -> Finding:
    detail = "yes" if ok else f"no (since kernel {since})"
    return Finding(feature, ok, required, detail, "" if ok else lost)


def _other_programs(state_directory: Path, cgroup: Path | None) -> Finding:
    """Two translators in a row: the second sees the first one's backend."""
    try:
        ours = links.attached(state.State(state_directory)).values()
        found = links.foreign(cgroup or links.cgroup_root(), ours)
    except (EbpflbError, OSError) as error:
        return Finding("other agents' hooks", False, False, str(error), "")
    names = ", ".join(f"{section} ({', '.join(who)})" for section, who in found.items())
    remedy = "another agent translates here too: run only one" if found else ""
    return Finding("other agents' hooks", not found, False, names or "none", remedy)
