# SPDX-License-Identifier: Apache-2.0
"""Workflows of .github run the Makefile with pinned actions; issue forms are readable."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.helm import DEPLOY

WORKFLOWS = sorted((DEPLOY.parent / ".github/workflows").glob("*.yml"))
every_workflow = pytest.mark.parametrize("workflow", WORKFLOWS, ids=[it.stem for it in WORKFLOWS])


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


@every_workflow
def test_every_action_and_image_is_pinned(workflow: Path) -> None:
    """Actions and images are pinned by digest; a comment has the version of an action."""
    text = workflow.read_text()
    uses = re.findall(r"\buses: (.*)", text)
    assert len(uses) == sum("uses" in step for step in steps(workflow))
    assert [it for it in uses if not re.fullmatch(r"\S+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", it)] == []
    images = re.findall(r"\bimage: (.*)", text)
    assert [it for it in images if not re.fullmatch(r"\S+@sha256:[0-9a-f]{64}", it)] == []


@every_workflow
def test_jobs_get_no_right_to_write_from_the_workflow(workflow: Path) -> None:
    """No job gets write permissions from the workflow; each job declares its own."""
    granted = yaml.safe_load(workflow.read_text())["permissions"]
    assert granted in ({"contents": "read"}, "read-all")


def test_a_tag_publishes_what_make_release_builds() -> None:
    """The workflow builds nothing else, and no publishing job gets the key."""
    workflow = DEPLOY.parent / ".github/workflows/release.yml"
    scripts = "".join(step.get("run", "") for step in steps(workflow))
    assert re.findall(r"\bmake release\b.*", scripts) == [
        'make release KEY=/tmp/key SOURCE_URL="$SOURCE_URL"'
    ]
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    assert [name for name, job in jobs.items() if "RELEASE_KEY" in str(job)] == ["build"]


def test_a_change_is_tested() -> None:
    """A pull request runs the tests that CONTRIBUTING asks for, and one other kernel."""
    text = (DEPLOY.parent / ".github/workflows/pull-request.yml").read_text()
    job = yaml.safe_load(text)["jobs"]["pass"]
    assert job["strategy"]["matrix"]["command"] == ["make test", "make test-kernel KERNEL=5.10"]
