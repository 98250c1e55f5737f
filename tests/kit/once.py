# SPDX-License-Identifier: Apache-2.0
"""What a test run makes once, also where several workers of pytest-xdist need it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """A temporary folder of the whole run: every worker gets the same."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """While one worker is in here the others wait; what it leaves in the folder they find."""
    with FileLock(folder / "lock"):
        yield
