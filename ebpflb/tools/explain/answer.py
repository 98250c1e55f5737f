# SPDX-License-Identifier: Apache-2.0
"""The complete answer: the path of a connection, each endpoint with its chance, and the verdict."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from enum import IntEnum
from pathlib import Path
from typing import Any

from msgspec import Struct

from ebpflb.entries.services import Frontend, service_of
from ebpflb.errors import EbpflbError
from ebpflb.kernel.attach import cgroup_links, tcx, uplink_program
from ebpflb.kernel.maps import layout, records
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.node import namespaces
from ebpflb.kernel.recording import Answer, PrivateMaps, RecordingPrograms
from ebpflb.model import addresses
from ebpflb.model.hand_over import COMES_IN
from ebpflb.model.pools import answered_by
from ebpflb.model.services import Protocol
from ebpflb.options import Paths
from ebpflb.serve import status as agent_status
from ebpflb.tools import ask, pins
from ebpflb.tools.explain.asking import (
    OUTSIDE_CLIENT,
    Client,
    MapFacts,
    NamedService,
    Share,
    find_client,
    find_frontend,
)
from ebpflb.tools.explain.ways import PacketWay, Row, Way, affinity_key, call

_LOCAL_PORTS = (32_768, 60_999)  # the default of net.ipv4.ip_local_port_range
_FLOWS = ("tcp_flows", "other_flows")
_SERVICE_AT = layout.ffi.offsetof("struct flow", "service")


class ExitStatus(IntEnum):
    """The outcome of the connection, and the command's exit status."""

    ENDPOINT = 0  # an endpoint gets it, or its existing flow continues
    LEFT_ALONE = 3  # it belongs to no service: the datapath leaves it alone
    REFUSED = 4
    DROPPED = 5  # it times out


class Explained(Struct):
    """The answer; ``shares`` is empty if no endpoint had to be chosen."""

    asked: Frontend
    client: Client
    rows: list[Row]
    shares: list[Share]
    verdict: str
    says: str
    status: ExitStatus
    service: str = ""
    notes: list[str] = []
    is_handed_over: bool = False  # other requests for the frontend, if not this one

    @property
    def protocol(self) -> str:
        return Protocol(self.asked.protocol).name

    def steps(self) -> Iterator[dict[str, str]]:
        """Yield the rows of the table of steps."""
        asked = f"{self.asked}/{self.protocol.lower()} from {self.client}"
        verdict = Row("verdict", f"{self.verdict}: {self.says}")
        for it in (Row("connection", asked), *self.rows, verdict):
            yield {"step": it.step, "what": it.says}

    def as_data(self) -> dict[str, Any]:
        """Return the answer for JSON and YAML, with all endpoints."""
        client = self.client
        return {
            "to": str(self.asked),
            "protocol": self.protocol,
            "from": {
                "kind": client.kind,
                "name": client.name,
                "address": str(client.address) if client.address else None,
                "netns": client.netns or None,
            },
            "service": self.service or None,
            "steps": [*self.steps()],
            "endpoints": [share._asdict() for share in self.shares],
            "verdict": self.verdict,
            "says": self.says,
            "status": int(self.status),
            "notes": self.notes,
        }


def explain(
    state: StateDir,
    cache: Path,
    to: Frontend | NamedService,
    sender: str,
    port: int | None = None,
) -> Explained:
    """Ask the datapath of this state directory, in its node's network namespace.

    Raises NodeError and other errors of ebpflb, each saying what to do, or OSError.
    """
    with ExitStack() as opened:
        pinned = {
            **opened.enter_context(pins.pinned_maps(state.directory)),
            **opened.enter_context(pins.handed_maps(state.directory)),
        }
        maps = opened.enter_context(PrivateMaps(pinned))
        asked = find_frontend(maps.pinned, to) if isinstance(to, NamedService) else to
        node = pins.node_namespace(maps.pinned)
        return namespaces.call_in(node, lambda: _explain(state, maps, cache, asked, sender, port))


def agents_notes(paths: Paths, found: Explained) -> Iterator[str]:
    """Yield what an agent knows of the destination: endpoints set aside, who answers for a load
    balancer address, and to whom packets from outside are handed.
    """
    published = agent_status.read(paths)
    if published is None:
        return
    if aside := published.set_aside.get(found.service):
        yield f"set aside, as they do not answer this node: {aside}"
    address, parts = str(found.asked.address), list[str]()
    if owner := published.address_owners.get(address):
        parts.append(answered_by(address, owner, published.address_nodes))
    if found.is_handed_over and found.service:
        namespace, _, name = service_of(found.service).partition("/")
        own = f"{addresses.family(found.asked.address)}: "
        with suppress(EbpflbError):  # without an agent nobody knows
            notes = [it.removeprefix(own) for it in ask.service(paths, namespace, name).notes]
            parts += [note for note in notes if note.startswith(COMES_IN)]
    if parts:
        yield "; ".join(parts)


def _explain(
    state: StateDir, maps: PrivateMaps, cache: Path, asked: Frontend, sender: str, port: int | None
) -> Explained:
    facts = _facts(state, maps)
    client = find_client(sender, asked.address.version, facts)
    notes = list(client.notes) + copy_memory(maps, facts, asked, client)
    writes = facts.settings.writes
    with RecordingPrograms(maps, cache) as recorder:
        way = _way(recorder, facts, asked, client, port or random.randint(*_LOCAL_PORTS))
    if maps.pinned["settings"].get(0).writes != writes or writes % 2:
        notes.append("the agent changed the maps meanwhile: run the command again to be sure")
    shares: list[Share] = []
    if way.noted and way.service and way.noted.candidates and way.noted.candidates.size:
        shares = list(facts.shares(way.service, way.noted.candidates, way.noted.only))
    verdict, says, status = _verdict(way)
    if status is ExitStatus.LEFT_ALONE:
        says = _of_another_node(asked, facts) or says
    handed = maps.pinned.get("handed_frontends")
    is_handed_over = handed is not None and handed.get(asked) is not None
    entry = way.service or (facts.service_at(asked) if is_handed_over else None)
    service = facts.service(entry.id) if entry else ""
    return Explained(
        asked, client, way.rows, shares, verdict, says, status, service, notes, is_handed_over
    )


def _of_another_node(asked: Frontend, facts: MapFacts) -> str:
    """Return a sentence if the NodePort's address belongs to another node; else ""."""
    nodeport = asked._replace(address=type(asked.address)(0))
    service = facts.service_at(nodeport)
    if not service or asked.address.is_loopback or asked.address in namespaces.own_addresses():
        return ""
    return (
        f"left alone: port {asked.port} is a NodePort of {facts.service(service.id)}, but"
        f" {asked.address} is not an address of this node: run `ebpflb explain` on the node "
        "that has it"
    )


def _facts(state: StateDir, maps: PrivateMaps) -> MapFacts:
    hooks = cgroup_links.attached(state)
    pins = state.devices_directory.glob("*")
    devices = tcx.indexes(pin.name.partition("-")[0] for pin in pins)
    hands_over = uplink_program.HAND_OVER.recorded(state) if "hops" in maps.pinned else ()
    return MapFacts(
        maps.pinned,
        cgroup_links.cgroup_of(state),
        devices,
        socket_hooks="connect4" in hooks,
        hands_over=hands_over,
    )


def copy_memory(maps: PrivateMaps, facts: MapFacts, asked: Frontend, client: Client) -> list[str]:
    """Copy what the programs remember of this client and this service: session affinity, and
    flows.
    """
    ids = facts.service_ids(asked)
    for is_packet in (True, False):
        for number in ids:
            key = records.codec("struct affinity_key").pack(
                affinity_key(client, number, is_packet=is_packet)
            )
            for name in ("affinity", "new_affinity"):
                maps.copy_key(name, key)
    if client.address is None:
        return []
    address = layout.address_bytes(client.address)
    numbers = {number.to_bytes(4, "little") for number in ids}

    def matches(key: bytes, value: bytes) -> bool:
        return address in (key[:16], key[16:32]) or value[_SERVICE_AT : _SERVICE_AT + 4] in numbers

    for name in ("handed_openings", "handed_connections", "handed_datagrams"):
        if name in maps.maps:
            maps.copy_rows(name, (address,), lambda key, _: key.startswith(address))
    table = _FLOWS[asked.protocol != Protocol.TCP]
    if maps.copy_rows(table, (address, *numbers), matches):
        return []
    return [f"{table} has very many flows of this service: some are not shown"]


def _way(
    recorder: RecordingPrograms, facts: MapFacts, asked: Frontend, client: Client, port: int
) -> Way:
    """Return the path of the socket's call, if hooks see it, and of its packets, if any."""
    way = Way()
    if client.hooked:
        way = call(recorder, facts, asked, client)
        if way.answer is not Answer.LEAVE:
            return way
    elif client.kind != OUTSIDE_CLIENT:
        way.say("hook", f"no socket hook sees the sockets of {client}")
    packet = PacketWay(recorder, facts, asked, client, port).go()
    packet.rows = [*way.rows, *packet.rows]
    if way.noted and way.noted.verdict and not (packet.noted and packet.noted.verdict):
        packet.noted = way.noted
    return packet


_SENT = (
    "goes to an endpoint, which sees {}",
    ExitStatus.ENDPOINT,
)  # the client that the endpoint sees
_LEFT_ALONE = "left alone: it is handled as if ebpflb were not there", ExitStatus.LEFT_ALONE
_DROPS = {
    "no_local_endpoint": "policy Local, and no endpoint on this node: the client times out",
    "source_denied": "the service's source ranges do not allow the client: it times out",
    "unknown_port": "no service has this port of a load balancer's address: the client times out",
    "unallocated": "no service has this address of a service range: the client times out",
    "ports_exhausted": "no free port or address for masquerading: the packet is dropped",
    "flows_full": "no space for another flow: the packet is dropped",
    "recycled": "the maps changed while they were read: run the command again",
    "too_long": "too long for the device where the request came in: the sender gets an ICMP error",
    "reject_limited": "refused without a reply: over the limit of replies a second",
}
_VERDICTS = {
    "established": ("belongs to a known flow and is handled as before", ExitStatus.ENDPOINT),
    **dict.fromkeys(("translated", "masqueraded", "port_changed"), _SENT),
    **{name: (says, ExitStatus.DROPPED) for name, says in _DROPS.items()},
    "passed_through": (
        "goes on to the router: another node or cluster may have an endpoint",
        ExitStatus.LEFT_ALONE,
    ),
}


def _verdict(way: Way) -> tuple[str, str, ExitStatus]:
    """Return the verdict's name, its words, and the exit status."""
    if way.went == "handed":
        says = "goes to an endpoint on another node, which sees the client and answers it"
        return "handed", says, ExitStatus.ENDPOINT
    name = (way.noted.verdict if way.noted else None) or "passed"
    if name == "refused" or way.went == "refused":
        what = "the service has no endpoint" if way.service else "no service has this port"
        return "refused", f"{what}: connection refused", ExitStatus.REFUSED
    says, status = _VERDICTS.get(name, _LEFT_ALONE)
    if way.went == "dropped" or way.answer is Answer.DENY:
        return name, _DROPS.get(name, "the packet is dropped"), ExitStatus.DROPPED
    if way.answer is Answer.REWRITE and name == "translated":
        says = "at the socket; its packets are not translated"
    elif way.is_masqueraded:  # the flow tables set the source at egress
        says = says.format("this node as the client")
    return name, says.format(f"the client{' with another port' * (name == 'port_changed')}"), status
