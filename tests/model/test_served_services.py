# SPDX-License-Identifier: Apache-2.0
"""The Services that --namespaces and --services select."""

import pytest

from ebpflb.model import services
from ebpflb.model.objects import Metadata
from ebpflb.model.services import ServedServices

LABELS = {"app": "web", "example.org/tier": "front", "empty": ""}


def chosen(selector: str, namespaces: str = "", labels: dict[str, str] | None = LABELS) -> bool:
    served = ServedServices(
        services.parse_namespaces(namespaces), services.parse_requirements(selector)
    )
    return served.has(Metadata("a", "default", labels=labels))


@pytest.mark.parametrize(
    "selector",
    [
        *("", "app", "app=web", "app == web", "app!=db", "app in (db, web)", "app notin (db)"),
        *("!legacy", "legacy!=yes", "legacy notin (yes,no)", "empty=", "empty in (,a)"),
        *("example.org/tier=front", "app=web,example.org/tier in (back,front),!legacy"),
    ],
)
def test_requirements_that_hold(selector: str) -> None:
    """Requirements hold like those of the API's label selectors; an absent label has no value."""
    assert chosen(selector)


@pytest.mark.parametrize(
    "selector",
    [
        *("legacy", "!app", "app=db", "app!=web", "app in (db)", "app notin (web,db)", "empty!="),
        *("app=web,legacy", "app in (web,db),app!=web", "legacy in (yes)"),
    ],
)
def test_requirements_that_do_not_hold(selector: str) -> None:
    """If one requirement does not hold, the Service is not chosen."""
    assert not chosen(selector)


@pytest.mark.parametrize(
    "selector",
    [
        *("app=web,", ",", "=web", "app=a b", "app in web", "app in (web", "app=(a)", "!app=web"),
        *("!app in (a)", "app>1", "-a", "a b", "app in (a,-b)", "app=web;x"),
    ],
)
def test_what_is_no_selector_is_named(selector: str) -> None:
    """The error names the wrong part, or its value."""
    with pytest.raises(ValueError, match=r"is not a label selector requirement|not a valid label"):
        services.parse_requirements(selector)


def test_without_a_list_all_are_served() -> None:
    """Each listed namespace is served; without a list, all namespaces are."""
    assert chosen("", "other, default")
    assert not chosen("", "other")
    assert not chosen("app=db", "default")
    for wrong in ("a,", "A", "a/b", "-a"):
        with pytest.raises(ValueError, match="is not the name of a namespace"):
            services.parse_namespaces(wrong)
