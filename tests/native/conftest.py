# SPDX-License-Identifier: Apache-2.0
"""The native hooks, built once a session for kernels with and without bpf_set_retval."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit import once
from tests.native.build import built
from tests.native.kernel import Kernel
from tests.native.node import NativeNode

VARIANTS = {"set_retval": ("-DHAVE_SET_RETVAL",), "no_retval": ()}


@pytest.fixture(scope="session")
def modules(shared: Path) -> dict[str, Any]:
    with once.alone(shared):
        return {name: built(shared, f"native_{name}", flags) for name, flags in VARIANTS.items()}


@pytest.fixture(scope="session", params=list(VARIANTS))
def new_node(request: pytest.FixtureRequest, modules: dict[str, Any]) -> Callable[[], NativeNode]:
    """Makes empty nodes, for tests that need many."""
    names_errno = request.param == "set_retval"
    return lambda: NativeNode(Kernel(modules[request.param], names_errno=names_errno))


@pytest.fixture
def node(new_node: Callable[[], NativeNode]) -> NativeNode:
    return new_node()
