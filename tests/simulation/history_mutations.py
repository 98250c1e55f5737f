# SPDX-License-Identifier: Apache-2.0
"""Mistakes made on purpose in the record of what the agent writes."""

from typing import Any
from unittest.mock import patch

from ebpflb.history.recorder import History
from ebpflb.history.segments import Whole
from tests.simulation.write_mutations import Mutation


def deletions_are_not_recorded() -> Any:
    def wrote(self: History, name: str, keys: bytes, values: bytes | None) -> None:
        if values is not None:
            _wrote(self, name, keys, values)

    return patch.object(History, "wrote", wrote)


_wrote = History.wrote


def checkpoints_are_empty() -> Any:
    """What an earlier agent has written is forgotten."""

    def read(self: History) -> None:
        self._append(Whole(self._clock()))

    return patch.object(History, "_read", read)


OF_THE_HISTORY: list[Mutation] = [deletions_are_not_recorded, checkpoints_are_empty]
