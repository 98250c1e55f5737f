# SPDX-License-Identifier: Apache-2.0
"""A program that begins an HTTPS request every PAUSE seconds until its input ends, whatever became
of earlier requests.

A request fails if it is not answered in PATIENCE seconds. At the end the program prints when each
failed request began (CLOCK_MONOTONIC) and why, and how many succeeded.

    python3 https_load.py ADDRESS PORT PAUSE PATIENCE
"""

import json
import selectors
import ssl
import sys
import time
from http.client import HTTPException, HTTPSConnection
from threading import Thread


class Load:
    def __init__(self, address: str, port: int, patience: float) -> None:
        self._where, self._patience = (address, port), patience
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE
        self.failed: list[tuple[float, str]] = []
        self.succeeded = 0

    def request(self) -> None:
        begun = time.monotonic()
        connection = HTTPSConnection(*self._where, timeout=self._patience, context=self._context)
        try:
            connection.request("GET", "/version")
            connection.getresponse().read()
            self.succeeded += 1
        except (OSError, HTTPException) as error:
            self.failed.append((begun, repr(error)))
        finally:
            connection.close()


def main(address: str, port: str, pause: str, patience: str) -> None:
    load, threads = Load(address, int(port), float(patience)), list[Thread]()
    load.request()
    print("ready", flush=True)
    end = selectors.PollSelector()
    end.register(sys.stdin, selectors.EVENT_READ)
    while not end.select(float(pause)):
        threads.append(Thread(target=load.request))
        threads[-1].start()
    for each in threads:
        each.join()
    print(json.dumps({"failed": load.failed, "succeeded": load.succeeded}))


if __name__ == "__main__":
    main(*sys.argv[1:])
