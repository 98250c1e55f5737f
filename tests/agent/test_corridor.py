# SPDX-License-Identifier: Apache-2.0
"""The corridor alone: events in, plans out, and what the agent says when something is wrong."""

import errno

import pytest

from ebpflb.agent import loop
from ebpflb.errors import CompileError, EbpflbError, KernelError, VerifierError
from ebpflb.model.events import Kind, Removed, SourceStatus
from ebpflb.plan.entries import Range
from ebpflb.plan.map_contents import MapContents
from tests.agent.fakes import Stage, changed, found, listed, service, slices

SERVICES = listed(Kind.SERVICE, service("a", "10.96.0.1"), service("b", "10.96.0.2"))
SLICES = listed(Kind.ENDPOINT_SLICE, slices("a", "10.1.0.1", "10.1.0.2"), slices("b", "10.1.0.3"))
NODES = listed(Kind.NODE)
EVERYTHING = (SERVICES, SLICES, NODES)
FULL = KernelError("map update", errno.E2BIG, "Argument list too long")
UNLOADED = [
    CompileError("no clang\nmore"),
    VerifierError("the verifier refused\nlog"),
    KernelError("loading program connect4", errno.ENOMEM, "Cannot allocate memory"),
]


@pytest.fixture
def serving(stage: Stage) -> Stage:
    stage.start()
    stage.say(*EVERYTHING)
    return stage


def test_waits_for_every_list(stage: Stage) -> None:
    """Nothing is programmed or attached before every list is complete."""
    stage.start()
    for event in (SERVICES, NODES, changed(Kind.ENDPOINT_SLICE, slices("a", "10.1.0.9"))):
        stage.say(event)
        assert not stage.datapath.plans
        assert not stage.datapath.attached
        assert not stage.words.complete
    stage.say(SLICES)
    assert stage.words.complete
    assert len(stage.datapath.maps.services) == 2


def test_in_force_after_written(serving: Stage) -> None:
    """One plan for all that was listed, then the programs are put in force, once."""
    assert len(serving.datapath.plans) == 1
    assert serving.datapath.attached == [serving.options.cgroup]
    serving.say(changed(Kind.ENDPOINT_SLICE, slices("a", "10.1.0.1")))
    assert len(serving.datapath.attached) == 1


def test_only_what_changed(serving: Stage) -> None:
    """A change of one service writes nothing of another; a change of nothing writes nothing."""
    serving.say(changed(Kind.ENDPOINT_SLICE, slices("b", "10.1.0.3", "10.1.0.4")))
    (frontend, _), *others = serving.datapath.plans[-1].services
    assert (str(frontend), others) == ("10.96.0.2:80", [])
    plans = len(serving.datapath.plans)
    serving.say(changed(Kind.SERVICE, service("a", "10.96.0.1")))
    assert len(serving.datapath.plans) == plans


def test_service_goes(serving: Stage) -> None:
    """A removed Service is taken away, and the count in the status follows."""
    key, _ = found(Kind.SERVICE, service("a", "10.96.0.1"))
    serving.say(Removed(Kind.SERVICE, key))
    assert [str(frontend) for frontend in serving.datapath.maps.services] == ["10.96.0.2:80"]
    assert (serving.words.service_ports, serving.words.backends) == (1, 1)


def test_restart(serving: Stage) -> None:
    """A new agent that is told the same writes nothing."""
    serving.stop()
    serving.datapath.plans.clear()
    serving.start()
    serving.say(*EVERYTHING)
    assert not serving.datapath.plans


def test_leftovers_go(serving: Stage) -> None:
    """What a former agent programmed and nobody wants now is taken away at the start."""
    serving.stop()
    serving.start()
    serving.say(listed(Kind.SERVICE, service("b", "10.96.0.2")), SLICES, NODES)
    assert [str(frontend) for frontend in serving.datapath.maps.services] == ["10.96.0.2:80"]


def test_invalid_service(serving: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """An object that cannot be meant is named, with file and field, and stays as it was."""
    before = dict(serving.datapath.maps.services)
    serving.say(changed(Kind.SERVICE, service("a", "10.96.0.256")))
    assert serving.datapath.maps.services == before
    assert "Service default/a" in serving.words.refused
    (line,) = [r.getMessage() for r in caplog.records if "default/a" in r.getMessage()]
    assert line.startswith("test.yaml: Service default/a: spec.clusterIP")
    serving.say(changed(Kind.SERVICE, service("a", "10.96.0.3")))
    assert not serving.words.refused


def test_trouble(serving: Stage) -> None:
    """A source that cannot be read is named with its reason until it is well again."""
    serving.say(SourceStatus("the API", "connection refused"))
    assert serving.words.troubles["the API"] == "connection refused"
    serving.say(changed(Kind.ENDPOINT_SLICE, slices("b", "10.1.0.4")))
    serving.say(SourceStatus("the API", None))
    assert "the API" not in serving.words.troubles


def test_unplaced(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that does not fit is named in log and status; later there is room, and it fits."""
    monkeypatch.setattr(loop, "WRITE_RETRY_SECONDS", 60.0)
    everywhere = Range(0, 1 << 30)
    stage.datapath.leftovers = MapContents(leftover_blocks={everywhere})  # rests for a second
    stage.start()
    stage.say(*EVERYTHING)
    name, reason = next(iter(stage.words.unplaced.items()))
    assert "default/a" in name
    assert "slots" in reason
    assert any(name in record.getMessage() for record in caplog.records)
    monkeypatch.setattr(loop, "WRITE_RETRY_SECONDS", 0.01)
    stage.say()
    stage.until(lambda words: not words.unplaced)
    assert len(stage.datapath.maps.services) == 2


def test_failed_write(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed write the agent reads what the maps hold, plans anew and tries again."""
    monkeypatch.setattr(loop, "WRITE_RETRY_SECONDS", 60.0)
    stage.datapath.failures = [FULL]
    stage.start()
    stage.say(*EVERYTHING)
    assert "map update" in (stage.words.failed or "")
    assert not stage.datapath.attached
    monkeypatch.setattr(loop, "WRITE_RETRY_SECONDS", 0.01)
    stage.say()
    stage.until(lambda words: not words.failed)
    assert len(stage.datapath.maps.services) == 2
    assert stage.datapath.attached == [stage.options.cgroup]
    assert not stage.datapath.maps.read_back().leftover_service_ids


def test_failed_change(serving: Stage) -> None:
    """A change whose write failed is not forgotten, and neither is one that comes meanwhile."""
    serving.datapath.failures = [FULL, FULL]
    serving.say(changed(Kind.ENDPOINT_SLICE, slices("a", "10.1.0.7")))
    serving.say(changed(Kind.ENDPOINT_SLICE, slices("b", "10.1.0.8")))
    serving.until(lambda words: not words.failed)
    answers = serving.datapath.maps.answers().values()
    held = {str(backend.address) for answer in answers for backend in answer.cluster}
    assert held == {"10.1.0.7", "10.1.0.8"}


@pytest.mark.parametrize("error", UNLOADED)
def test_no_new_programs(stage: Stage, error: EbpflbError) -> None:
    """Where old programs are in force they stay so, and the agent serves and says it."""
    stage.datapath.compile_error, stage.datapath.hooked = error, True
    stage.start()
    stage.say(*EVERYTHING)
    assert stage.words.programs == f"old ones: {str(error).splitlines()[0]}"
    assert len(stage.datapath.maps.services) == 2
    assert not stage.datapath.attached


@pytest.mark.parametrize("error", UNLOADED)
def test_no_programs_at_all(stage: Stage, error: EbpflbError) -> None:
    """Where there are none the agent ends with the words of whoever refused them."""
    stage.datapath.compile_error = error
    stage.start()
    stage.thread.join(10)
    assert stage.error is error
    assert not stage.datapath.attached


def test_stop(serving: Stage) -> None:
    """The agent ends, its source with it, and what is programmed stays."""
    serving.stop()
    assert not serving.thread.is_alive()
    assert serving.agent.source.state == "stopped"  # type: ignore[attr-defined]
    assert len(serving.datapath.maps.services) == 2
