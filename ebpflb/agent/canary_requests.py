# SPDX-License-Identifier: Apache-2.0
"""What `ebpflb doctor` asks of the canary, over the local socket; the loop carries it out.

/v1/canary/begin?client=&endpoint=&node=&port=&nodeport=   the first three once for each family
/v1/canary/renew?id=
/v1/canary/end?id=
"""

from collections.abc import Callable
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qs

from ebpflb.agent.canary_sync import CanaryRefused, CanarySync, CanaryWish
from ebpflb.agent.inspection import Inspection, Question, answer, error
from ebpflb.errors import EbpflbError
from ebpflb.plan.canary import CanaryLease
from ebpflb.serve.http import NOT_FOUND, Handler, Request, Response

_PORTS = range(1, 1 << 16)

_Query = dict[str, list[str]]
_Do = Callable[[CanarySync], CanaryLease]


class Order(Question[CanaryLease]):
    """The loop answers it with the canary, which it may change."""


class CanaryRequests:
    """A handler of the local socket, before ``others``; ``put`` is that of the inbox."""

    def __init__(self, put: Callable[[Order], None], others: Handler) -> None:
        self._put, self._others = put, others

    def respond(self, request: Request) -> Response:
        begins, _, what = request.path.rpartition("/")
        if begins != "/v1/canary":
            return self._others(request)
        known = {"begin": _begin, "renew": _renew, "end": _end}
        if what not in known:
            return NOT_FOUND
        try:
            return answer(self._carried_out(known[what](parse_qs(request.query))))
        except TimeoutError:
            return error(503, "the agent is busy, or starts just now")
        except ValueError as wrong:
            return error(400, str(wrong))
        except CanaryRefused as refused:
            return error(409, str(refused))
        except EbpflbError as failed:
            return error(503, str(failed))

    def _carried_out(self, do: _Do) -> CanaryLease:
        order = Order(do)
        self._put(order)
        return order.result()


def local_pages(put: Callable[[Any], None]) -> Handler:
    """All that the local socket answers; ``put`` is that of the inbox."""
    return CanaryRequests(put, Inspection(put).respond).respond


def _begin(query: _Query) -> _Do:
    named = [list(map(ip_address, query.get(it, ()))) for it in ("client", "endpoint", "node")]
    addresses = tuple(zip(*named, strict=True))
    if any(len({it.version for it in each}) > 1 for each in addresses):
        raise ValueError("client, endpoint and node are of different families")
    port, nodeport = (int(query.get(it, ["0"])[0]) for it in ("port", "nodeport"))
    if port not in _PORTS or nodeport not in _PORTS or not addresses:
        raise ValueError("client, endpoint, node, port and nodeport are needed")
    wish = CanaryWish(addresses, port, nodeport)
    return lambda canary: canary.begin(wish)


def _renew(query: _Query) -> _Do:
    lease = _id(query)

    def renew(canary: CanarySync) -> CanaryLease:
        canary.renew(lease)
        return CanaryLease(lease, [])

    return renew


def _end(query: _Query) -> _Do:
    lease = _id(query)

    def end(canary: CanarySync) -> CanaryLease:
        canary.end(lease)
        return CanaryLease(lease, [])

    return end


def _id(query: _Query) -> str:
    return query.get("id", [""])[0]
