# SPDX-License-Identifier: Apache-2.0
"""A client of the soak: client.py LAB PROTOCOL HOST PORT PAUSE HISTORY ABOUT.

LAB is the folder of ebpflb.lab. The client sends requests until its input ends, and prints "ready"
after the first one. HISTORY gets a line of JSON for each request, with the fields ABOUT:
bench.history, Request.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KIT = Path(__file__).parents[1] / "kit"


def run(
    traffic: Any, times: Iterator[None], protocol: str, host: str, port: int, history: str
) -> None:
    family, request = traffic.family_of(host), traffic.REQUESTS[protocol]
    about = json.loads(sys.argv[-1])
    with open(history, "w") as out:
        for _ in times:
            said, begun = {"endpoint": "", "error": ""}, time.monotonic()
            try:
                said["endpoint"] = request(family, (host, port)).name
            except OSError as error:
                said["error"] = traffic.error_word(error)
            line = {**about, "begun": begun, "ended": time.monotonic(), **said}
            out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    _, lab, protocol, host, port, pause, history, _ = sys.argv
    sys.path[:0] = lab, str(KIT)
    times = __import__("lab_client").until_input_ends(float(pause))
    run(__import__("traffic"), times, protocol, host, int(port), history)
