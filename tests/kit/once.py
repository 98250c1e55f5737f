# SPDX-License-Identifier: Apache-2.0
"""Create things once per test run, even if several workers of pytest-xdist need them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Return a temporary folder of the whole run, the same for every worker."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep other workers waiting; afterwards they find in the folder what this one has made."""
    with FileLock(folder / "lock"):
        yield
