# SPDX-License-Identifier: Apache-2.0
"""What a node must have to run ebpflb. Every feature is tried; no version is asked.

`ebpflb run` does not start, and attaches nothing, if a required feature is missing.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ebpflb.errors import EbpflbError, in_words
from ebpflb.kernel import bpf, probe
from ebpflb.kernel.attach import cgroup_links, tcx
from ebpflb.kernel.maps import bpffs
from ebpflb.kernel.node import process
from ebpflb.kernel.programs import compiler, precompile
from ebpflb.kernel.programs.loader import SECTIONS
from ebpflb.tools.check_result import CheckResult, feature


def required_results(state_directory: Path, cgroup: Path | None) -> list[CheckResult]:
    """Of the features that ebpflb cannot run without, and of those that can replace one of them."""
    first = _capabilities()
    return [first, *_required(state_directory, cgroup)] if first.ok else [first, bcc_requirement()]


def missing_requirements(results: list[CheckResult]) -> list[str]:
    """A line for each required feature that is missing."""
    return [f"{r.feature}: {r.detail}; {r.remedy}" for r in results if r.required and not r.ok]


def _required(state_directory: Path, cgroup: Path | None) -> Iterator[CheckResult]:
    yield _clock()
    yield _try("bpf(2)", _bpf, "run as root, outside a sandbox")
    yield _try("bpffs", lambda: _bpffs(state_directory), "mount -t bpf bpf /sys/fs/bpf")
    yield _try("cgroup v2", lambda: _cgroup(cgroup), "mount cgroup v2, or set --cgroup-root")
    yield bcc_requirement()
    yield from _hooks()
    yield from _packet_hooks()
    yield _all_present("map types", probe.unmade_maps())


def _capabilities() -> CheckResult:
    missing, needed = process.missing_capabilities(), ", ".join(process.NEEDED_CAPABILITIES)
    if not missing:
        return CheckResult("capabilities", True, True, needed, "")
    detail = f"missing: {', '.join(missing)}"
    return CheckResult("capabilities", False, True, detail, "run as root, or grant them")


def _clock() -> CheckResult:
    """Programs count by the machine's: flows in use would be swept as idle, or none ever."""
    if not (shift := process.clock_shift()):
        return CheckResult("monotonic clock", True, True, "the machine's", "")
    detail = f"{shift:+g} s from the machine's, by a time namespace"
    return CheckResult("monotonic clock", False, True, detail, "run it outside that namespace")


def bcc_requirement() -> CheckResult:
    version = compiler.bcc_version()
    if version is None and precompile.is_brought():
        return CheckResult("BCC", True, False, "missing; the installed bytecode is used", "")
    remedy = "" if version else compiler.NO_BCC
    return CheckResult("BCC", version is not None, True, version or "missing", remedy)


def _try(feature: str, attempt: Callable[[], str], remedy: str) -> CheckResult:
    try:
        return CheckResult(feature, True, True, attempt(), "")
    except (EbpflbError, OSError) as error:
        return CheckResult(feature, False, True, in_words(error), remedy)


def _bpf() -> str:
    probe.map_works()
    return "works"


def _bpffs(state_directory: Path) -> str:
    bpffs.mount_bpffs(state_directory)
    return str(state_directory)


def _cgroup(cgroup: Path | None) -> str:
    root = cgroup_links.cgroup_root(cgroup)
    target = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        bpf.query(target, SECTIONS["cgroup/connect4"].attach_type)
    except EbpflbError as error:
        raise NotADirectoryError(f"{root} is not a cgroup v2") from error
    finally:
        os.close(target)
    return str(root)


def _hooks() -> Iterator[CheckResult]:
    for section in SECTIONS:
        yield feature(f"hook {section}", probe.hook(section), "5.10", "required", required=True)


# The kernel stops a device while it adds a qdisc (qdisc_graft, dev_deactivate).
_BY_CLSACT = (
    "clsact filters are used instead; a device drops outgoing packets for the millisecond in "
    "which it first gets a filter, a new pod's device gets its filters after 2 s, and one with a "
    "qdisc ingress (the CNI plugin bandwidth) is served by the engine netfilter only"
)


def _packet_hooks() -> Iterator[CheckResult]:
    """The helpers of packet programs, and the two ways to attach them: tcx, or else clsact."""
    helpers = probe.packet_helpers()
    yield _all_present("tc helpers", [name for name, ok in helpers.items() if not ok])
    has_tcx = tcx.works()
    yield feature("tcx", has_tcx, "6.6", _BY_CLSACT)
    yield _clsact(required=not has_tcx)


def _clsact(*, required: bool) -> CheckResult:
    lost = "required without tcx: modprobe -a sch_ingress cls_bpf"
    try:
        return feature("clsact filters", probe.clsact_filters(), "4.5", lost, required=required)
    except (EbpflbError, OSError) as error:
        return CheckResult(
            "clsact filters", False, False, f"cannot be checked: {in_words(error)}", lost
        )


def _all_present(feature: str, missing: list[str]) -> CheckResult:
    detail = f"missing: {', '.join(missing)}" if missing else "yes"
    return CheckResult(feature, not missing, True, detail, "required" if missing else "")
