# SPDX-License-Identifier: Apache-2.0
"""The chart's default rendering, made once, and a folder for those who are not root."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.deploy import helm
from tests.deploy.helm import Object


@pytest.fixture(scope="session")
def defaults() -> list[Object]:
    (objects,) = helm.render({})
    return objects


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Everybody may go there; to pytest's own only root may."""
    with TemporaryDirectory(prefix="ebpflb-test-") as folder:
        path = Path(folder)
        path.chmod(0o755)
        yield path
