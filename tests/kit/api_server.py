# SPDX-License-Identifier: Apache-2.0
"""A fake API server: real HTTP on 127.0.0.1; lists, watches and discovery as Kubernetes has them.

Every change gets the next resource version and a place in the history. A list is a snapshot of the
newest version, sent in pages, as by a server without a watch cache. A watch sends the history from
its version on; a change that makes an object start or stop matching the selectors is ADDED or
DELETED there. A test can make requests fail: ``compact``, ``expiring``, ``drop``, ``fail``,
``say``, ``muted``, ``delay``.
"""

import json
import ssl
import threading
import time
from collections import Counter, defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from socket import SHUT_RDWR, socket
from typing import Any

from tests.kit import api_patches
from tests.kit.api_discovery import OBJECT_PATHS
from tests.kit.api_history import Change, Json, Request, event, fits, key, status
from tests.kit.api_http import Handler
from tests.kit.http_server import Server

WAIT_SECONDS = 60.0  # seconds that a test waits for something to happen

Key = tuple[str, str]


@dataclass
class Collection:
    objects: dict[Key, Json] = field(default_factory=dict)
    history: list[Change] = field(default_factory=list)
    oldest: int = 0  # a watch from before this version is 410 Gone


class _HttpServer(Server):
    def __init__(self, *arguments: Any) -> None:
        self.connections: list[socket] = []
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.append(request)
        super().process_request(request, client_address)


class FakeApiServer:
    """``with FakeApiServer() as api:`` serves until the end of the block. With a ``token`` only
    clients that send the token are served.
    """

    def __init__(
        self,
        *,
        token: str = "secret",
        port: int = 0,
        certificate: Path | None = None,
        address: str = "127.0.0.1",
    ) -> None:
        self.requests: list[Request] = []
        self.created: list[Json] = []
        self.patches: list[Json] = []  # that were applied: path, type, body
        self.gone_in_stream = False  # 410 as an ERROR event instead of an HTTP status
        self.expiring = 0  # so many continue tokens have expired when they come back
        self.losing = False  # watches do not tell of what happens now
        self.muted = False  # watches say nothing any more, and do not end either
        self.delay = 0.0  # seconds before each answer
        self.token = token
        self.open: Counter[str] = Counter()
        self.changed = threading.Condition()
        self._certificate = certificate
        self._collections = {kind: Collection() for kind in OBJECT_PATHS}
        self._failures: defaultdict[str, deque[tuple[int, bytes, str]]] = defaultdict(deque)
        self._tokens: dict[str, list[Json]] = {}
        self._version = 1
        self._generation = 0
        self._server = _HttpServer((address, port), partial(Handler, self.answer))
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(  # a client that says nothing stops no other
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )

    @property
    def version(self) -> str:
        """The newest resource version."""
        return str(self._version)

    @property
    def url(self) -> str:
        scheme = "https" if self._certificate else "http"
        address, port = self._server.server_address[:2]
        return f"{scheme}://{address!s}:{port}"

    def __enter__(self) -> "FakeApiServer":
        self._server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.__exit__()
        self.drop()

    def hang_up(self) -> None:
        """End all connections, also idle ones, as a server does when its process ends."""
        for connection in self._server.connections:
            with suppress(OSError):
                connection.shutdown(SHUT_RDWR)

    # What the cluster does

    def put(self, object: Json) -> str:
        """Create or change an object; return its new resource version."""
        with self.changed:
            self._version += 1
            version = str(self._version)
            object = object | {"metadata": object["metadata"] | {"resourceVersion": version}}
            objects = self._collections[object["kind"]].objects
            self._record(object["kind"], objects.get(key(object)), object)
            objects[key(object)] = object
            return version

    def delete(self, object: Json) -> None:
        with self.changed:
            self._version += 1
            gone = self._collections[object["kind"]].objects.pop(key(object))
            metadata = gone["metadata"] | {"resourceVersion": str(self._version)}
            self._record(object["kind"], gone, None, gone | {"metadata": metadata})

    def _record(
        self, kind: str, before: Json | None, after: Json | None, last: Json | None = None
    ) -> None:
        self._collections[kind].history.append(
            Change(self._version, last or before, after, lost=self.losing)
        )
        self.changed.notify_all()

    # What goes wrong, and what is only said

    def say(self, kind: str, line: bytes) -> None:
        """Send this line to the open watches of a kind."""
        with self.changed:
            self._collections[kind].history.append(Change(self._version, line=line))
            self.changed.notify_all()

    def bookmark(self, kind: str) -> str:
        """Send the open watches the newest version; return it."""
        metadata = {"resourceVersion": str(self._version), "creationTimestamp": None}
        bookmark = {"type": "BOOKMARK", "object": {"kind": kind, "metadata": metadata}}
        self.say(kind, json.dumps(bookmark).encode())
        return str(self._version)

    def compact(self, oldest: str = "") -> None:
        """Forget the history before ``oldest``, or before now: no one can resume from an earlier
        version.
        """
        with self.changed:
            self._version += not oldest
            for collection in self._collections.values():
                collection.oldest = int(oldest or self._version)

    def drop(self) -> None:
        """Break the connections of all watches, in the middle of a line."""
        with self.changed:
            self._generation += 1
            self.changed.notify_all()

    def fail(
        self, kind: str, status: int, body: bytes = b"", times: int = 1, encoding: str = ""
    ) -> None:
        """Answer the next requests for a kind with this status and body, in this encoding."""
        self._failures[kind].extend([(status, body, encoding)] * times)

    # What a test wants to know

    def lists(self, kind: str) -> int:
        """Return how many lists were requested."""
        asked = [request.query for request in self.requests if request.kind == kind]
        return sum("watch" not in query and "continue" not in query for query in asked)

    def watches(self, kind: str) -> list[dict[str, str]]:
        return [it.query for it in self.requests if it.kind == kind and it.is_watch]

    def wait_for_watch(self, kind: str, count: int = 1) -> None:
        """Return when a watch of this kind has been opened for the ``count``-th time."""

        def watched() -> bool:
            return self.open[kind] > 0 and len(self.watches(kind)) >= count

        with self.changed:
            assert self.changed.wait_for(watched, WAIT_SECONDS), f"no watch: {kind}"

    def kubeconfig(self, folder: Path) -> Path:
        cluster: Json = {"server": self.url}
        if self._certificate:
            cluster["certificate-authority"] = str(self._certificate)
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "it",
            "clusters": [{"name": "it", "cluster": cluster}],
            "users": [{"name": "it", "user": {"token": self.token} if self.token else {}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        }
        path = folder / "kubeconfig"
        path.write_text(json.dumps(config))
        return path

    # How it answers

    def answer(self, request: Request, handler: Handler) -> None:
        with self.changed:
            self.requests.append(request)
            self.changed.notify_all()
        time.sleep(self.delay)
        if self.token and handler.headers["Authorization"] != f"Bearer {self.token}":
            handler.refuse(401, "Unauthorized")
        elif self._failures[request.kind]:
            handler.send(*self._failures[request.kind].popleft())
        elif request.posted:
            self._create(request.posted, handler)
        elif "name" in request.query:
            self._get(request, handler)
        elif request.patched:
            self._patch(request.patched, handler)
        elif request.is_watch:
            self._watch(request, handler)
        else:
            self._list(request, handler)

    def _create(self, object: Json, handler: Handler) -> None:
        """Record the object before the answer, because the client may look at once."""
        with self.changed:
            self.created.append(object)
            self.changed.notify_all()
        handler.send(201, json.dumps(object).encode())

    def _get(self, request: Request, handler: Handler) -> None:
        """Answer with one object without a namespace."""
        found = self._collections[request.kind].objects.get(("", request.query["name"]))
        if found is None:
            handler.refuse(404, f"{request.query['name']} is not here", reason="NotFound")
        else:
            handler.send(200, json.dumps(found).encode())

    def _patch(self, sent: Json, handler: Handler) -> None:
        """Patch an object; the patch is recorded before the answer, as for creations."""
        *_, kind, name = sent["path"].removesuffix("/status").split("/")
        namespace = sent["path"].split("/")[4] if kind == "services" else ""
        kinds = {"nodes": "Node", "services": "Service"}
        with self.changed:
            node = self._collections[kinds[kind]].objects.get((namespace, name))
            if node is None:
                handler.refuse(404, f'{kind} "{name}" not found')
                return
            try:
                changed = api_patches.applied(node, sent["type"], sent["body"])
            except api_patches.Conflict as reason:
                handler.refuse(409, str(reason))
                return
            except api_patches.Refused as reason:
                handler.refuse(422, str(reason))
                return
            self.put(changed)
            self.patches.append(sent)
            self.changed.notify_all()
        handler.send(200, json.dumps(changed).encode())

    def objects(self, kind: str) -> list[Json]:
        """Return all objects of a kind, as they are now."""
        with self.changed:
            return list(self._collections[kind].objects.values())

    def node(self, name: str) -> Json:
        """Return the current Node object."""
        return self._collections["Node"].objects["", name]

    def _list(self, request: Request, handler: Handler) -> None:
        with self.changed:
            version, token = str(self._version), request.query.get("continue")
            everything = list(self._collections[request.kind].objects.values())
        if int(request.query.get("resourceVersion", 0)) > int(version):
            handler.refuse(504, "Too large resource version")
            return
        if token and self.expiring:
            self.expiring -= 1
            handler.refuse(410, "The provided continue parameter is too old")
            return
        items = self._tokens[token] if token else [it for it in everything if fits(it, request)]
        limit = int(request.query.get("limit", len(items)))
        metadata = {"resourceVersion": token.partition(".")[0] if token else version}
        if items[limit:]:
            metadata["continue"] = f"{metadata['resourceVersion']}.{len(items)}"
            self._tokens[metadata["continue"]] = items[limit:]
        handler.send(200, json.dumps({"metadata": metadata, "items": items[:limit]}).encode())

    def _watch(self, request: Request, handler: Handler) -> None:
        collection = self._collections[request.kind]
        version = int(request.query["resourceVersion"])
        gone = version < collection.oldest
        if gone and not self.gone_in_stream:
            handler.refuse(410, "too old resource version")
            return
        handler.begin_stream()
        if gone:
            handler.send_chunk({"type": "ERROR", "object": status(410, "too old")})
            handler.end_stream()
            return
        with self.changed:
            self.open[request.kind] += 1
            self.changed.notify_all()
            try:
                self._follow(request, handler, version)
            finally:
                self.open[request.kind] -= 1

    def _follow(self, request: Request, handler: Handler, version: int) -> None:
        """Send the history from ``version`` on until time is up or the connection is dropped."""
        history = self._collections[request.kind].history
        position = sum(change.version <= version for change in history)
        generation = self._generation
        end = time.monotonic() + float(request.query["timeoutSeconds"])
        while generation == self._generation:
            for change in history[position:] if not self.muted else ():
                handler.send_chunk(event(change, request))
                position += 1
            left = end - time.monotonic()
            if left <= 0 and not self.muted:
                handler.end_stream()
                return
            self.changed.wait(None if self.muted else left)
        handler.drop()
