# SPDX-License-Identifier: Apache-2.0
"""The garbage collector runs when it should."""

import gc
from collections.abc import Iterator

import pytest

from ebpflb.agent import loop


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    """Unfreeze the objects that these tests freeze."""
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_end_of_startup() -> None:
    """The collector is off until the end of the startup; then existing objects are frozen, once."""
    with loop.startup():
        assert not gc.isenabled()
        loop.end_startup()
        assert gc.isenabled()
        frozen = gc.get_freeze_count()
        assert frozen
        loop.end_startup()
        assert gc.get_freeze_count() <= frozen
