# SPDX-License-Identifier: Apache-2.0
"""Marks of routing rules, in a network namespace."""

import os

from ebpflb.kernel.node import routes
from ebpflb.lab.netns import Namespace
from tests.kernel.node import nodes

NAME = f"ebpflb-test-{os.getpid()}-policy"


def test_marks_are_read_with_their_masks() -> None:
    """Marks of both families are read with their masks; rules without a mark are left out."""
    with nodes.fresh(NAME):
        assert routes.rule_marks() == set()
        here = Namespace(NAME)
        here.ip("rule add fwmark 0x80/0x80 lookup main", "rule add from 10.1.1.1 lookup 2")
        here.ip("rule add fwmark 0x1ff/0x100 lookup 3", v6=True)
        assert routes.rule_marks() == {0x80, 0x100}
