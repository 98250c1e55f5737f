# SPDX-License-Identifier: Apache-2.0
"""Keep the nft table of the netfilter engine: an element for the id of each backend in the maps.

An element is written before the slots and services that lead to it, and removed when its id leaves
the quarantine (plan/planner.py). The maps determine the elements: a restart, and the thread that
puts a removed table back, read them there.

After an upgrade with another layout the maps are empty, and until the new programs are attached the
former ones choose by former ids: their elements stay until then (plan.allocators.FormerIds).
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from ebpflb.entries.services import Flags, Frontend, ServiceEntry, Translation
from ebpflb.errors import KernelError, NodeError
from ebpflb.kernel.map_writer import NETFILTER
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.layout import columns, names
from ebpflb.kernel.maps.readers import Translations
from ebpflb.kernel.netfilter import held_ports, table, watch
from ebpflb.kernel.netfilter.elements import Change, Elements, read_backends, unpack
from ebpflb.kernel.netfilter.flowtable import FlowtableSync, flowtable_obstacle
from ebpflb.kernel.netfilter.probe import can_translate_sctp, left_answers, netfilter_obstacle
from ebpflb.kernel.netfilter.table import Keeper, NetfilterTable, TableOptions, table_options
from ebpflb.kernel.node import sysctls
from ebpflb.kernel.node.sysctls import bridge_calls
from ebpflb.model import packet_path
from ebpflb.model.addresses import Address, Network
from ebpflb.model.annotations import LEAST_CONNECTIONS
from ebpflb.model.devices import Devices
from ebpflb.model.nodes import why_off
from ebpflb.model.packet_path import OFF, Engine, PacketMark, PacketPath
from ebpflb.model.services import Protocol
from ebpflb.options import Options
from ebpflb.plan.planner import Plan

log = logging.getLogger(__name__)

_FLAGS = columns("struct service", flags="I")
_PROTOCOL = columns("struct frontend", protocol="B")
_LEAST_CONNECTIONS = next(
    bit for bit, name in names("service_flag", "SERVICE_").items() if name == "least_connections"
)

Element = tuple[int, Address, int]  # a Translation as the nft map has it


class NetfilterSync:
    """Writes the engine's table.

    ``active`` is true between ``start`` and ``end``: the kernel's NAT then translates new
    connections. Otherwise nothing is written. Safe in two threads, the agent's loop and the watch
    of the table (kernel/netfilter/watch.py).
    """

    def __init__(self, maps: Mapping[str, Map], options: Options, *, sctp: bool = False) -> None:
        """Create the object; changes nothing in the kernel."""
        self.active = False
        self._shadow = options.shadow
        self._translates_sctp = sctp
        self._wanted, self._maps = Translations(maps), maps
        self._either = [
            table_options(options, sctp=sctp, beside_flows=each) for each in (False, True)
        ]
        self._masquerade_ports = options.masquerade_ports
        self._keeps_flows = options.scheduler == LEAST_CONNECTIONS
        # Whether the flow tables may open or have flows: then the rules leave them their ports.
        self.beside_flows = False
        self.is_liberal = False  # conntrack ignores windows, and no segment is dropped
        self._liberal_file = options.paths.liberal_file
        # Until the rules are known, what the last agent has left stays.
        self._may_be_liberal = options.liberal_by_rules and self._liberal_file.exists()
        self._lock = threading.Lock()
        self._table: NetfilterTable | None = None
        self._elements: Elements | None = None
        self._keeper = Keeper()
        self._former: set[int] = set()  # ids whose elements ``start`` must keep

    @property
    def flags(self) -> Flags:
        """The flags in map settings that let programs choose for netfilter."""
        return NETFILTER if self._translates_sctp else NETFILTER - {"netfilter_sctp"}

    def read_former(self) -> list[Translation]:
        """Return the elements of ids that are not in the maps, which ``start`` then keeps.

        Without a table that can be read there are none.
        """
        try:
            existing = read_backends()
        except NodeError:
            return []
        for id, _ in self._wanted.packed():
            existing.pop(id, None)
        self._former = set(existing)
        return [Translation(id, *unpack(endpoint)) for id, endpoint in existing.items()]

    def start(self) -> None:
        """Write the table and all elements; does nothing with --shadow.

        Raises NodeError.
        """
        if self._shadow:
            return
        with self._lock:
            if self._table is None:
                self._table = NetfilterTable(self._either[0])
                self._elements = Elements(self._table.session, self._either[0])
            self.beside_flows = self._may_have_flows()
            self.is_liberal = self._may_be_liberal and sysctls.be_liberal(self._liberal_file)
            options = self._options(self.beside_flows, is_liberal=self.is_liberal)
            self._table.set_options(options)
            wanted = dict(self._wanted.packed())
            if not (self._table.is_owned and not self._table.differences()):
                self._table.build()
            if not self._table.is_owned:
                self._keeper.open()
            self._fill(wanted)
            self._be_strict()
            self.active, self._former = True, set()

    def _may_have_flows(self) -> bool:
        """Whether a flow is in the flow tables, or a Service may open some there."""
        if self._keeps_flows:
            return True
        for keys, values in self._maps["services"].slices():
            if any(flags & _LEAST_CONNECTIONS for (flags,) in _FLAGS.iter_unpack(values)):
                return True
            protocols = {protocol for (protocol,) in _PROTOCOL.iter_unpack(keys)}
            if Protocol.SCTP in protocols and not self._translates_sctp:
                return True
        return held_ports.has_flows(self._maps)

    def _leave_ports(self, plan: Plan) -> None:
        """Leave the flow tables' ports to them before the plan lets them open a first flow."""
        opens = any(self._is_for_flows(*each) for each in plan.services)
        if opens and not self.beside_flows:
            self._set_options(beside_flows=True, is_liberal=self.is_liberal)
            self.hold_ports()

    def _is_for_flows(self, frontend: Frontend, entry: ServiceEntry) -> bool:
        is_untranslatable = frontend.protocol == Protocol.SCTP and not self._translates_sctp
        return is_untranslatable or "least_connections" in entry.flags

    def forget_flows(self) -> None:
        """Note it if the flow tables have no flows any more, and open none. Raises NodeError."""
        if self.active and self.beside_flows and not self._may_have_flows():
            self._set_options(beside_flows=False, is_liberal=self.is_liberal)
            held_ports.let_go(self._maps)

    def hold_ports(self) -> None:
        """Keep open connections' ports from the flow tables, before they open a first flow."""
        held_ports.hold(self._maps, *self._masquerade_ports)

    def let_be_liberal(self, *, wanted: bool) -> None:
        """Have conntrack accept segments out of the window, then remove the chain that drops them;
        or the reverse: the chain, then the sysctl.

        So clients never get such segments untranslated. Raises KernelError.
        """
        self._may_be_liberal = wanted
        if self.active:
            self._set_liberal(wanted=wanted)

    def _set_liberal(self, *, wanted: bool) -> None:
        is_liberal = wanted and sysctls.be_liberal(self._liberal_file)
        if is_liberal != self.is_liberal:
            try:
                self._set_options(beside_flows=self.beside_flows, is_liberal=is_liberal)
            except NodeError as error:
                raise KernelError("writing the chain invalid", 0, str(error)) from error
        self._be_strict()

    def _be_strict(self) -> None:
        """Put the sysctl back, unless something still wants it."""
        if self._either[0].drops_invalid and not self.is_liberal:
            sysctls.be_strict(self._liberal_file)

    def _options(self, beside_flows: bool, *, is_liberal: bool) -> TableOptions:
        return self._either[beside_flows]._replace(is_liberal=is_liberal)

    def _set_options(self, *, beside_flows: bool, is_liberal: bool) -> None:
        with self._lock:
            assert self._table
            self._table.set_options(self._options(beside_flows, is_liberal=is_liberal))
        self.restore()
        self.beside_flows, self.is_liberal = beside_flows, is_liberal

    def _fill(self, wanted: Mapping[int, bytes]) -> None:
        """Make the elements equal to ``wanted``, except those of former ids.

        Until this returns the rules drop packets whose backend has no element, so ``wanted`` is
        read before the rules are made.
        """
        assert self._elements
        found, new = self._elements.read(), list[Element]()
        for id, endpoint in wanted.items():
            if found.get(id) == endpoint:
                del found[id]
            else:
                new.append((id, *unpack(endpoint)))
        removed = found.keys() - self._former
        self._elements.write(new, [(id, *unpack(found[id])) for id in removed])

    def end(self) -> None:
        """Leave new flows to the flow tables; ``release`` removes the table later.

        Raises KernelError.
        """
        if self.active:
            self._set_liberal(wanted=False)
        self.active = False

    def write(self, plan: Plan) -> None:
        """Write the plan's elements, before the maps are written. Raises KernelError."""
        if not self.active:
            return
        try:
            self._leave_ports(plan)
            if plan.translations or plan.removed_translations:
                with self._lock:
                    assert self._elements
                    self._elements.write(plan.translations, plan.removed_translations)
        except NodeError as error:
            raise KernelError("writing translations", 0, str(error)) from error

    def restore(self) -> list[str]:
        """Put back what others have removed or changed in the table.

        Return the differences in words.

        Raises NodeError.
        """
        with self._lock:
            if not self.active or self._table is None:
                return []
            if self._table.options.is_liberal and not sysctls.be_liberal(self._liberal_file):
                self.is_liberal = False
                self._table.set_options(self._options(self.beside_flows, is_liberal=False))
            differs = self._table.differences()
            wanted = dict(self._wanted.packed()) if differs else {}
            if differs and not self._table.build():
                self._fill(wanted)
        return differs

    def differences(self) -> list[str]:
        """Return the differences of the table in words, without elements. Raises NodeError."""
        with self._lock:
            return self._table.differences() if self.active and self._table else []

    def compare(self) -> Iterator[list[Change]]:
        """Yield the elements that differ, in steps. Raises NodeError."""
        if self.active and self._elements:
            yield from self._elements.compare(self._wanted)

    def repair(self, changes: list[Change]) -> None:
        """Make these changes. Raises NodeError."""
        with self._lock:
            if self.active and self._elements:
                self._elements.repair(changes)

    def release(self) -> None:
        """Remove the table if the engine is not active and no connection needs its hooks.

        Raises NodeError.
        """
        if self.active or watch.has_dnat_connections():
            return
        with self._lock:
            if not self.active:  # it may have started meanwhile
                choices = self._maps["udp_choices"]
                choices.delete([flow for flow, _ in choices.items()])
                self._close()
                table.remove()
                self._be_strict()

    def close(self) -> None:
        """Close the session; the table stays in force."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._keeper.close()
        if self._table:
            self._table.close()
        self._table = None


# Which engine translates new flows, as long as the agent runs.
#
# Whether pods are on a bridge is known only when the first pod exists, so the engine is decided
# again when devices change, and once per sync period. A reason for another engine counts after it
# has lasted for SETTLE_SECONDS, because a CNI sets up a port step by step. The engine changes at
# most once per sync period. Open flows continue with the engine that opened them. Until the flow
# tables may open flows netfilter goes on to translate (kernel.map_writer).

log = logging.getLogger(__name__)

SETTLE_SECONDS = 5.0
_FORGETS, _FORGET_SECONDS = 4, 600.0  # a tenant may add and remove a scheduler again and again


class EngineChoice:
    """``path`` is the current engine, and why; None before the first ``update``.

    ``due``: when ``update`` may change the engine, for a reason that has not lasted long enough
    yet; infinity if there is none.
    """

    def __init__(
        self,
        options: Options,
        netfilter: NetfilterSync,
        *,
        missing: str | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``missing`` as in ``packet_path.decide``.

        Raises NodeError if the wanted engine cannot work.
        """
        self._options, self._missing = options, missing
        self.netfilter, self._clock = netfilter, clock
        self._changed = -math.inf  # last change of the engine
        self._forgot = deque([-math.inf] * _FORGETS, _FORGETS)
        self.path: PacketPath | None = None
        self.due = math.inf
        packet_path.decide(options.packet_path, missing=missing)

    @property
    def flags(self) -> Flags:
        """The engine's flags in map settings."""
        return self.netfilter.flags if self.is_netfilter else frozenset()

    @property
    def is_netfilter(self) -> bool:
        return self.path is not None and self.path.engine is Engine.NETFILTER

    @property
    def needs_egress(self) -> bool:
        """Whether the flow tables translate new flows, alone or beside netfilter.

        With --shadow they count for netfilter, which translates nothing.
        """
        may_open = self.netfilter.beside_flows or self._options.shadow
        return may_open or not self.is_netfilter

    def forget_flows(self) -> None:
        """As NetfilterSync.forget_flows, four times in ten minutes: programs at egress follow it.

        A failure is left to the watch of the table.
        """
        now, before = self._clock(), self.netfilter.beside_flows
        if now - self._forgot[0] < _FORGET_SECONDS:
            return
        with suppress(NodeError):
            self.netfilter.forget_flows()
        if before and not self.netfilter.beside_flows:
            self._forgot.append(now)

    def update(
        self, devices: Devices, pods: Collection[Network], *, flows_wait: bool = False
    ) -> bool:
        """Decide by the node's current state; return whether the engine differs from the last one.

        While ``flows_wait`` netfilter goes on to translate. When this returns netfilter, the table
        of netfilter is ready. Raises KernelError if --packet-path=netfilter cannot work now.
        """
        unsuited = _unmarked(self._options.packet_mark) or packet_path.unsuited(
            devices, pods, bridge_calls(), self._options.devices
        )
        path = packet_path.decide(
            self._options.packet_path, missing=self._missing, unsuited=unsuited
        )
        if self.path and path.engine is not self.path.engine and not self._is_settled():
            return False
        self.due = math.inf
        if path.engine is Engine.NETFILTER and not self.is_netfilter:
            path = self._prepared(path)
        changed = path != self.path  # the reason names devices, which come and go
        if self.path is None or path.engine is not self.path.engine:
            log.info("packet path: %s (%s)", path.engine, path.reason)
            self._changed = self._clock()
        self.path = path
        if not self.is_netfilter and not flows_wait:
            self.netfilter.end()
        return changed

    def _is_settled(self) -> bool:
        """Whether the engine may change now; otherwise ``due`` says when."""
        now = self._clock()
        if self.due == math.inf:
            self.due = max(now + SETTLE_SECONDS, self._changed + self._options.sync_period)
        return now >= self.due

    def _prepared(self, path: PacketPath) -> PacketPath:
        """Return the path, or the flow tables if the nftables table cannot be made.

        Raises KernelError if netfilter is demanded.
        """
        try:
            self.netfilter.start()
        except NodeError as error:
            if self._options.packet_path == Engine.NETFILTER:
                what = "--packet-path=netfilter cannot work now"
                raise KernelError(what, 0, str(error)) from error
            return PacketPath(Engine.FLOWS, str(error))
        return path


def _unmarked(mark: PacketMark) -> str | None:
    """Return why netfilter may not be used: a FORWARD chain may accept only marked packets."""
    if mark == OFF:
        return None
    return f"only the flow tables set the mark {mark} of --packet-mark"


class Probed(NamedTuple):
    """``missing``: why the netfilter engine cannot work on this node; None if it works."""

    missing: str | None
    sctp: bool = False  # whether the kernel's NAT translates SCTP


def probe_netfilter(options: Options) -> Probed:
    """Try the netfilter engine, unless only the flow tables are wanted: a test would load modules.

    Raises NodeError.
    """
    if options.packet_path == Engine.FLOWS:
        return Probed("not probed, because the flow tables were chosen")
    if left := left_answers(options.paths.answers_file):
        return Probed(left.netfilter, left.sctp)
    missing = netfilter_obstacle()
    return Probed(missing, sctp=not missing and can_translate_sctp())


def flowtable_of(options: Options, missing: str | None) -> FlowtableSync:
    """Return the keeper of the flowtable, for --fast-forward; ``missing`` as in EngineChoice."""
    is_wanted = options.has_flowtable and not missing and not options.shadow
    left = left_answers(options.paths.answers_file) if is_wanted else None
    lacking = left.flowtable if left else flowtable_obstacle() if is_wanted else None
    if lacking:
        log.warning("--fast-forward has no effect with netfilter: %s", lacking)
    off = why_off(options.fast_forward, None)
    return FlowtableSync(is_wanted=is_wanted, missing=lacking, off=off)
