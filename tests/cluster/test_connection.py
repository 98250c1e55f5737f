# SPDX-License-Identifier: Apache-2.0
"""Configuration, authentication, TLS, and a stop in the middle of a connection."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ebpflb.cluster.list_watch import ApiSource
from ebpflb.cluster.source import ServerOptions
from ebpflb.errors import ClusterError
from ebpflb.model.events import Changed, Kind, SourceStatus
from tests.cluster.event_log import QUICK, Begin, EventLog, Quick, Start
from tests.cluster.objects import service
from tests.kit.api_server import FakeApiServer
from tests.kit.hostile_files import NOT_NESTED, lay


def threads() -> list[threading.Thread]:
    return [it for it in threading.enumerate() if it.name.startswith("watch ")]


def test_the_token_is_sent_and_a_wrong_one_is_an_error(
    api: FakeApiServer, events: EventLog, watch: Start
) -> None:
    """The Kubernetes client authenticates, from the kubeconfig."""
    watch()
    events.next(Kind.SERVICE)
    api.wait_for_watch("Service")
    api.token = "another"
    api.drop()
    while (reason := events.source_status().error) != "401 Unauthorized":
        assert reason is None or "as soon as it began" in reason


def with_token_file(api: FakeApiServer, folder: Path, **also: str) -> tuple[Path, Path]:
    """Return a kubeconfig as kubeadm gives kube-proxy, and the token file that it names."""
    token, kubeconfig = folder / "token", api.kubeconfig(folder)
    token.write_text(api.token)
    words = json.loads(kubeconfig.read_text())
    words["users"][0]["user"] = {"tokenFile": str(token), **also}
    kubeconfig.write_text(json.dumps(words))
    return kubeconfig, token


@pytest.mark.parametrize("also", [{}, {"token": "an old one"}], ids=["alone", "and a token"])
def test_a_renewed_token_file_is_read_again(
    api: FakeApiServer, events: EventLog, tmp_path: Path, begin: Begin, also: dict[str, str]
) -> None:
    """An expired token is no error for any kind of object if its file has a new one. If both a
    token and its file are given, the file counts.
    """
    kubeconfig, token = with_token_file(api, tmp_path, **also)
    begin(
        ApiSource(
            events, node_name="node-1", server_options=ServerOptions(kubeconfig), timing=QUICK
        )
    )
    for kind in Kind:
        events.next(kind)
        api.wait_for_watch(kind)
    token.write_text("the next")
    api.token = "the next"
    api.drop()
    for kind in Kind:
        api.wait_for_watch(kind, 2)
    api.put(service("late"))
    assert isinstance(events.next(Kind.SERVICE), Changed)
    reasons = [str(it.error) for it in events.all() if isinstance(it, SourceStatus)]
    assert not [reason for reason in reasons if "401" in reason]


def test_no_kubeconfig_and_no_pod_is_an_error_at_start(
    events: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a kubeconfig the agent must run in a pod."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ClusterError, match="not in a pod"):
        ApiSource(events, node_name="node-1").start()


def test_stop_ends_the_threads_in_the_middle_of_a_watch(
    api: FakeApiServer, events: EventLog, watch: Start
) -> None:
    """The threads end at once and emit nothing more, not even the broken connection."""
    source = watch()
    for kind in Kind:
        events.next(kind)
        api.wait_for_watch(kind)
    source.stop()
    assert threads() == []
    api.put(service("late"))
    assert events.all() == []


def test_master_overrides_the_kubeconfig(
    api: FakeApiServer, events: EventLog, tmp_path: Path, begin: Begin, quick: Quick
) -> None:
    """--master says where the server is, the kubeconfig the credentials (kube-proxy.md 15)."""
    kubeconfig = api.kubeconfig(tmp_path)
    kubeconfig.write_text(kubeconfig.read_text().replace(api.url, "http://127.0.0.1:9"))
    master = f"{api.url}/"
    begin(
        ApiSource(
            events,
            node_name="node-1",
            server_options=ServerOptions(kubeconfig, master=master),
            timing=quick(),
        )
    )
    assert events.next(Kind.SERVICE)


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ("http://127.0.0.1:9", "Failed to establish a new connection: Connection refused"),
        ("https://127.0.0.1:9", "Failed to establish a new connection: Connection refused"),
    ],
)
def test_a_server_that_cannot_be_reached_is_told_in_words(
    events: EventLog, begin: Begin, server: str, words: str
) -> None:
    """The error has neither Python's classes nor errnos."""
    begin(
        ApiSource(
            events, node_name="node-1", server_options=ServerOptions(master=server), timing=QUICK
        )
    )
    assert events.source_status().error == words


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ('{"clusters": [', "while parsing a flow"),
        ('{"apiVersion": "v1"}', "Invalid kube-config file"),
        ({"server": "https://x", "certificate-authority": "/nothing"}, "File does not exist"),
        ({"tokenFile": "/nothing"}, "/nothing: No such file or directory"),
    ],
)
def test_a_broken_kubeconfig_is_told_in_one_line(
    api: FakeApiServer, events: EventLog, tmp_path: Path, change: str | dict[str, str], words: str
) -> None:
    """For any error in a kubeconfig one line has the file, then the reason."""
    kubeconfig = api.kubeconfig(tmp_path)
    content = json.loads(kubeconfig.read_text())
    if "tokenFile" in change:
        content["users"][0]["user"] = change
    else:
        content["clusters"][0]["cluster"] = change
    kubeconfig.write_text(change if isinstance(change, str) else json.dumps(content))
    with pytest.raises(ClusterError) as failed:
        ApiSource(events, node_name="node-1", server_options=ServerOptions(kubeconfig)).start()
    assert str(failed.value).startswith(f"{kubeconfig}: {words}")
    assert "Errno" not in str(failed.value) and "\n" not in str(failed.value)


@pytest.mark.parametrize("make", NOT_NESTED.values(), ids=NOT_NESTED)
def test_what_is_no_kubeconfig(
    events: EventLog, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    """An endless device, a pipe or a huge sparse file is named, and not read."""
    lay(make, tmp_path / "kubeconfig")
    with pytest.raises(ClusterError) as failed:
        ApiSource(
            events, node_name="node-1", server_options=ServerOptions(tmp_path / "kubeconfig")
        ).prepare()
    assert str(failed.value).startswith(f"{tmp_path}/kubeconfig: ")
    assert "Errno" not in str(failed.value) and "\n" not in str(failed.value)


def test_stop_before_start_is_nothing(events: EventLog) -> None:
    """An agent that fails early may stop a source that was not started."""
    ApiSource(events, node_name="node-1").stop()
