# SPDX-License-Identifier: Apache-2.0
"""Programs that could not be compiled or loaded at the start are tried again until they can."""

import errno

import pytest

from ebpflb.agent import node_sync
from ebpflb.errors import CompileError, EbpflbError, KernelError, VerifierError
from ebpflb.lab.agents import wait_until
from ebpflb.serve.status import FORMER_PROGRAMS
from tests.agent.fakes import Harness
from tests.agent.started import BRIDGE, ETH, PORT, here, start

SHORT = KernelError("loading program connect4", errno.ENOMEM, "Cannot allocate memory")
REFUSED = VerifierError("the verifier refused\nlog")
FULL = CompileError("hooks/packet.c does not compile: no space left on the device")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_sync, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(node_sync, "LONGEST_PAUSE", 0.02)
    monkeypatch.setattr(node_sync, "POLL_SECONDS", 0.001)


@pytest.mark.parametrize("error", [SHORT, REFUSED, FULL])
def test_a_passing_failure_at_the_start_passes(harness: Harness, error: EbpflbError) -> None:
    """Old programs serve and the status says so; then all devices get this agent's programs."""
    harness.datapath.compile_error, harness.datapath.hooked = error, True
    start(harness)
    assert harness.status.programs == f"{FORMER_PROGRAMS}: {str(error).splitlines()[0]}"
    assert len(harness.datapath.maps.services) == 1
    harness.send(here(ETH, BRIDGE, PORT))
    wait_until("it is tried again and again", lambda: harness.datapath.compiled > 2)
    assert not harness.datapath.attached
    assert not harness.health.ready
    harness.datapath.compile_error = None
    harness.wait_for(lambda status: status.programs == "current" and status.in_sync)
    assert harness.datapath.attached == [harness.options.cgroup]
    assert harness.datapath.served[-1] == (ETH, BRIDGE, PORT)
    wait_until("it is ready", lambda: harness.health.ready)
    compiled = harness.datapath.compiled
    harness.send(here(ETH))
    assert harness.datapath.compiled == compiled


def test_pauses_grow(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that fails each time is not started again and again without a pause."""
    monkeypatch.setattr(node_sync, "FIRST_PAUSE", 5.0)
    monkeypatch.setattr(node_sync, "LONGEST_PAUSE", 300.0)
    harness.datapath.compile_error, harness.datapath.hooked = FULL, True
    now, pauses = [0.0], list[float]()
    loader = node_sync.ProgramLoader(
        harness.datapath,  # type: ignore[arg-type]
        harness.options,
        lambda: None,
        clock=lambda: now[0],
    )
    loader.started()
    while len(pauses) < 9:
        pauses.append(loader.due - now[0])
        now[0] = loader.due
        while loader.due - now[0] < 1:  # the thread that compiles is waited for
            now[0] = max(now[0], loader.due)
            loader.turn()
    assert pauses[:4] == pytest.approx([5, 10, 20, 40])
    assert max(pauses) == pytest.approx(300)
