# SPDX-License-Identifier: Apache-2.0
"""The chart's default rendering, made once."""

import pytest

from tests.deploy import helm
from tests.deploy.helm import Object


@pytest.fixture(scope="session")
def defaults() -> list[Object]:
    (objects,) = helm.render({})
    return objects
