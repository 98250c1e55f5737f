# SPDX-License-Identifier: Apache-2.0
"""The answer of each path: a value as from a command, or an error as a sentence."""

import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from ebpflb.errors import KernelError, NodeError
from ebpflb.history.records import Change, ServiceChange
from ebpflb.lab.agents import wait_until
from ebpflb.serve.status import AgentStatus
from ebpflb.version import VERSION
from tests.page.asgi import Node, get, guarded, no_such_service, page_of, row, survey_of

STATIC = Path(__file__).parents[2] / "ebpflb_page/static"


@pytest.fixture
def node() -> Node:
    return Node()


def test_the_status_is_that_of_the_command(node: Node) -> None:
    """The status is that of the command, with this version and the node's time; many clients share
    it.
    """
    node.answers["status"] = {"verdict": "DOWN", "reasons": [{"text": "why"}]}
    app = guarded(node)
    said = get(app, "/api/status").said
    assert said.pop("version") == VERSION
    assert abs(datetime.fromisoformat(said.pop("now")).timestamp() - time.time()) < 60
    assert said == node.answers["status"]
    get(app, "/api/status")
    assert len(node.asked) == 1


def test_the_requested_services_are_listed(node: Node) -> None:
    """The answer has the requested Services, in the requested order, from the whole list."""
    node.answers["survey"] = survey_of(row("a/web"), row("b/api", 3), row("b/web", 2))
    said = get(guarded(node), "/api/services", match="b/ web", sort="endpoints", limit="7").said
    assert [each["service"] for each in said["list"]["services"]] == ["b/web"]
    assert (said["list"]["more"], said["list"]["total"]) == (0, 3)
    assert said["list"]["namespaces"] == ["a", "b"]
    assert list(said["rates"]["services"]) == ["b/web"]


def test_the_overview_shows_services_with_a_problem(node: Node) -> None:
    """The overview shows what is used, how full the maps are, and only Services with a problem."""
    node.answers["survey"] = survey_of(row("a/web"), row("b/web", 2, "no space"))
    said = get(guarded(node), "/api/overview").said
    assert (said["used"], said["unused"]) == (3, 0)
    assert said["maps"] == [{"name": "slots", "entries": 3, "limit": 4}]
    assert [each["service"] for each in said["list"]["services"]] == ["b/web"]


def test_a_service_shows_its_problems(node: Node) -> None:
    """The answer has the Service's problems, which the command shows by its exit status."""
    node.answers["service"] = page_of(2)
    node.answers["service"].ports[0].problem = "no space"
    said = get(guarded(node), "/api/service", name="default/web").said
    assert said["problems"] == ["default/web:tcp/TCP: no space"]
    assert len(said["page"]["ports"][0]["endpoints"]) == 2


@pytest.mark.parametrize(("page", "first", "count"), [(1, 0, 100), (3, 200, 50), (4, 0, 0)])
def test_many_endpoints_are_pages(node: Node, page: int, first: int, count: int) -> None:
    """An answer has at most a hundred endpoints of each port."""
    node.answers["service"] = page_of(250)
    said = get(guarded(node), "/api/service", name="default/web", page=page).said
    rows = said["page"]["ports"][0]["endpoints"]
    assert (said["pages"], len(rows)) == (3, count)
    assert not rows or rows[0]["pod"] == f"web-{first}"


def test_an_explanation_shows_the_first_endpoints(node: Node) -> None:
    """The answer has the first of many endpoints, and the number of the remaining ones."""
    endpoints = [{"slot": i} for i in range(999)]
    node.answers["explain"] = {"verdict": "translated", "endpoints": endpoints}
    query: dict[str, Any] = {"to": "10.96.0.10:80/udp", "from": "outside", "from_port": "7"}
    said = get(guarded(node), "/api/explain", **query).said
    (asked,) = node.asked
    assert (str(asked[1]), asked[1].protocol, *asked[2:]) == ("10.96.0.10:80", 17, "outside", 7)
    assert (len(said["endpoints"]), said["more_endpoints"]) == (200, 799)


@pytest.mark.parametrize("path", ["/etc/passwd", "../etc/passwd", "pod/../../x"])
def test_no_path_is_opened(node: Node, path: str) -> None:
    """Only the command takes a path, because a user of the page could let root open a file."""
    query: dict[str, Any] = {"to": "10.96.0.10:80", "from": path}
    found = get(guarded(node), "/api/explain", **query)
    assert (found.status, not node.asked) == (400, True)
    assert "only the command takes a path" in found.said["error"]


def test_the_page_shows_fields_that_changes_have() -> None:
    """Every field of a Service's change that the page shows exists in the records."""
    text = (STATIC / "pages/history.js").read_text()
    shown = set(re.findall(r'", "(\w+)"\]', text[text.index("SIGNS =") : text.index("SOME =")]))
    assert shown and shown <= {*ServiceChange.__struct_fields__}


def test_the_overview_shows_fields_that_a_status_has() -> None:
    """Every fact that the overview names itself exists; load balancer addresses are among them."""
    shown = set(re.findall(r"status\.(\w+)", (STATIC / "pages/overview.js").read_text()))
    of_node = {"agent", "now", "reasons", "verdict", "version"}
    assert {"addresses", "hand_over"} <= shown <= of_node | {*AgentStatus.__struct_fields__}


def test_history_can_be_of_one_service(node: Node) -> None:
    """The history can be limited to one Service, and to changes since a given time."""
    node.answers["history"] = {"begins": "then", "changes": [], "earlier": 0, "notes": []}
    said = get(guarded(node), "/api/history", service="default/web", since="10m").said
    assert said == node.answers["history"]
    (asked,) = node.asked
    assert (asked[1], asked[3]) == (("default", "web"), 200)
    assert 0 < time.time() - asked[2] - 600 < 60


def test_a_history_of_many_services_is_cut(node: Node) -> None:
    """The newest changes come first, in a limited number of rows; on request all are sent."""
    changes = [
        Change(f"{at}", [], 0, [ServiceChange(f"a/{i}:p/TCP") for i in range(300)])
        for at in range(3)
    ]
    node.answers["history"] = {"begins": "0", "changes": changes, "earlier": 1, "notes": []}
    said = get(guarded(node), "/api/history").said
    found = [(it["time"], len(it["services"]), it["more_services"]) for it in said["changes"]]
    assert (found, said["earlier"]) == ([("1", 200, 100), ("2", 300, 0)], 2)
    whole = get(guarded(node), "/api/history", whole="1").said
    assert ([len(it["services"]) for it in whole["changes"]], whole["earlier"]) == ([300] * 3, 1)


def test_control_characters_are_escaped(node: Node) -> None:
    """Names are escaped everywhere, as in the tables of the commands."""
    node.answers["status"] = {"a\x1b[2Jb": ["c\u202ed", {"e": "<b>\0"}]}
    said = get(guarded(node), "/api/status").said
    assert said["a\\x1b[2Jb"] == ["c\\u202ed", {"e": "<b>\\x00"}]


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("service", {}),
        ("service", {"name": "web"}),
        ("service", {"name": "a/b/c"}),
        ("service", {"name": "/web"}),
        ("service", {"name": "default/web", "page": "0"}),
        ("service", {"name": "default/web", "page": "\u0663"}),
        ("service", {"name": f"default/{'a' * 400}"}),
        ("services", {"limit": "-1"}),
        ("services", {"limit": "many"}),
        ("services", {"match": "a" * 400}),
        ("services", {"sort": "colour"}),
        ("services", {"limit": "1001"}),
        ("explain", {}),
        ("explain", {"to": "nobody"}),
        ("explain", {"to": "10.96.0.10:80/icmp"}),
        ("explain", {"to": "10.96.0.10:80", "from_port": "65536"}),
        ("history", {"service": "web"}),
        ("history", {"since": "yesterday"}),
        ("history", {"since": "5"}),
        ("events", {"service": "web"}),
        ("events", {"client": "nobody"}),
        ("events", {"verdict": "maybe"}),
    ],
)
def test_bad_input_is_refused_in_a_sentence(node: Node, path: str, query: Any) -> None:
    """Bad input is refused before anything is read."""
    found = get(guarded(node), f"/api/{path}", **query)
    assert found.status == 400
    assert found.said["error"]
    assert node.asked == []


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (NodeError("no maps here: start `ebpflb run`"), 503, "no maps here: start `ebpflb run`"),
        (KernelError("bpf(2)", 1, "not permitted"), 503, "bpf(2): not permitted"),
        (OSError(13, "Permission denied", "/run/x"), 503, "/run/x: Permission denied"),
        (KeyError("who\x07knows"), 500, "internal error, described in"),
    ],
)
def test_errors_are_one_sentence(node: Node, error: Exception, status: int, text: str) -> None:
    """Errors never have a traceback, or Python's own words."""
    node.answers["status"] = error
    found = get(guarded(node), "/api/status")
    assert found.status == status
    assert found.said["error"].startswith(text)
    assert "\n" not in found.said["error"] and "Error" not in found.said["error"]


def test_no_such_service(node: Node) -> None:
    """The answer is that of the command, with status 404, so the page stops asking."""
    node.answers["service"] = no_such_service()
    found = get(guarded(node), "/api/service", name="default/wob")
    assert found.status == 404
    assert found.said == {"error": "no Service default/wob: did you mean default/web?"}


@pytest.mark.parametrize("path", ["/x", "/api/", "/api/nothing", "/api/status/x"])
def test_no_such_path(path: str) -> None:
    """The answer says where the page is."""
    found = get(guarded(Node()), path)
    assert (found.status, found.said) == (404, {"error": "no such page: it is at /"})


@pytest.mark.parametrize("path", ["../application.py", "%2e%2e/guard.py", "/etc/passwd"])
def test_only_the_files_of_the_page_are_given(path: str) -> None:
    assert get(guarded(Node()), f"/static/{path}").status == 404


def test_files_of_the_page() -> None:
    """Files have their type; the page itself contains no script or style."""
    app = guarded(Node())
    html = get(app, "/")
    assert html.headers["content-type"].startswith("text/html")
    for file in STATIC.rglob("*.*"):
        found = get(app, f"/static/{file.relative_to(STATIC)}")
        assert (found.status, found.body) == (200, file.read_bytes())
        text = file.read_text()
        assert (
            "innerHTML" not in text
            and "style=" not in text
            and "http://" not in text.replace("http://www.w3.org/", "")
        )
    assert b"<style" not in html.body and b"onclick=" not in html.body


def test_too_many_readers_are_asked_to_come_again(node: Node) -> None:
    """A limited number of requests waits; any further request is refused at once."""
    import asyncio

    from ebpflb_page.answering import BadInput, Workers

    goes_on = Event()

    async def ask() -> None:
        workers = Workers(1, 1, "busy")
        first, second = (asyncio.create_task(workers.run(goes_on.wait)) for _ in range(2))
        await asyncio.sleep(0)
        with pytest.raises(BadInput) as refused:
            await workers.run(goes_on.wait)
        assert refused.value.status == 503
        goes_on.set()
        assert await first and await second
        assert await workers.run(goes_on.wait)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, ask()).result(60)


def test_a_question_that_hangs_holds_up_no_other(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reading that never ends is given up with an error, and the next request is answered."""
    from ebpflb_page import answering

    monkeypatch.setattr(answering, "READ_SECONDS", 0.1)
    goes_on, app, answer = Event(), guarded(node), node.explain
    node.answers["explain"] = {"verdict": "translated", "endpoints": []}
    try:
        node.explain = lambda asked: goes_on.wait()  # type: ignore[method-assign]
        for _ in range(2):
            hung = get(app, "/api/explain", to="10.96.0.10:80")
            assert (hung.status, hung.said) == (503, {"error": "no answer within 0.1 s: given up"})
        node.explain = answer  # type: ignore[method-assign]
        monkeypatch.setattr(answering, "READ_SECONDS", 60.0)
        assert get(app, "/api/explain", to="10.96.0.10:80").said["verdict"] == "translated"
    finally:
        goes_on.set()


def test_many_hung_questions_are_an_error(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of threads that never end is limited; when some end, others can start."""
    from ebpflb_page import answering

    monkeypatch.setattr(answering, "READ_SECONDS", 0.01)
    monkeypatch.setattr(answering, "MOST_HUNG", 2)
    goes_on, app = Event(), guarded(node)
    node.explain = lambda asked: goes_on.wait()  # type: ignore[method-assign]
    said = [get(app, "/api/explain", to="10.96.0.10:80").said["error"] for _ in range(3)]
    assert said[2] == "2 earlier requests hang: restart `ebpflb ui`"
    node.answers["explain"] = {"verdict": "translated", "endpoints": []}
    node.explain = lambda asked: node.answer("explain")  # type: ignore[method-assign]
    monkeypatch.setattr(answering, "READ_SECONDS", 60.0)
    goes_on.set()

    def is_answered() -> bool:
        return "verdict" in get(app, "/api/explain", to="10.96.0.10:80").said

    wait_until("hung threads have ended", is_answered)


def test_without_the_extra_the_command_says_what_to_install() -> None:
    """Commands import the packages of the extra only on use."""
    code = """
import sys
sys.modules.update(starlette=None, uvicorn=None)
from ebpflb.cli import common, main
common.require_capabilities = lambda: None
sys.argv = ["ebpflb", "ui"]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "ebpflb: the page needs packages that are not installed: run"
        " `pip install --requirement requirements/ui.txt` in ebpflb's repository\n"
    )


def test_the_command_imports_nothing_of_the_extra() -> None:
    """Until the command runs nothing of the extra is imported, so help and completion are as fast
    as before.
    """
    code = "import sys, ebpflb.cli.ui; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"starlette", "uvicorn", "asyncio"}.isdisjoint(done.stdout.split())


# The list of Services of the page: sorted and filtered over all of them.

LATEST = {"b/busy": (50.0, 0.0), "a/refused": (1.0, 3.0)}


def chosen(**query: Any) -> list[str]:
    """Return the names of the matching Services, in order."""
    return [it.service for it in found(**query).services]


def found(**query: Any) -> Any:
    from ebpflb_page.readings import ListQuery, choose

    rows = [
        row("a/refused", used=0, problem="no endpoint: refused"),
        row("a/web", used=1, opened=7, open=1),
        row("b/broken", used=2, problem="no space"),
        row("b/busy", used=9, opened=9, open=0),
    ]
    rows[1].addresses, rows[3].unused = ["10.96.7.7"], 4
    return choose(survey_of(*rows), ListQuery(**query), LATEST)


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("problems", ["a/refused", "b/broken", "a/web", "b/busy"]),
        ("service", ["a/refused", "a/web", "b/broken", "b/busy"]),
        ("endpoints", ["a/refused", "a/web", "b/broken", "b/busy"]),
        ("unused", ["b/busy", "a/refused", "a/web", "b/broken"]),
        ("open", ["a/web", "a/refused", "b/broken", "b/busy"]),
        ("opened", ["b/busy", "a/web", "a/refused", "b/broken"]),
        ("new", ["b/busy", "a/refused", "a/web", "b/broken"]),
        ("refused", ["a/refused", "a/web", "b/broken", "b/busy"]),
    ],
)
def test_services_with_a_problem_come_first(sort: str, order: list[str]) -> None:
    """By default Services with a problem come first. In reverse order, Services with equal values
    are still sorted by name.
    """
    assert chosen(sort=sort) == order
    assert sort != "open" or chosen(sort=sort, is_reverse=True)[-1] == "a/web"
    assert sort != "problems" or chosen() == order


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ({"text": "BU"}, ["b/busy"]),
        ({"text": "a/"}, ["a/refused", "a/web"]),
        ({"text": "10.96.7"}, ["a/web"]),
        ({"text": "80/tcp web"}, ["a/web"]),
        ({"text": "nobody"}, []),
        ({"namespace": "b"}, ["b/broken", "b/busy"]),
        ({"problems": True}, ["a/refused", "b/broken"]),
        ({"problems": True, "namespace": "b"}, ["b/broken"]),
    ],
)
def test_services_are_filtered(query: dict[str, Any], names: list[str]) -> None:
    """Services are filtered by words of name, address and port; by namespace; by having a
    problem.
    """
    assert chosen(sort="service", **query) == names


def test_a_long_list_is_cut() -> None:
    """The answer has the number of further matches, and all namespaces, whatever is shown."""
    said = found(sort="new", limit=1)
    assert ([it.service for it in said.services], said.more, said.total) == (["b/busy"], 3, 4)
    assert said.namespaces == ["a", "b"]


# A value that takes long to read holds up no client that has seen an earlier one.


class Slow:
    """A value whose reading takes five seconds by its clock; one reading lasts until ``goes_on`` is
    set.
    """

    def __init__(self) -> None:
        self.now, self.count, self.goes_on, self.fails = 0.0, 0, Event(), False
        self.goes_on.set()

    def read(self) -> int:
        self.goes_on.wait()
        if self.fails:
            raise NodeError("no maps")
        self.now, self.count = self.now + 5, self.count + 1
        return self.count


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def paced(slow: Slow) -> Any:
    """Return a Paced with a first value; a reading takes a tenth of the time, so the next one is
    due in 45 s.
    """
    from ebpflb_page.rate_meter import Paced

    made = Paced(slow.read, 10, lambda: slow.now)
    assert made.get() == 1
    return made


def test_the_last_value_is_given_while_the_next_is_read(slow: Slow, paced: Any) -> None:
    slow.goes_on.clear()
    slow.now += 46
    assert [paced.get() for _ in range(3)] == [1, 1, 1]
    slow.goes_on.set()
    wait_until("it is read", lambda: paced.get() == 2)
    assert slow.count == 2


def test_a_value_that_is_much_too_old_is_not_given(slow: Slow, paced: Any) -> None:
    """After an hour without clients the first one waits for a new value."""
    slow.now += 3600
    assert paced.get() == 2
