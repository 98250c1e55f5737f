# SPDX-License-Identifier: Apache-2.0
"""Maps without a kernel, which tell what is written to them as those of the kernel do."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ebpflb.history.past import PastMap
from ebpflb.history.recorder import RECORDED, History
from ebpflb.options import Paths


class FakeMap(PastMap):
    """Packed entries are written and deleted one by one."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.wrote = lambda name, keys, values: None

    def write(self, pairs: list[tuple[Any, Any]]) -> None:
        packed = [(self.key.pack(key), self.value.pack(value)) for key, value in pairs]
        self.packed.update(packed)
        keys, values = zip(*packed, strict=True)
        self.wrote(self.spec.name, b"".join(keys), b"".join(values))

    def delete(self, keys: list[Any]) -> None:
        packed = [self.key.pack(key) for key in keys]
        for key in packed:
            self.packed.pop(key, None)
        self.wrote(self.spec.name, b"".join(packed), None)

    def slices(self) -> Iterator[tuple[bytes, bytes]]:
        yield b"".join(self.packed), b"".join(self.packed.values())


class Clock:
    """A second later each time somebody looks."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


class Node:
    """An agent's maps, and its history in a directory."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.paths = Paths(Path("/state"), folder)
        self.clock = Clock()
        self.maps: dict[str, FakeMap] = {name: FakeMap(name) for name in RECORDED}
        self.options = options
        self.start()

    def start(self) -> None:
        """Returns when the checkpoint is whole."""
        maps: Any = self.maps
        self.history = History(self.paths, maps, clock=self.clock, **self.options)
        self.history.start()
        self.checkpoint()

    def checkpoint(self) -> None:
        """Waits for it."""
        thread = self.history.checkpoint
        if thread:
            thread.join()

    def crash(self) -> None:
        """End the agent: it writes nothing more."""
        self.checkpoint()
        self.history.writes = []
        self.history.stop()

    def contents(self) -> dict[str, dict[bytes, bytes]]:
        return {name: dict(each.packed) for name, each in self.maps.items() if each.packed}
