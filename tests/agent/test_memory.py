# SPDX-License-Identifier: Apache-2.0
"""When the garbage collector runs."""

import gc
from collections.abc import Iterator

import pytest

from ebpflb.agent import loop


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    """What these tests freeze is freed again."""
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_end_of_startup() -> None:
    """Off until the end of the startup; then what exists is left alone, once."""
    with loop.startup():
        assert not gc.isenabled()
        loop.end_startup()
        assert gc.isenabled()
        frozen = gc.get_freeze_count()
        assert frozen
        loop.end_startup()
        assert gc.get_freeze_count() <= frozen
