# SPDX-License-Identifier: Apache-2.0
"""The native hooks, built once per session, for kernels with and without bpf_set_retval."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.native.build import VARIANTS, built
from tests.native.kernel import Kernel
from tests.native.node import NativeNode


@pytest.fixture(scope="session")
def modules() -> dict[str, Any]:
    return {name: built(name) for name in VARIANTS}


@pytest.fixture(scope="session", params=list(VARIANTS))
def new_node(request: pytest.FixtureRequest, modules: dict[str, Any]) -> Callable[[], NativeNode]:
    """Return a function that makes empty nodes, for tests that need many nodes."""
    names_errno = request.param == "set_retval"
    return lambda: NativeNode(Kernel(modules[request.param], names_errno=names_errno))


@pytest.fixture
def node(new_node: Callable[[], NativeNode]) -> NativeNode:
    return new_node()
