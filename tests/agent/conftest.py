# SPDX-License-Identifier: Apache-2.0
"""An agent that needs no kernel."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.agent import engine
from ebpflb.kernel.node import sysctls
from ebpflb.model.addresses import Family
from tests.agent.fakes import Harness
from tests.agent.told import EVERYTHING


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    """Return an agent that is not started yet; the end of the test stops it. It inspects and
    changes nothing in this machine's own network namespace.
    """
    reserved = tmp_path / "reserved"
    reserved.write_text("\n")
    monkeypatch.setattr(sysctls, "RESERVED", reserved)
    monkeypatch.setattr(engine, "bridge_calls", lambda: dict.fromkeys(Family, False))
    made = Harness(tmp_path)
    yield made
    if hasattr(made, "thread"):
        made.stop()


@pytest.fixture
def serving(harness: Harness) -> Harness:
    """Return a started agent that knows two Services, their endpoints and all Nodes."""
    harness.start()
    harness.send(*EVERYTHING)
    return harness
