# SPDX-License-Identifier: Apache-2.0
"""A list is decoded while it arrives, into the same items as the whole list, however it is
split.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Raw

from ebpflb.cluster import decoding
from ebpflb.errors import ClusterError

words = st.text('{}[],:"\\ metad\n', max_size=6)
values = st.recursive(
    st.none() | st.integers() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
items = st.builds(lambda spec: {"metadata": {"name": "a"}, "spec": spec}, values) | st.builds(
    lambda inner: {"metadata": {}, "items": [{"metadata": inner}, {"metadata": inner}]}, values
)
lists = st.fixed_dictionaries(
    {"kind": st.just("ServiceList"), "metadata": st.just({"resourceVersion": "7"})},
    optional={"items": st.lists(items | values, max_size=6)},
)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "BATCH", 8)


def parts_of(data: bytes, size: int) -> Iterator[bytes]:
    return (data[start : start + size] for start in range(0, len(data), size))


def read(data: bytes, size: int) -> tuple[decoding.ListMetadata, list[Any]]:
    found: list[Any] = []
    metadata = decoding.read_list(
        parts_of(data, size), lambda item: found.append(msgspec.json.decode(item))
    )
    return metadata, found


@pytest.mark.usefixtures("small_batches")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(whole=lists, size=st.integers(1, 60), spaces=st.booleans())
def test_the_parts_make_no_difference(whole: Any, size: int, spaces: bool) -> None:
    """Items may contain text that looks like the beginning of another item; spaces may be
    anywhere.
    """
    data = msgspec.json.encode(whole)
    data = msgspec.json.format(data) if spaces else data
    metadata, found = read(data, size)
    assert metadata.resource_version == "7"
    assert found == whole.get("items", [])


@pytest.mark.usefixtures("small_batches")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(whole=lists, size=st.integers(1, 60), cut=st.integers(1, 200))
def test_a_truncated_list_is_an_error(whole: Any, size: int, cut: int) -> None:
    data = msgspec.json.encode(whole)
    with pytest.raises(ClusterError, match="not a list"):
        read(data[: max(0, len(data) - cut)], size)


def test_items_do_not_wait_for_the_end() -> None:
    """While a list much larger than a batch arrives, only a few batches are held."""
    number, found = 10_000, list[Raw]()
    item = msgspec.json.encode({"metadata": {"name": "x" * 1000}})
    most_held = 0

    def arriving() -> Iterator[bytes]:
        nonlocal most_held
        yield b'{"metadata":{"resourceVersion":"7"},"items":['
        for count in range(number):
            yield b"," * (count > 0) + item
            most_held = max(most_held, count - len(found))
        yield b"]}"

    decoding.read_list(arriving(), found.append)
    assert len(found) == number
    assert most_held < 2 * (1 << 20) / len(item)


@pytest.mark.parametrize(
    ("version", "than", "older"),
    [
        ("9", "10", True),
        ("10", "9", False),
        ("10", "10", False),
        ("5", "0", False),
        ("9" * 5000, "1" + "0" * 5000, True),
        ("", "7", False),
        ("7", "", False),
        ("a", "b", False),
    ],
)
def test_versions_are_compared_as_numbers(version: str, than: str, older: bool) -> None:
    assert decoding.is_older(version, than) == older
