# SPDX-License-Identifier: Apache-2.0
"""The messages of doctor if the agent cannot have a canary."""

from pathlib import Path

import pytest

from ebpflb.options import Paths
from ebpflb.plan.canary import CanaryLease
from ebpflb.tools import ask
from ebpflb.tools.ask import NoAnswer


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (404, b"404 page not found\n", "the agent is of another version"),
        (409, b'{"error":"map slots is nearly full"}', "map slots is nearly full"),
        (200, b'{"other":1}', "the agent is of another version"),
    ],
)
def test_the_message_has_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, body: bytes, said: str
) -> None:
    """The message is the agent's reason, or that another version has no canary."""
    paths = Paths(tmp_path)
    monkeypatch.setattr(ask, "exchange", lambda *_: (status, body))
    with pytest.raises(NoAnswer, match=said):
        ask.get(paths, "/v1/canary/hold?nodeport=30999", CanaryLease)
