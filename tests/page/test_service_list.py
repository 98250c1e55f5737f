# SPDX-License-Identifier: Apache-2.0
"""The list of Services of the page: sorted and filtered over all of them."""

from typing import Any

import pytest

from tests.page.asgi import row, survey_of

LATEST = {"b/busy": (50.0, 0.0), "a/refused": (1.0, 3.0)}


def chosen(**query: Any) -> list[str]:
    """The names of the Services that fit, in their order."""
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
def test_order(sort: str, order: list[str]) -> None:
    """What an operator looks for comes first; without another word those with a problem."""
    assert chosen(sort=sort) == order
    assert sort != "problems" or chosen() == order


def test_reverse_order() -> None:
    """The other way round; equal ones stay sorted by name."""
    assert chosen(sort="open", is_reverse=True) == ["a/refused", "b/broken", "b/busy", "a/web"]


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
def test_filters(query: dict[str, Any], names: list[str]) -> None:
    """Services are filtered by words of name, address and port; by namespace; by having a
    problem.
    """
    assert chosen(sort="service", **query) == names


def test_a_long_list_is_cut() -> None:
    """It says how many more fit, and all namespaces whatever is shown."""
    said = found(sort="new", limit=1)
    assert ([it.service for it in said.services], said.more, said.total) == (["b/busy"], 3, 4)
    assert said.namespaces == ["a", "b"]
