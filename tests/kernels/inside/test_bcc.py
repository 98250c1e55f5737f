# SPDX-License-Identifier: Apache-2.0
"""BCC works on this kernel, and makes the same bytecode as elsewhere."""

from pathlib import Path

import pytest

from ebpflb.kernel.programs import compiler

SOURCE = "hooks/netns_cookie.c"


@pytest.mark.timeout(300)
def test_compiles_here(tmp_path: Path) -> None:
    """BCC compiles here, and an additional flag requires a new compilation."""
    outside = compiler.compile_source(SOURCE, cache=tmp_path)
    here = compiler.compile_source(SOURCE, ("-DHERE",), cache=tmp_path)
    assert not here.cached
    assert here.programs == outside.programs
