# SPDX-License-Identifier: Apache-2.0
"""Commands survive and name any damage in the maps and the state directory; a start survives an
unknown pin.
"""

import os
import random
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ebpflb.cli.check import check
from ebpflb.cli.cleanup import cleanup
from ebpflb.cli.flows import flows
from ebpflb.cli.maps import maps as maps_command
from ebpflb.cli.status import status
from ebpflb.entries.flows import Timeouts
from ebpflb.errors import EbpflbError, KernelError
from ebpflb.kernel import bpf
from ebpflb.kernel.datapath import Datapath
from ebpflb.kernel.map_writer import capacity_of
from ebpflb.kernel.maps import layout
from ebpflb.kernel.maps.bpf_map import Map, MappedArray
from ebpflb.kernel.maps.state_dir import BPFFS, StateDir, create_map, remove_tree
from ebpflb.kernel.maps.sweep import FLOW_MAPS, SweptTable
from ebpflb.kernel.programs import precompile
from ebpflb.kernel.programs.loader import FrameProgram
from ebpflb.kernel.valid_contents import ValidContents
from ebpflb.tools.dump import ROWS, dump_maps
from ebpflb.tools.flow_list import FlowFilter, list_flows
from tests.kernel.node import nodes

LIKELY = (0, 1, 2, 4, 6, 10, 17, 132, 255)
COMMANDS: dict[str, tuple[click.Command, tuple[str, ...]]] = {
    "maps dump": (maps_command, ("dump", "--all")),
    "status": (status, ()),
    "check": (check, ()),
    "flows list": (flows, ("list",)),
    "cleanup": (cleanup, ()),
}


@pytest.fixture
def state() -> Iterator[StateDir]:
    """Return an agent's state directory; commands run in a separate network namespace."""
    directory = BPFFS / f"ebpflb-test-{os.getpid()}-damaged"
    Datapath(StateDir(directory)).close()
    with nodes.fresh(directory.name):
        yield StateDir(directory)
    remove_tree(directory)


def noise(size: int, chance: random.Random) -> bytes:
    """Return any bytes, or a few bytes that have a meaning in many places."""
    if chance.random() < 0.3:
        return chance.randbytes(size)
    found = bytearray(size)
    for _ in range(chance.randint(0, 6)):
        found[chance.randrange(size)] = chance.choice(LIKELY)
    return bytes(found)


def damage(opened: Map, chance: random.Random) -> None:
    """Write one entry. The kernel may refuse it; a ring buffer has no entries."""
    spec = opened.spec
    if spec.kind == "RINGBUF":
        return
    key, value = noise(spec.key_size, chance), noise(spec.value_size, chance)
    if spec.kind == "LPM_TRIE":
        bits = chance.randint(0, 8 * (spec.key_size - 4))
        key = bits.to_bytes(4, "little") + key[4:]
    if isinstance(opened, MappedArray):
        at = chance.randrange(64) * opened.stride
        opened.memory[at : at + opened.size] = value
    elif "HASH" in spec.kind or spec.kind == "LPM_TRIE":
        bpf.map_update(opened.fd, key, value)
    elif spec.kind == "ARRAY" and spec.name != "scratch":
        bpf.map_update(opened.fd, bytes(4), value)


@pytest.mark.parametrize("seed", range(4))
def test_every_reader_survives_any_content_of_the_maps(
    state: StateDir, cache: Path, seed: int
) -> None:
    """The readers are maps dump, flows, status, and the sweep, which also clears."""
    chance, maps = random.Random(seed), state.open_maps()
    for _ in range(60):
        for opened in maps.values():
            damage(opened, chance)
    for name in ROWS:
        dump_maps(maps, (name,))
    list_flows(maps, FlowFilter())
    list(ValidContents(maps, capacity_of(maps), repair=False).items("services"))
    program = FrameProgram(precompile.FLOW_END, maps, cache)
    for name in FLOW_MAPS:
        table = SweptTable(maps, name, Timeouts(), program.run)
        assert table.numbers
        for _ in table.sweep():
            pass
    program.close()
    for opened in maps.values():
        opened.close()


def test_a_reader_changes_nothing_and_names_what_is_damaged(
    state: StateDir, caplog: pytest.LogCaptureFixture
) -> None:
    """Only a start of the agent removes the damage."""
    maps = state.open_maps()
    key = bytes(maps["services"].spec.key_size)
    bpf.map_update(maps["services"].fd, key, b"\xff" * maps["services"].spec.value_size)
    dump_maps(maps, ("services",))
    assert len(list(maps["services"].packed_items())) == 1
    assert f"map services: 1 invalid entries left out (first key {key.hex()})" in (caplog.text)
    for opened in maps.values():
        opened.close()


STRANGE = (
    *("links/connect4", "links/strange", "devices/x-ingress", "devices/7-egress"),
    *("devices/7-strange", "devices/9999999999999-ingress", "devices/y-clsact"),
    *("strange", "{maps}/services", "{persistent}/slots", "{maps}/strange"),
)
# Directories that a start does not replace: it ends, and names them.
IN_THE_WAY = "links/connect4", "links/strange", "{persistent}/slots"


@pytest.mark.parametrize(
    ("place", "what"), [*product(STRANGE, ["another map"]), *product(STRANGE, ["a directory"])]
)
def test_every_command_survives_an_unknown_pin(
    state: StateDir, tmp_path: Path, place: str, what: str
) -> None:
    """A command answers, or names the pin in one line; a start works beside it; cleanup removes
    all.
    """
    folders = {"maps": state.maps_directory.name, "persistent": state.persistent_directory.name}
    pin = state.directory / place.format(**folders)
    pin.unlink(missing_ok=True)
    if what == "a directory":
        (pin / "deeper").mkdir(parents=True)
    else:
        fd = create_map(layout.MAPS["secret"])
        bpf.pin(fd, str(pin))
        os.close(fd)
    where = "--state-dir", str(state.directory)
    for name, (command, words) in COMMANDS.items():
        if name == "check" and not place.startswith("{maps}"):  # it looks at nothing else here
            continue
        if name == "cleanup":
            ends = what == "a directory" and place in IN_THE_WAY
            with pytest.raises(KernelError, match=str(pin)) if ends else nullcontext():
                Datapath(state).close()
        run = () if name in ("maps dump", "flows list", "check") else ("--run-dir", str(tmp_path))
        done = CliRunner().invoke(command, [*words, *where, *run])
        said = done.exception
        assert said is None or isinstance(said, SystemExit | EbpflbError), (name, said)
        assert not isinstance(said, KernelError) or str(pin) in str(said), (name, said)
    assert not state.directory.exists()
