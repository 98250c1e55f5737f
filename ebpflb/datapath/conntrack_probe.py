# SPDX-License-Identifier: Apache-2.0
"""Whether programs can open flows in the kernel's conntrack: one opens a flow, with its
translation, and finds it again.

It does so in a network namespace of its own, which ends with the probe and takes the flow along.
"""

import errno
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.nftables.main import NFTables

from ebpflb.datapath import probe
from ebpflb.datapath.programs import compiler, loader, testrun
from ebpflb.errors import EbpflbError, NodeError, in_words

PROBE_SOURCE = "hooks/conntrack_probe.c"
_OK = 1  # PROBE_OK in conntrack_probe.c
_FAILURES: Mapping[int, str] = {
    2: "a program cannot open a flow in the kernel's conntrack",
    3: "conntrack does not find the flow that a program has opened",
}
_PACKET = bytes(64)  # the program does not look at it
_NFPROTO_IPV4 = 2


def obstacle(cache: Path) -> str | None:
    """Why the conntrack engine cannot work on this node; None where it works.

    ``cache``: of compiled bytecode. The new namespace, and modules' BTF, take CAP_SYS_ADMIN.
    """
    try:
        compiled = compiler.compile_source(PROBE_SOURCE, cache=cache)
        return probe.in_new_namespace(lambda: _try(compiled))
    except (EbpflbError, OSError) as error:
        said = in_words(error).splitlines()[0]
        denied = getattr(error, "errno", None) == errno.EPERM
        return f"CAP_SYS_ADMIN is missing ({said})" if denied else said


def _try(compiled: compiler.Compiled) -> str | None:
    """In the namespace of the thread. Raises NodeError, KernelError or VerifierError."""
    try:
        programs = loader.load(compiled, {})
    except NodeError:
        _ask_for_modules()
        programs = loader.load(compiled, {})
    try:
        result = testrun.run(programs[0].fd, _PACKET).retval
    finally:
        loader.close(programs)
    if result == _OK:
        return None
    raise NodeError(_FAILURES.get(result, f"the probe of conntrack returned {result}"))


def _ask_for_modules() -> None:
    """A chain of type nat makes the kernel load NAT and conntrack, if it has them as modules."""
    with suppress(NetlinkError, OSError), NFTables(nfgen_family=_NFPROTO_IPV4) as nft:
        nft.table("add", name="probe")
        nft.chain(
            "add", table="probe", name="nat", hook="prerouting", type="nat", priority=-100, policy=1
        )
