# SPDX-License-Identifier: Apache-2.0
"""Run `ebpflb` with parts that fail in each turn, as by a bug: python FILE ... run ...

The parts are all workers, and all watches of the API that are not needed to serve Services.
"""

import math
import sys
from collections.abc import Iterator
from typing import Any

from ebpflb import stopping, workers
from ebpflb.agent import build  # noqa: F401  defines all workers
from ebpflb.cli import main
from ebpflb.cluster.api import Server
from ebpflb.cluster.list_watch import ListWatch
from ebpflb.model.events import Kind


def fail(self: Any, *_: object) -> None:
    raise TypeError("a mistake")


def derived(parent: type[Any]) -> Iterator[type[Any]]:
    for each in parent.__subclasses__():
        yield each
        yield from derived(each)


def list_and_watch(self: ListWatch) -> None:
    if self._kind is Kind.SERVICE_CIDR:
        fail(self)
    _list_and_watch(self)


_list_and_watch = ListWatch.list_and_watch
for each in (*derived(workers.PeriodicWorker), *derived(workers.DueWorker)):
    each.turn = fail
for each in derived(workers.DescriptorWorker):
    each.run = fail
ListWatch.list_and_watch = list_and_watch  # type: ignore[method-assign]
Server.create = fail  # type: ignore[assignment,method-assign]
stopping.END_AFTER = math.inf
sys.argv = ["ebpflb", *sys.argv[sys.argv.index("run") :]]
main()
