# SPDX-License-Identifier: Apache-2.0
"""Helm itself (its Go library, by helm-python-sdk) on the chart, in a process of its own.

    python -m tests.deploy.helm         after a change of the chart

writes what `helm template ebpflb deploy/chart/ebpflb --namespace kube-system` prints, with default
values into deploy/manifests/ebpflb.yaml, and with other values, without alerts, into
everything.yaml here. In tests ``render`` asks for many renderings at once, because loading the
library takes longer than using it.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "chart/ebpflb"
MANIFESTS = DEPLOY / "manifests/ebpflb.yaml"
_SPDX = "# SPDX-License-Identifier: Apache-2.0\n"
HEADING = (
    f"{_SPDX}# Rendered from deploy/chart/ebpflb with {{}} values: python -m tests.deploy.helm\n"
)
EVERYTHING = Path(__file__).with_name("everything.values.yaml")
ORDER = ["ServiceAccount", "ConfigMap", "ClusterRole", "ClusterRoleBinding", "DaemonSet"]

Values = dict[str, Any]
Object = dict[str, Any]


class Refused(Exception):
    """Helm's error about values or a template."""


def ask(question: str, *values: Values) -> list[Any]:
    """Return Helm's answer to each request; a Refused if Helm refuses the request."""
    done = subprocess.run(
        [sys.executable, __file__, question],
        input=json.dumps(values),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    answers = json.loads(done.stdout)
    return [Refused(it["refused"]) if "refused" in it else it["answer"] for it in answers]


def texts(files: dict[str, str]) -> list[str]:
    """Return the manifests of a rendering as written, in the order in which Helm applies them."""
    found = [text for name, text in files.items() if name.endswith(".yaml") and text.strip()]
    whole = [text.replace(_SPDX, "").strip() + "\n" for text in found]
    return sorted(whole, key=_place)


def _place(text: str) -> int:
    kind = yaml.safe_load(text)["kind"]
    return ORDER.index(kind) if kind in ORDER else len(ORDER)


def render(*values: Values) -> list[list[Object]]:
    """Return the objects of each rendering. Raises Refused."""
    answers = ask("render", *values)
    for answer in answers:
        if isinstance(answer, Refused):
            raise answer
    return [[yaml.safe_load(text) for text in texts(answer)] for answer in answers]


def the(kind: str, objects: list[Object]) -> Object:
    """Return the only object of this kind."""
    (found,) = [it for it in objects if it["kind"] == kind]
    return found


def container(objects: list[Object]) -> Object:
    """Return the agent's container."""
    return containers(objects)[0]


def containers(objects: list[Object]) -> list[Object]:
    """Return the agent's container, and the page's if it is enabled."""
    found: list[Object] = the("DaemonSet", objects)["spec"]["template"]["spec"]["containers"]
    return found


def snapshots() -> dict[Path, str]:
    """Return the expected content of the checked-in renderings."""
    default, other = ask("render", {}, yaml.safe_load(EVERYTHING.read_text()))
    return {
        MANIFESTS: _whole("its default", default),
        EVERYTHING.with_name("everything.yaml"): _whole(
            "everything.values.yaml's",
            {name: text for name, text in other.items() if "prometheusrule" not in name},  # alerts
        ),
    }


def _whole(values: str, files: dict[str, str]) -> str:
    return HEADING.format(values) + "".join(f"---\n{text}" for text in texts(files))


def _answer(question: str, values: Values) -> Any:
    import helm_python

    if question == "lint":
        return helm_python.lint(CHART, values, strict=True)
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        return chart.render(values, name="ebpflb", namespace="kube-system")


def main() -> None:
    if len(sys.argv) < 2:
        for path, text in snapshots().items():
            path.write_text(text)
        return
    import helm_python

    answers = []
    for values in json.load(sys.stdin):
        try:
            answers.append({"answer": _answer(sys.argv[1], values)})
        except helm_python.HelmError as error:
            answers.append({"refused": str(error)})
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
