# SPDX-License-Identifier: Apache-2.0
"""The service ports of which something does not fit, and when each is tried again.

A service port is tried again only after something was freed that it could use, and only a few with
each plan: however many wait, nobody else's change takes longer.
"""

from collections import defaultdict
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from ebpflb.model.events import Key
from ebpflb.model.services import PortName

MOST_TRIED = 64  # with one plan
EVERYONE = ""  # instead of a namespace: what anyone frees can be used


class Lack(NamedTuple):
    """So many entries more of map ``part`` are needed, which ``namespace`` or EVERYONE can free."""

    namespace: str
    part: str
    more: int
    reason: str  # for the operator


class Waiting:
    """``lacks``: the service ports that wait. ``changed``: the Services of which some began or
    ended to wait, or wait for another reason; the reader empties it.
    """

    def __init__(self) -> None:
        self.lacks: dict[PortName, Lack] = {}
        self.of_service: dict[Key, dict[PortName, Lack]] = {}
        self.changed: set[Key] = set()
        self._queues: defaultdict[str, dict[PortName, None]] = defaultdict(dict)
        self._tries: dict[str, int] = {}  # namespace -> how many of its queue are to be tried
        self._freed: set[str] = set()  # namespaces, since the last ``take``

    @property
    def has_tries(self) -> bool:
        """Whether ``take`` may have some to try."""
        return bool(self._tries or self._freed)

    def set(self, name: PortName, lack: Lack | None) -> None:
        """What a service port lacks now; None: everything of it fits, or it is deleted."""
        former = self.lacks.pop(name, None)
        if former:
            self._queues[former.namespace].pop(name, None)
        if lack:
            self.lacks[name] = lack
            self._queues[lack.namespace][name] = None
        if (former and former.reason) != (lack and lack.reason):
            self._note(name, lack)

    def freed(self, namespace: str) -> None:
        """Something was freed that was this namespace's, or no namespace's."""
        self._freed |= {namespace, EVERYONE}

    def take(self, still_lacks: Callable[[PortName, Lack], object]) -> list[PortName]:
        """Those that are to be tried now, of the next few; the others wait on."""
        freed, self._freed = self._freed, set()
        self._tries |= {each: len(self._queues[each]) for each in freed if self._queues.get(each)}
        found: list[PortName] = []
        for namespace, tries in list(self._tries.items()):
            queue = self._queues[namespace]
            tried = list(islice(queue, min(tries, MOST_TRIED)))
            for name in tried:
                queue[name] = queue.pop(name)  # to the end
            found += [name for name in tried if not still_lacks(name, self.lacks[name])]
            self._tries[namespace] -= len(tried)
            if not tried or not self._tries[namespace]:
                del self._tries[namespace]
        return found

    def _note(self, name: PortName, lack: Lack | None) -> None:
        service = service_of(name)
        ports = self.of_service.setdefault(service, {})
        ports.pop(name, None)
        ports |= {name: lack} if lack else {}
        if not ports:
            del self.of_service[service]
        self.changed.add(service)


def service_of(name: PortName) -> Key:
    return Key(name.namespace, name.service)
