# SPDX-License-Identifier: Apache-2.0
"""The library, built once per session, and a runner."""

from collections.abc import Iterator

import pytest

from tests.simulation.build import Library
from tests.simulation.schedules import Runner


@pytest.fixture(scope="session")
def library() -> Library:
    return Library()


@pytest.fixture(scope="module")
def runner(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    made = Runner(library, tmp_path_factory.mktemp("simulation"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def api_runner(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Return a runner with an API server between cluster and agent."""
    made = Runner(library, tmp_path_factory.mktemp("simulation"), api=True)
    yield made
    made.close()
