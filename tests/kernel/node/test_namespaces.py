# SPDX-License-Identifier: Apache-2.0
"""A function is called once in every network namespace, and no thread stays in one.

Pods' namespaces are found by the host name of their processes.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.kernel.node import namespaces
from ebpflb.kernel.node.namespaces import OWN_NETNS, Namespaces, own_cookie
from tests.kernel.node import nodes

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="entering a namespace is root's")

PREFIX = f"ebpflb-test-{os.getpid()}"


@pytest.fixture
def named() -> Iterator[list[str]]:
    """Yield the identities of two namespaces with names, without processes."""
    names = [f"{PREFIX}-{number}" for number in range(2)]
    for name in names:
        subprocess.run(["ip", "netns", "add", name], check=True)
    yield [f"net:[{Path('/run/netns', name).stat().st_ino}]" for name in names]
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest.fixture
def nameless() -> Iterator[str]:
    """Yield a namespace without a name, with a process in it."""
    words = ["unshare", "--net", "sh", "-c", "readlink /proc/self/ns/net; read _"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate("\n")


def here() -> str:
    return os.readlink(OWN_NETNS)


def test_each_namespace_is_visited_once(named: list[str], nameless: str) -> None:
    """Namespaces with names and with processes are visited once each, our own first.

    Another test's process may enter our namespace during the test, so only the other namespaces are
    counted.
    """
    places = list(Namespaces().each(here))
    assert places[0] == here()
    assert [places.count(place) for place in (*named, nameless)] == [1] * 3


def cookie_of(name: str) -> int:
    found = namespaces.cookie(Path("/run/netns", name))
    if found is None:
        pytest.skip("this kernel tells no cookies")
    return found


def test_by_cookie(named: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The function runs only in namespaces with the wanted cookies; once all of these are found, no
    other namespace is entered.
    """
    wanted, entered = cookie_of(f"{PREFIX}-1"), list[str]()

    def enter(path: Path, kind: int) -> None:
        entered.append(path.name)
        real(path, kind)

    real, every = namespaces.enter, Namespaces()
    assert list(every.each(here, {wanted})) == [named[1]]
    monkeypatch.setattr(namespaces, "enter", enter)
    assert list(every.each(here, {wanted})) == [named[1]]
    assert entered == [f"{PREFIX}-1"]
    own = own_cookie()
    assert own
    assert list(every.each(here, {own})) == [here()]
    assert list(every.each(here, ())) == []
    assert entered == [f"{PREFIX}-1"]


def test_cookie_that_is_nowhere(named: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """If a cookie is not found all namespaces are searched, because a new namespace may have the
    identity of a former one.
    """
    wanted, every = cookie_of(f"{PREFIX}-1"), Namespaces()
    monkeypatch.setattr(namespaces, "own_cookie", lambda: 1)
    assert list(every.each(here, {0})) == []
    monkeypatch.undo()
    assert list(every.each(here, {0, wanted})) == [named[1]]


def test_stays_here(named: list[str]) -> None:
    """The caller's thread stays in its namespace; the other threads end, even after an error."""
    before, threads = here(), threading.active_count()

    def fail() -> None:
        if here() != before:
            raise RuntimeError("away from home")

    with pytest.raises(RuntimeError):
        list(Namespaces().each(fail))
    assert here() == before
    assert threading.active_count() == threads


def test_nothing_else_is_opened(named: list[str], tmp_path: Path) -> None:
    """A path that leads to a FIFO is not entered, and does not block."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(OSError, match="Invalid argument"):
        namespaces.call_in(fifo, here)
    with pytest.raises(OSError, match="Invalid argument"):
        namespaces.call_in(Path("/proc/self/ns/mnt"), here)


def test_without_the_capability(named: list[str]) -> None:
    """A process without the capability continues in its own namespace."""
    code = (
        "from ebpflb.kernel.node.namespaces import Namespaces as N; print(len(list(N().each(int))))"
    )

    words = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", sys.executable, "-c"]
    done = subprocess.run([*words, code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
    assert "CAP_SYS_ADMIN is missing" in done.stderr


def test_only_linked_namespaces_are_pods(named: list[str]) -> None:
    """Only namespaces to which one of our devices leads count as pods."""
    here, there = (f"{PREFIX}-{number}" for number in range(2))
    with nodes.entered(here):
        assert there not in {path.name for path in namespaces.linked()}
        link = ["ip", "-n", here, "link", "add", "v1", "type", "veth", "peer", "v2", "netns", there]
        subprocess.run(link, check=True)
        assert [path.name for path in namespaces.linked()] == [there]


NAME = f"web-{os.getpid()}"
RENAMED = f"echo {NAME} > /proc/sys/kernel/hostname"
OF_A_POD, OF_A_USER = ("--uts",), ("--uts", "--user", "--map-root-user")


@pytest.mark.parametrize(
    ("kinds", "script", "expected"),
    [(OF_A_POD, RENAMED, True), (OF_A_USER, RENAMED, False), ((), ":", False)],
    ids=["a pod", "a user namespace of its own", "its environment"],
)
def test_host_names(kinds: tuple[str, ...], script: str, expected: bool) -> None:
    """A host name makes a process a pod's only if a container runtime gave it, not if the process
    set it itself.
    """
    words = [
        "unshare",
        "--net",
        *kinds,
        "sh",
        "-c",
        f"{script}; readlink /proc/self/ns/net; read _",
    ]
    named, pipe = os.environ | {"HOSTNAME": NAME}, subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=named) as process:
        assert process.stdout is not None
        place = process.stdout.readline().strip()
        found = [os.readlink(path) for path in namespaces.by_host_name(NAME)]
        process.communicate("\n")
    assert found == ([place] if expected else [])
