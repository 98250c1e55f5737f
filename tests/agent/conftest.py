# SPDX-License-Identifier: Apache-2.0
"""An agent that needs no kernel."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.agent import engine_choice
from ebpflb.model.addresses import Family
from ebpflb.node import reserved_ports
from tests.agent.fakes import Harness


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    """Not yet started; ended with the test.

    Nothing is looked for or made in this machine's own network namespace.
    """
    reserved = tmp_path / "reserved"
    reserved.write_text("\n")
    monkeypatch.setattr(reserved_ports, "RESERVED", reserved)
    monkeypatch.setattr(engine_choice, "bridge_calls", lambda: dict.fromkeys(Family, False))
    made = Harness(tmp_path)
    yield made
    if hasattr(made, "thread"):
        made.stop()
