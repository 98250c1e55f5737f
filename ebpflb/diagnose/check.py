# SPDX-License-Identifier: Apache-2.0
"""Can this node run it: feature by feature, what is lost without it and what to do.

Everything is tried, nothing is guessed from the kernel's version. `ebpflb run` refuses to start
where something required is missing, before it has attached anything.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ebpflb.datapath import kernel, probe
from ebpflb.datapath.attach import cgroup_links, device_programs, netns_cookie, tcx
from ebpflb.datapath.maps import pins
from ebpflb.datapath.programs import compiler
from ebpflb.datapath.programs.loader import SECTIONS
from ebpflb.errors import EbpflbError
from ebpflb.node import capabilities, kube_proxy_watch, sock_diag


class Result(NamedTuple):
    """One feature of this node; ``remedy`` says what to do, or what is lost, where it is not ok."""

    feature: str
    ok: bool
    required: bool
    detail: str
    remedy: str


def check_node(state_directory: Path, cgroup: Path | None) -> list[Result]:
    """All findings; without the capabilities nothing else can be known."""
    needed = required(state_directory, cgroup)
    if missing(needed[:1]):
        return needed
    return [*needed, *_batches(), *_comforts(), *_others(state_directory, cgroup)]


def required(state_directory: Path, cgroup: Path | None) -> list[Result]:
    """Only what the node cannot do without, and what would do in its stead."""
    rights = _rights()
    return [rights, *_needs(state_directory, cgroup)] if rights.ok else [rights, _bcc()]


def missing(findings: list[Result]) -> list[str]:
    """A line for each required feature that is not there."""
    return [f"{f.feature}: {f.detail}; {f.remedy}" for f in findings if f.required and not f.ok]


def _needs(state_directory: Path, cgroup: Path | None) -> Iterator[Result]:
    yield _tried("bpf(2)", _bpf, "run as root, outside a sandbox")
    yield _tried("bpffs", lambda: _bpffs(state_directory), "mount -t bpf bpf /sys/fs/bpf")
    yield _tried("cgroup v2", lambda: _cgroup(cgroup), "mount cgroup v2, or name it: --cgroup-root")
    yield _bcc()
    yield from _hooks()
    yield from _packet_hooks()
    yield _nothing_missing("maps of every kind", probe.unmade_maps())


def _others(state_directory: Path, cgroup: Path | None) -> Iterator[Result]:
    """Who else has a hand in the traffic."""
    yield _other_hooks(state_directory, cgroup)
    yield _other_filters(state_directory)
    yield _kube_proxy()


def _rights() -> Result:
    missing = capabilities.missing()
    detail = f"not: {', '.join(missing)}" if missing else ", ".join(capabilities.NEEDED)
    remedy = "run as root, or grant them" if missing else ""
    return Result("capabilities", not missing, True, detail, remedy)


def _bcc() -> Result:
    version = compiler.bcc_version()
    remedy = "" if version else compiler.NO_BCC
    return Result("BCC", version is not None, True, version or "missing", remedy)


def _tried(feature: str, attempt: Callable[[], str], remedy: str) -> Result:
    try:
        return Result(feature, True, True, attempt(), "")
    except (EbpflbError, OSError) as error:
        return Result(feature, False, True, str(error), remedy)


def _bpf() -> str:
    probe.map_works()
    return "works"


def _bpffs(state_directory: Path) -> str:
    pins.mount_bpffs(state_directory)
    return str(state_directory)


def _cgroup(cgroup: Path | None) -> str:
    root = cgroup or cgroup_links.cgroup_root()
    target = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        kernel.query(target, SECTIONS["cgroup/connect4"].point)
    except EbpflbError as error:
        raise NotADirectoryError(f"{root} is no cgroup v2: {error}") from error
    finally:
        os.close(target)
    return str(root)


def _hooks() -> Iterator[Result]:
    for section in SECTIONS:
        yield _feature(f"hook {section}", probe.hook(section), "5.10", "needed", required=True)


def _packet_hooks() -> Iterator[Result]:
    """Programs at devices by one way or the other; the second matters where the first is not."""
    helpers = probe.packet_helpers()
    yield _nothing_missing("helpers of hook tc", [name for name, ok in helpers.items() if not ok])
    by_links = tcx.works()
    yield _feature("tcx", by_links, "6.6", "clsact filters are used")
    yield _clsact(required=not by_links)


def _clsact(*, required: bool) -> Result:
    lost = "needed where there is no tcx: modprobe -a sch_ingress cls_bpf"
    try:
        return _feature("clsact filters", probe.clsact_filters(), "4.5", lost, required=required)
    except (EbpflbError, OSError) as error:
        return Result("clsact filters", False, False, f"cannot be tried: {error}", lost)


def _batches() -> Iterator[Result]:
    """Of what the maps are written with."""
    since = {"LPM_TRIE": "5.13", "PERCPU_ARRAY": "5.13"}
    for kind, works in probe.batches().items():
        lost = "one entry at a time: large updates take longer"
        yield _feature(f"batches: {kind}", works, since.get(kind, "5.6"), lost)


def _comforts() -> Iterator[Result]:
    """What there is a way around."""
    yield _feature(
        "errno from hooks", probe.set_retval(), "5.18", "refusals go by loopback; no bind guard"
    )
    yield _feature(
        "clock of the last tick", probe.coarse_clock(), "5.11", "packets wait for the exact clock"
    )
    yield _feature(
        "netns cookie of the agent",
        netns_cookie.by_socket() is not None,
        "5.14",
        "a program tells it, attached for a moment at the start",
    )
    yield from _stale_sockets()


def _stale_sockets() -> Iterator[Result]:
    """What connected UDP sockets need whose backend has gone (kube-proxy.md 11.1)."""
    lists, ends = sock_diag.can_list(), sock_diag.can_destroy()
    known = "pods' flows are re-bound where this node routes them, its own sockets stay"
    lost = known if lists else "they stay with a backend that has gone: modprobe udp_diag"
    yield _feature("connected UDP sockets move", ends, "4.9, INET_DIAG_DESTROY", lost)
    enters = "CAP_SYS_ADMIN" in capabilities.held()
    detail = "yes" if enters else "no (needs CAP_SYS_ADMIN)"
    remedy = "" if enters else "pods' connected UDP sockets keep a backend that has gone"
    yield Result("pods' connected UDP sockets are seen", enters, False, detail, remedy)


def _feature(feature: str, ok: bool, since: str, lost: str, *, required: bool = False) -> Result:
    detail = "yes" if ok else f"no (since kernel {since})"
    return Result(feature, ok, required, detail, "" if ok else lost)


def _nothing_missing(feature: str, missing: list[str]) -> Result:
    detail = f"not: {', '.join(missing)}" if missing else "yes"
    return Result(feature, not missing, True, detail, "needed" if missing else "")


def _other_hooks(state_directory: Path, cgroup: Path | None) -> Result:
    """Two translators in a row: the second sees the first one's backend."""

    def foreign() -> Mapping[str, list[str]]:
        ours = cgroup_links.attached(pins.StateDir(state_directory)).values()
        return cgroup_links.foreign(cgroup or cgroup_links.cgroup_root(), ours)

    return _found("other agents' hooks", foreign, "another agent translates here too: run only one")


def _other_filters(state_directory: Path) -> Result:
    """Whoever comes first at a device may keep a packet from us."""
    remedy = "they see packets before us, and may keep them: see what they are for"
    return _found(
        "other agents ahead at devices",
        lambda: device_programs.ahead(pins.StateDir(state_directory)),
        remedy,
    )


def _found(feature: str, ask: Callable[[], Mapping[str, list[str]]], remedy: str) -> Result:
    try:
        found = ask()
    except (EbpflbError, OSError) as error:
        return Result(feature, False, False, str(error), "")
    names = ", ".join(f"{where} ({', '.join(who)})" for where, who in found.items())
    return Result(feature, not found, False, names or "none", remedy if found else "")


def _kube_proxy() -> Result:
    """It may run beside us for a while, as one is taken over from."""
    try:
        found = kube_proxy_watch.detect()
    except EbpflbError as error:
        return Result("kube-proxy", False, False, str(error), "")
    return Result("kube-proxy", not found.advice, False, found.state, found.advice)
