# SPDX-License-Identifier: Apache-2.0
"""An event about an object whose annotation cannot be read."""

from ebpflb.model.cluster_state import ObjectWarning
from ebpflb.model.events import Key, Kind
from tests.serve.conftest import FakeRecorder, Serve


def test_it_is_about_the_object(serve: Serve, fake_recorder: FakeRecorder) -> None:
    """The event names the object and the problem."""
    servers = serve(healthz_address="", metrics_address="")
    warning = ObjectWarning(Kind.SERVICE, Key("shop", "web"), "api", "wrong")
    servers.record_annotation(warning)
    (event,) = [it for it in fake_recorder.events if it.reason == "InvalidAnnotation"]
    assert (str(event.about), event.severity, event.note) == (
        "Service shop/web",
        "Warning",
        "wrong",
    )
