# SPDX-License-Identifier: Apache-2.0
"""`ebpflb run` that records which files run between two signals: for ``slice_way``.

    python -P traced_agent.py FILE run [OPTIONS]

FILE gets a line of JSON: for each thread, by its name, the files in which it ran, in their order,
each as often as the thread has changed to it. FILE with the suffix .begun says that it records.
"""

import json
import signal
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import ebpflb
from ebpflb.cli import main

BEGIN, END = signal.SIGRTMIN, signal.SIGRTMIN + 1  # the agent itself waits for SIGUSR1 and 2
PACKAGE = f"{Path(ebpflb.__file__).parent}/"


class Tracer:
    """Profiles every thread of this process; records only while it is on."""

    def __init__(self) -> None:
        self._is_on = False
        self._visits: dict[str, list[str]] = defaultdict(list)

    def install(self, file: Path) -> None:
        """Follow threads from now on; signals turn the recording on and off."""
        threading.setprofile(self._visit)
        sys.setprofile(self._visit)
        signal.signal(BEGIN, lambda *_: self._begin(file))
        signal.signal(END, lambda *_: self._end(file))

    def _begin(self, file: Path) -> None:
        self._visits.clear()
        self._is_on = True
        file.with_suffix(".begun").touch()

    def _end(self, file: Path) -> None:
        self._is_on = False
        half = file.with_suffix(".half")
        half.write_text(json.dumps(self._visits))
        half.replace(file)

    def _visit(self, frame: FrameType, event: str, _: Any) -> None:
        shown = frame.f_back if event == "return" else frame
        name = shown.f_code.co_filename if shown else ""
        if not self._is_on or not name.startswith(PACKAGE):
            return
        visits = self._visits[threading.current_thread().name]
        file = name.removeprefix(PACKAGE)
        if not visits or visits[-1] != file:
            visits.append(file)


if __name__ == "__main__":
    Tracer().install(Path(sys.argv.pop(1)))
    main()
