# SPDX-License-Identifier: Apache-2.0
"""A reader can follow a changed EndpointSlice from the API server to the maps."""

import os

import pytest

from bench import slice_way

MOST = 32  # files


@pytest.mark.extended
def test_a_changed_slice_goes_through_few_files() -> None:
    """Few files lie on the path of a changed slice; features that no Service uses are not on it."""
    for _ in range(slice_way.TIMES):
        files = set().union(*slice_way.measured(f"ebpflb-test-{os.getpid()}-way").values())
        assert {"cluster/list_watch.py", "plan/planner.py", "kernel/map_writer.py"} <= files
        if len(files) <= MOST:
            return
    pytest.fail(f"{len(files)} files: {', '.join(sorted(files))}")
