# SPDX-License-Identifier: Apache-2.0
"""Events between two system calls of the agent."""

from collections.abc import Callable
from typing import Any

import pytest

from ebpflb.kernel import bpf


def after_each_call(patch: pytest.MonkeyPatch, do: Callable[[], None]) -> None:
    """Run ``do`` after each bpf(2) of this process, except its own, from now on."""
    call = bpf.bpf

    def watched(*words: Any) -> Any:
        result = call(*words)
        with patch.context() as inner:
            inner.setattr(bpf, "bpf", call)
            do()
        return result

    patch.setattr(bpf, "bpf", watched)
