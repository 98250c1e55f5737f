# SPDX-License-Identifier: Apache-2.0
"""The audit for `ebpflb doctor`: it compares a fresh list with the agent's objects, then does all
checks.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.agent import audit
from ebpflb.agent.audit import listed as fresh_list
from ebpflb.errors import ClusterError
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.events import Changed, Drift, Key, Kind, ObjectEvent, Part
from ebpflb.options import Options, Paths
from ebpflb.serve.conditions import Cause, conditions
from tests.agent.fakes import Harness, changed, listed, service, slices
from tests.cluster.objects import service as api_service
from tests.kit.api_server import FakeApiServer

EVENTS = (
    listed(Kind.SERVICE, service("web", "10.96.0.3")),
    listed(Kind.ENDPOINT_SLICE, slices("web", "10.1.0.1")),
    listed(Kind.NODE),
)


class Lists:
    """The results of a fresh list; ``meanwhile`` is sent to the agent before the second one."""

    def __init__(self, harness: Harness) -> None:
        self.harness, self.cluster, self.taken = harness, ClusterState("node-1"), 0
        self.meanwhile: list[Changed] = []
        self.error = ""

    def apply(self, *events: ObjectEvent) -> None:
        for event in events:
            self.cluster.apply(event)

    def __call__(self, _options: Options) -> ClusterState:
        self.taken += 1
        if self.error:
            raise ClusterError(self.error)
        if self.taken == 2:
            self.harness.send(*self.meanwhile)
        return self.cluster


@pytest.fixture
def lists(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> Lists:
    """Return lists in which the agent knows every object."""
    harness.start()
    harness.send(*EVENTS)
    harness.wait_for(lambda status: status.in_sync)
    found = Lists(harness)
    found.cluster = ClusterState(harness.options.node_name)
    found.apply(*EVENTS)
    monkeypatch.setattr(audit, "listed", found)
    monkeypatch.setattr(audit, "AGAIN_SECONDS", 0.01)
    return found


def test_objects_that_differ_are_a_condition(harness: Harness, lists: Lists) -> None:
    """Each kind of difference is a condition until another audit finds none."""
    lists.apply(
        listed(Kind.SERVICE, service("web", "10.96.0.4"), service("new", "10.96.0.5")),
        listed(Kind.ENDPOINT_SLICE),
    )
    report = harness.doctor_audit.report()
    assert report.objects == {
        "EndpointSlice default/web-ipv4": "was deleted, but the agent still has it",
        "Service default/new": "the agent does not know it",
        "Service default/web": "the agent has an outdated copy",
    }
    harness.wait_for(lambda status: bool(status.objects_differ))
    causes = [each.cause for each in conditions(harness.status)]
    assert Cause.OBJECTS_DIFFER in causes
    lists.apply(*EVENTS)
    assert harness.doctor_audit.report().objects == {}
    harness.wait_for(lambda status: not status.objects_differ)


def test_what_differs_in_the_kernel(harness: Harness, lists: Lists) -> None:
    """A difference in the kernel is found at once, and corrected before the answer."""
    harness.datapath.taken_off.append(Drift(Part.HOOK, "hook connect4", "is not attached"))
    report = harness.doctor_audit.report()
    assert (report.drift, report.repairs) == ([], True)
    assert harness.datapath.restored and harness.events == ["hook connect4 is not attached"]


def test_an_object_that_changes_meanwhile_is_not_reported(harness: Harness, lists: Lists) -> None:
    """An object's event may arrive after the list that shows the change; that is no difference."""
    lists.apply(listed(Kind.SERVICE, service("web", "10.96.0.4")))
    lists.meanwhile = [changed(Kind.SERVICE, service("web", "10.96.0.9"))]
    assert harness.doctor_audit.report().objects == {}
    assert lists.taken == 2


def test_why_nothing_is_listed(harness: Harness, lists: Lists) -> None:
    """Without a list it is unknown whether the objects differ; everything else is compared."""
    lists.error = "etcd is away"
    report = harness.doctor_audit.report()
    assert (report.not_listed, report.unfinished) == ("etcd is away", [])


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApiServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with FakeApiServer() as server:
        yield server


@pytest.fixture
def options(api: FakeApiServer, tmp_path: Path) -> Options:
    return Options(Paths(tmp_path), "node-1", tmp_path, kubeconfig=api.kubeconfig(tmp_path))


def test_all_kinds_are_listed(api: FakeApiServer, options: Options) -> None:
    api.put(api_service("web"))
    cluster = fresh_list(options)
    assert cluster.complete
    assert cluster.services.keys() == {Key("default", "web")}


def test_a_forbidden_list_is_not_tried_again(api: FakeApiServer, options: Options) -> None:
    """A forbidden list of Services is not requested again. Ranges of cluster IPs, which older roles
    do not allow, are not needed.
    """
    refusal = json.dumps({"message": "it is forbidden"}).encode()
    api.fail("ServiceCIDR", 403, refusal, times=1000)
    assert fresh_list(options).complete
    api.fail("Service", 403, refusal, times=1)
    with pytest.raises(ClusterError, match=r"cannot be listed: 403 it is forbidden"):
        fresh_list(options)
