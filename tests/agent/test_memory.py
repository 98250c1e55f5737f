# SPDX-License-Identifier: Apache-2.0
"""The garbage collector runs when it should."""

import gc
from collections.abc import Iterator

import pytest

from ebpflb.agent import loop


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    """Unfreeze the objects that these tests freeze, and collect as usual."""
    usual = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # an agent that another test has run in this process sets its own
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.set_threshold(*usual)


def test_end_of_startup() -> None:
    """The collector is off until the end of the startup; then existing objects are frozen, once,
    and full collections are rare.
    """
    usual = gc.get_threshold()
    with loop.startup():
        assert not gc.isenabled()
        loop.end_startup()
        assert gc.isenabled()
        frozen = gc.get_freeze_count()
        assert frozen
        loop.end_startup()
        assert gc.get_freeze_count() <= frozen
    assert gc.get_threshold()[:2] == usual[:2]
    assert gc.get_threshold()[2] > 10 * usual[2]
