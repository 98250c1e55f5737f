# SPDX-License-Identifier: Apache-2.0
"""Programs that remove what they have made, however often someone presses Ctrl-C."""

import os
import signal
import sys


def interrupted_alone() -> None:
    """Continue in a child process that alone receives Ctrl-C, without the processes that it starts.

    The call returns in the child; this process waits for it, and ends in the same way.
    """
    worker = os.fork()
    if not worker:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return
    told: list[int] = []

    def tell(*_: object) -> None:
        if not told:
            told.append(worker)
            os.kill(worker, signal.SIGINT)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, tell)
    _, status = os.waitpid(worker, 0)
    sys.exit(os.waitstatus_to_exitcode(status))
