# SPDX-License-Identifier: Apache-2.0
"""`ebpflb run` that measures itself: for ``endurance``.

    python -P paced_agent.py FILE run [OPTIONS]

FILE gets a line of JSON for each ten seconds: the seconds since the start, the RSS in MB, how many
blocks of memory Python's objects take, and the longest time in seconds in which the loop has taken
no message.
"""

import json
import sys
import threading
import time
from pathlib import Path

from ebpflb.agent.loop import Inbox
from ebpflb.cli import main

EVERY = 10.0  # seconds


class Pace:
    """The longest time between two calls of Inbox.take."""

    def __init__(self) -> None:
        self.longest, self._left = 0.0, time.monotonic()

    def install(self) -> None:
        take = Inbox.take

        def timed(self_: Inbox, seconds: float) -> object | None:
            self.longest = max(self.longest, time.monotonic() - self._left)
            try:
                return take(self_, seconds)
            finally:
                self._left = time.monotonic()

        Inbox.take = timed  # type: ignore

    def sample(self, file: Path) -> None:
        begun = time.monotonic()
        while True:
            time.sleep(EVERY)
            longest, self.longest = self.longest, 0.0
            at = round(time.monotonic() - begun, 1)
            sample = {"at": at, "rss": _rss(), "blocks": sys.getallocatedblocks()}
            line = json.dumps(sample | {"pause": round(longest, 4)})
            with file.open("a") as out:
                out.write(line + "\n")


def _rss() -> float:
    text = Path("/proc/self/status").read_text()
    return round(int(text.partition("VmRSS:")[2].split()[0]) * 1024 / 1e6, 2)


if __name__ == "__main__":
    pace = Pace()
    pace.install()
    threading.Thread(target=pace.sample, args=(Path(sys.argv.pop(1)),), daemon=True).start()
    main()
