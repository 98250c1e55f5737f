# SPDX-License-Identifier: Apache-2.0
"""A client of the soak: client.py LAB PROTOCOL HOST PORT PAUSE, with the folder of ebpflb.lab.

It sends requests until its input ends, and prints "ready" after the first one; then what it has
counted, as JSON: answers by the server's name, errors, and latencies by step of 5 %.
"""

import json
import math
import sys
import time
from collections import Counter
from typing import Any

STEP = 1.05


def step_of(seconds: float) -> int:
    return round(math.log(seconds * 1e6, STEP))


def run(
    traffic: Any, protocol: str, host: str, port: int, pause: float
) -> dict[str, Counter[object]]:
    answers, errors, steps = Counter[object](), Counter[object](), Counter[object]()
    family, request = traffic.family_of(host), traffic.REQUESTS[protocol]
    for _ in traffic.until_input_ends(pause):
        begun = time.monotonic()
        try:
            answers[request(family, (host, port)).name] += 1
        except OSError as error:
            errors[traffic.error_word(error)] += 1
        steps[step_of(time.monotonic() - begun)] += 1
    return {"answers": answers, "errors": errors, "steps": steps}


if __name__ == "__main__":
    _, lab, protocol, host, port, pause = sys.argv
    sys.path.insert(0, lab)
    print(json.dumps(run(__import__("traffic"), protocol, host, int(port), float(pause))))
