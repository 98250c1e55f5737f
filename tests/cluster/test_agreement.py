# SPDX-License-Identifier: Apache-2.0
"""Both sources emit the same events for the same objects."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebpflb.cluster import decoding, manifests
from ebpflb.errors import InvalidObject
from ebpflb.lab.manifests import service_cidr
from ebpflb.model import endpoint_slices
from ebpflb.model.endpoint_slices import ReadSlice
from ebpflb.model.events import Event, Kind, Replaced
from ebpflb.model.objects import EndpointSlice, Object
from tests.cluster.event_log import EventLog, Start
from tests.cluster.objects import HEADLESS, PROXY_NAME, endpoint_slice, node, service
from tests.kit.api_history import Json, Request, fits
from tests.kit.api_server import FakeApiServer

words = st.text("abcdefghijklmnopqrstuvwxyz-:.0123456789 ~!#", max_size=12)
numbers = st.integers(-(2**40), 2**40)
labels = st.none() | st.dictionaries(words | st.sampled_from([PROXY_NAME, HEADLESS]), words)
ports = st.lists(st.fixed_dictionaries({"port": numbers}, optional={"name": words}), max_size=3)
anything = st.recursive(
    st.none() | st.booleans() | numbers | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=4,
)
services = st.builds(
    lambda labels, spec: service("web", **spec) | {"metadata": _metadata(labels)},
    labels,
    st.fixed_dictionaries(
        {"clusterIP": words | st.just("None"), "ports": ports | st.none() | anything},
        optional={"type": words, "externalIPs": st.lists(words), "ipFamilies": anything},
    ),
)


def _metadata(labels: dict[str, str] | None) -> Json:
    return {"name": "web", "namespace": "default", "labels": labels}


def emitted(found: Iterable[Event]) -> Iterator[tuple[Kind, Any]]:
    """Return the emitted events, without their origins and versions."""
    for event in found:
        assert isinstance(event, Replaced)
        yield event.kind, {key: _said(it.object) for key, it in event.objects.items()}


def _said(thing: Object | ReadSlice | InvalidObject) -> dict[str, Any] | str | ReadSlice:
    """Return slices as they are stored: only one of the sources has read them."""
    if isinstance(thing, EndpointSlice):
        return endpoint_slices.read(thing)
    if isinstance(thing, InvalidObject | ReadSlice):
        return thing if isinstance(thing, ReadSlice) else str(thing)
    return {"labels": thing.metadata.labels} | {
        name: getattr(thing, name) for name in thing.__struct_fields__ if name != "metadata"
    }


def test_the_sources_agree_over_the_wire_and_on_disk(
    api: FakeApiServer, folder: Path, events: EventLog, watch: Start, follow: Start
) -> None:
    """The same objects, some of them filtered or broken, give the same Replaced of every kind."""
    objects = [
        service("web", ports=[{"port": 80, "nodePort": 30080}], type="NodePort"),
        service("broken", ports={}),
        service("foreign", labels={PROXY_NAME: ""}),
        service("headless", clusterIP="None"),
        endpoint_slice("web-1", "10.0.0.1", "10.0.0.2"),
        endpoint_slice("headless-1", "10.0.0.3", labels={HEADLESS: ""}),
        node("node-1", labels={"topology.kubernetes.io/zone": "a"}),
        node("node-2"),
        service_cidr("10.96.0.0/16", "fd00:96::/112"),
    ]
    for object in objects:
        api.put(object)
    (folder / "all.yaml").write_text(yaml.safe_dump_all(objects))
    watch()
    over_the_wire = [events.next(kind) for kind in Kind]
    follow()
    assert list(emitted(over_the_wire)) == list(emitted(events.next(kind) for kind in Kind))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(object=services)
def test_yaml_and_json_decode_alike(tmp_path: Path, object: Json) -> None:
    """Any Service comes out equal from both, or is refused by both, with the API's defaults."""
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(object))
    content = manifests.read(path)
    try:
        whole = manifests.defaulted(Kind.SERVICE, object)  # as the API server sends it
        expected = decoding.decode(Kind.SERVICE, msgspec.json.encode(whole))
    except InvalidObject:
        ((name, found),) = content.objects.items()
        assert name.key == ("default", "web")
        assert isinstance(found, InvalidObject)
    else:
        assert list(content.objects.values()) == [expected]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(object=services)
def test_selectors_accept_what_the_server_would_give(api: FakeApiServer, object: Json) -> None:
    """``query`` and ``is_selected`` mean the same selection."""
    try:
        decoded = decoding.decode(Kind.SERVICE, msgspec.json.encode(object))
    except InvalidObject:
        return
    object["metadata"]["labels"] = object["metadata"]["labels"] or {}
    asked = decoding.query(Kind.SERVICE, "node-1")
    assert decoding.is_selected(decoded, "node-1") == fits(object, Request("Service", asked))
