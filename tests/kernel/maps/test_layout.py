# SPDX-License-Identifier: Apache-2.0
"""The layouts of the maps: C and Python agree about every byte of them."""

import shutil
import subprocess
from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ebpflb.entries.services import FIRST_BACKENDS, Chosen, Frontend
from ebpflb.kernel.maps import layout
from ebpflb.kernel.maps.records import Record, record
from ebpflb.model.addresses import Address
from ebpflb.model.services import PortName

WIDTHS = {"uint8_t": 8, "uint16_t": 16, "uint32_t": 32, "uint64_t": 64}
FLAGS = {
    "struct service": ["external", "load_balancer", "local", "endpoints", "restricted"],
    "struct backend": ["cluster", "local", "here"],
    "struct flow": ["request", "masquerade", "seen", "fin", "rst", "affinity"],
    "struct device": ["pods"],
    "struct timeout_key": ["request", "masquerade", "seen", "fin", "rst"],
    "struct settings": ["guard_nodeports", "masquerade_all", "masquerade_here", "detect_local"],
}


def parts(ctype: str) -> Iterator[str]:
    """Yield a struct with named fields, and the structs inside it."""
    if ctype.startswith("struct ") and ctype not in PLAIN:
        yield ctype
        for _, field in layout.ffi.typeof(ctype).fields:
            yield from parts(field.type.cname)


PLAIN = {
    "struct address",
    "struct address_bits",
    "struct link_address",
    "struct steps",
}  # bytes, or one value
OF_MAPS = [each for spec in layout.PROGRAM_MAPS.values() for each in (spec.key, spec.value)]
STRUCTS = list(dict.fromkeys(part for each in (*OF_MAPS, "struct event") for part in parts(each)))

addresses = some.ip_addresses().filter(lambda address: not getattr(address, "ipv4_mapped", None))


def texts(size: int) -> some.SearchStrategy[str]:
    some_text = some.text(some.characters(exclude_characters="\0", codec="utf-8"), max_size=size)
    return some_text.filter(lambda text: len(text.encode()) <= size)


def field_values(struct: str, name: str, ctype: Any) -> some.SearchStrategy[Any]:
    if name == "flags" or name.endswith("_flags"):
        return some.frozensets(some.sampled_from(FLAGS[struct]))
    if ctype.cname == "struct address":
        return addresses
    if ctype.cname == "__be16":
        return some.integers(0, 0xFFFF)
    if name.endswith("mac"):
        return some.binary(min_size=6, max_size=6).map(lambda mac: mac.hex(":"))
    if ctype.cname == f"uint32_t[{FIRST_BACKENDS}]":
        return some.lists(some.integers(1, 2**32 - 1), max_size=FIRST_BACKENDS).map(tuple)
    if ctype.kind == "array":
        return texts(ctype.length)
    if ctype.kind == "struct":
        return values(ctype.cname)
    return some.integers(0, 2 ** WIDTHS[ctype.cname] - 1)


def values(struct: str) -> some.SearchStrategy[Any]:
    """Return any value that a struct can hold, as its NamedTuple."""
    cls = record(struct).cls
    parts = [
        field_values(struct, name, field.type)
        for name, field in layout.ffi.typeof(struct).fields
        if not name.startswith("pad") and name != "check"
    ]
    return some.tuples(*parts).map(cls._make)


@pytest.mark.parametrize("struct", STRUCTS)
@given(data=some.data())
def test_round_trip(struct: str, data: some.DataObject) -> None:
    """A packed value has as many bytes as the struct, and is unpacked unchanged."""
    value = data.draw(values(struct))
    packed = record(struct).pack(value)
    assert len(packed) == layout.ffi.sizeof(struct)
    assert record(struct).unpack(packed) == value


def test_addresses_and_ports_are_in_network_order() -> None:
    """Addresses and ports are in network order, other numbers in host order; padding is zero."""
    mapped = bytes(10) + b"\xff\xff"
    frontend = Frontend(IPv4Address("10.1.2.3"), 80, 6)
    packed = mapped + bytes([10, 1, 2, 3, 0, 80, 6, 0])
    assert record("struct frontend").pack(frontend) == packed
    sender = (0x0102030405060708, frontend)
    expected = bytes([8, 7, 6, 5, 4, 3, 2, 1]) + packed + bytes(4)
    assert record("struct assignment_key").pack(sender) == expected


def test_long_names_are_cut() -> None:
    """A name that does not fit loses its end, even in the middle of a character."""
    name = PortName("n" * 63, "s" * 63 + "éé", "p" * 99, 6, 4)  # type: ignore[arg-type]
    found = record("struct service_name").unpack(record("struct service_name").pack(name))
    assert (found.namespace, found.port) == ("n" * 63, "p" * 64)
    assert found.service.startswith("s" * 63)


@given(address=some.ip_addresses())
def test_an_address_has_16_bytes(address: Address) -> None:
    """An address has 16 bytes; an IPv4-mapped address is read as the IPv4 address."""
    packed = layout.address_bytes(address)
    assert len(packed) == 16
    assert layout.address_from(packed) == (getattr(address, "ipv4_mapped", None) or address)


class Swapped(NamedTuple):
    size: int
    base: int


def test_other_fields_than_the_structs_are_refused() -> None:
    """A NamedTuple whose fields differ from the struct's is refused at its declaration."""
    with pytest.raises(TypeError, match=r"Swapped.*struct range\('base', 'size'\)"):
        Record("struct range", Swapped)


def structs() -> Iterator[str]:
    yield from ("struct address", *STRUCTS)


def offsets() -> Iterator[tuple[str, int]]:
    """Return Python's offsets of the header's fields as C expressions."""
    for struct in structs():
        yield f"sizeof({struct})", layout.ffi.sizeof(struct)
        for name, field in layout.ffi.typeof(struct).fields:
            yield f"__builtin_offsetof({struct}, {name})", field.offset
            yield f"sizeof((({struct} *)0)->{name})", layout.ffi.sizeof(field.type)


HEADERS = ("layout.h", "record/events.h", "maps/answered.h", "maps/handed.h")


def clang(claims: list[tuple[str, int]]) -> subprocess.CompletedProcess[str]:
    """Let clang check the claims, for the architecture that runs the programs."""
    lines = [f'_Static_assert({what} == {n}, "{what} is not {n}");' for what, n in claims]
    source = "\n".join(
        ["#include <linux/types.h>", *(f'#include "{each}"' for each in HEADERS), *lines]
    )
    includes = [f"-I{layout.SOURCES}", f"-I{layout.SOURCES}/stub/include"]
    command = ["clang", "-target", "bpf", "-fsyntax-only", *includes, "-xc", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=False)


def test_clang_agrees() -> None:
    """Every struct has the size, and every field the place, that Python computes."""
    done = clang(list(offsets()))
    assert done.returncode == 0, done.stderr


def test_clang_would_disagree() -> None:
    """A wrong claim is noticed, so test_clang_agrees is not empty."""
    done = clang([("__builtin_offsetof(struct peer, port)", 25)])
    assert "is not 25" in done.stderr


def test_bits_of_a_choice() -> None:
    """Programs write the priority that the netfilter rules read; each bit has one meaning."""
    names = {each.value: f"CHOSEN_{each.name}" for each in Chosen}
    names[Chosen.PREFIX] = "CHOSEN"
    assert layout.ffi.typeof("enum chosen").elements == names
    assert sum((Chosen.MASK, Chosen.MASQUERADE, Chosen.LIFTED, Chosen.ID)) == 0xFFFFFFFF
    assert Chosen.PREFIX & ~Chosen.MASK == 0


def test_all_maps_are_read() -> None:
    """Every DEFINE_MAP line is read."""
    texts = [path.read_text() for path in layout.SOURCES.rglob("*.h") if path.stem != "compat"]
    assert sum(text.count("\nDEFINE_MAP(") for text in texts) == len(layout.PROGRAM_MAPS)


def test_all_layouts_are_read() -> None:
    """No struct is declared elsewhere, and no layout file is left out."""
    head = (layout.SOURCES / "layout.h").read_text()
    for path in layout.SOURCES.glob("layout/*.h"):
        assert f'#include "layout/{path.name}"' in head


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Return a copy of bpf/."""
    return Path(shutil.copytree(layout.SOURCES, tmp_path / "bpf"))


LAYOUTS = sorted(path.name for path in layout.SOURCES.glob("layout/*.h"))
PERSISTENT = {
    *(
        "address.h",
        "affinity.h",
        "check.h",
        "connection.h",
        "counters.h",
        "flow.h",
        "service.h",
        "socket.h",
    )
}


@pytest.mark.parametrize("name", [*(f"layout/{name}" for name in LAYOUTS), "maps/persistent.h"])
def test_changed_letter(sources: Path, name: str) -> None:
    """Any changed letter changes the layout, and the layout of persistent maps if they depend on
    it. Comments and spaces do not count.
    """
    text = (sources / name).read_text()
    (sources / name).write_text(f"/* a new\n * comment */\n{text}\n// another\n")
    assert layout.layout_hash(sources) == layout.layout_hash()
    assert layout.persistent_hash(sources) == layout.persistent_hash()
    for each in (layout.layout_hash, layout.persistent_hash):
        each.cache_clear()
    (sources / name).write_text(text + "x")
    assert layout.layout_hash(sources) != layout.layout_hash()
    lasts = layout.persistent_hash(sources) == layout.persistent_hash()
    assert lasts == (name.startswith("layout/") and Path(name).name not in PERSISTENT)


def test_an_upgrade_from_1ffc2c4c_keeps_the_flow_tables() -> None:
    """Who changes this name says so in CHANGELOG.md: flow tables start empty."""
    assert layout.persistent_hash() == "5204455b3641"


def within(ctype: Any) -> Iterator[str]:
    """Yield a struct's name, and the names of the structs inside it."""
    if ctype.kind == "struct" and not ctype.cname.startswith("__be"):
        yield ctype.cname
        for _, field in ctype.fields:
            yield from within(field.type)


def test_persistent_maps_depend_on_nothing_else() -> None:
    """All types and flags in persistent maps are declared in files whose changes are noticed."""
    texts = [(layout.SOURCES / "layout" / name).read_text() for name in PERSISTENT]
    types = {t for spec in layout.MAPS.values() if spec.persistent for t in (spec.key, spec.value)}
    for struct in {name for each in types for name in within(layout.ffi.typeof(each))}:
        (text,) = (text for text in texts if f"\n{struct} {{" in text)
        words = FLAGS.get(struct)
        assert not words or f"enum {struct.removeprefix('struct ')}_flag {{" in text
