# SPDX-License-Identifier: Apache-2.0
"""A room's head says what is in it."""

import re
from importlib import import_module
from pathlib import Path

import pytest

import ebpflb

HOUSE = Path(ebpflb.__file__).parent
ROOMS = sorted(path.parent.name for path in HOUSE.glob("*/__init__.py"))


@pytest.mark.parametrize("room", [room for room in ROOMS if room != "cli"])
def test_modules(room: str) -> None:
    """Each of its modules has a line there, and nothing else has; cli has a file a command."""
    words = import_module(f"ebpflb.{room}").__doc__ or ""
    listed = re.findall(r"^`{0,2}(\w+)`{0,2}  +\S", words, re.MULTILINE)
    modules = [path.stem for path in (HOUSE / room).glob("*.py") if path.stem != "__init__"]
    assert sorted(listed) == sorted(modules)
