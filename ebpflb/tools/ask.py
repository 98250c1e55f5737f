# SPDX-License-Identifier: Apache-2.0
"""Asks the running agent, by HTTP over the socket in its run directory."""

import errno
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException
from typing import TypeVar
from urllib.parse import urlencode

import msgspec

from ebpflb import unix_socket
from ebpflb.errors import NodeError, NotFound, in_words, one_line
from ebpflb.model.events import AuditReport
from ebpflb.model.nodes import Pulse
from ebpflb.options import Paths
from ebpflb.serve.service_page import ServiceList, ServicePage

SECONDS = 10.0
AUDIT_SECONDS = 90.0  # the objects are listed, twice if any differs
PULSE_SECONDS = 2.0  # an agent whose process runs answers at once
_GONE = {errno.ENOENT: "no agent runs", errno.ECONNREFUSED: "no agent runs"}
_OTHER_VERSION = "the agent is of another version"

_Asked = TypeVar("_Asked")


class NoAnswer(Exception):
    """The reason why the agent does not answer."""


class Hangs(NoAnswer):
    """The agent does not answer in time: its process is stopped, or gets no CPU time."""


class _Error(msgspec.Struct):
    error: str


def pulse(paths: Paths) -> Pulse | None:
    """Return whether the agent's loop runs, or None if it cannot be asked (no socket, another
    version).

    Raises Hangs.
    """
    try:
        return get(paths, "/v1/pulse", Pulse, PULSE_SECONDS)
    except Hangs:
        raise
    except NoAnswer:
        return None


def audit(paths: Paths) -> AuditReport:
    """Return the findings of an audit that the agent makes now. Raises NoAnswer or Hangs."""
    pulse(paths)  # says at once that the agent hangs
    return get(paths, "/v1/audit", AuditReport, AUDIT_SECONDS)


def service(paths: Paths, namespace: str, name: str) -> ServicePage:
    """Return the page of a Service.

    Raises NotFound, with the most similar names, if there is no such Service, and NodeError if no
    agent answers.
    """
    query = urlencode({"namespace": namespace, "name": name}, errors="replace")
    with _maps_instead(f"--service {namespace}/{name}"):
        return get(paths, f"/v1/service?{query}", ServicePage)


@contextmanager
def _maps_instead(words: str) -> Iterator[None]:
    """Turn NoAnswer into a NodeError that says which maps to read instead."""
    try:
        yield
    except NoAnswer as reason:
        instead = f"`ebpflb maps dump {one_line(words)}` shows what the maps hold"
        raise NodeError(f"{reason}: only the agent knows its Services; {instead}") from None


def services(paths: Paths, patterns: tuple[str, ...], limit: int) -> ServiceList:
    """Return the Services whose NAMESPACE/NAME fits a shell pattern, sorted by name; ``more`` says
    how many match beyond the limit.

    The agent answers in parts. Raises NodeError if it does not answer.
    """
    found = ServiceList([], more=1)
    while found.more and len(found.services) < limit:
        after = found.services[-1].service if found.services else ""
        query = [("after", after), ("limit", limit - len(found.services))]
        query += [("match", pattern) for pattern in patterns]
        with _maps_instead("services"):
            part = get(paths, f"/v1/services?{urlencode(query, errors='replace')}", ServiceList)
        part.services[:0] = found.services
        found = part
    return found


def get(paths: Paths, path: str, kind: type[_Asked], seconds: float = SECONDS) -> _Asked:
    """Return the answer. Raises NotFound for an unknown Service; NoAnswer, also if the agent does
    not know the path.
    """
    status, body = exchange(paths, path, seconds)
    try:
        if status == 200:
            return msgspec.json.decode(body, type=kind)
        text = msgspec.json.decode(body, type=_Error).error
    except msgspec.MsgspecError:
        raise NoAnswer(_OTHER_VERSION) from None
    if status == 404:
        raise NotFound(text)
    raise NoAnswer(text)


def exchange(paths: Paths, path: str, seconds: float) -> tuple[int, bytes]:
    """Return the status and the body of the agent's answer. Raises NoAnswer."""
    try:
        with closing(unix_socket.connect(paths.socket_file, seconds)) as connection:
            asking = HTTPConnection("ebpflb")
            asking.sock = connection
            asking.request("GET", path)
            answer = asking.getresponse()
            return answer.status, answer.read()
    except (TimeoutError, BlockingIOError) as error:
        raise Hangs(f"{paths.socket_file}: {in_words(error)}") from None
    except OSError as error:
        known = _GONE.get(error.errno or 0, "")
        raise NoAnswer(known or f"{paths.socket_file}: {in_words(error)}") from None
    except HTTPException:
        raise NoAnswer(_OTHER_VERSION) from None
