# SPDX-License-Identifier: Apache-2.0
"""What a file of settings cannot say of the package; everything else is in setup.cfg.

Environment: SOURCE_URL, the repository's address, such as https://github.com/OWNER/ebpflb.
"""

import os
import re
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools_scm import get_version

# [text](target) or ![text](target) with a target inside of the repository.
LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?:|#)([^)]*)\)")
INFO = Path("PKG-INFO")  # in a source archive: what it was made from


def description(readme: str, url: str, tag: str) -> str:
    """README.md for a package index, where relative links lead nowhere.

    They become absolute; without ``url`` only their text is left.
    """

    def absolute(link: re.Match[str]) -> str:
        mark, text, target = link.groups()
        if not url:
            return "" if mark else text
        return f"{mark}[{text}]({url}/{'raw' if mark else 'blob'}/{tag}/{target})"

    return LINK.sub(absolute, readme)


def source_url(info: Message) -> str:
    """The repository's address that a source archive was made with; "" if there was none."""
    found = (each.partition(", ") for each in info.get_all("Project-URL", []))
    return next((address for name, _, address in found if name == "Source"), "")


def settings() -> dict[str, Any]:
    """For ``setup``. A source archive keeps its version, and the file that names its commit."""
    info = HeaderParser().parsestr(INFO.read_text() if INFO.exists() else "")
    version, url = info["Version"], os.environ.get("SOURCE_URL") or source_url(info)
    tag = f"v{version or get_version()}" if url else ""
    found: dict[str, Any] = {
        "long_description": description(Path("README.md").read_text(), url, tag),
        "long_description_content_type": "text/markdown",
    }
    if version:
        found["version"] = version
    if url:
        found["project_urls"] = {
            "Source": url,
            "Documentation": f"{url}/tree/{tag}/docs",
            "Changes": f"{url}/blob/{tag}/CHANGELOG.md",
            "Issues": f"{url}/issues",
        }
    return found


if __name__ == "__main__":
    setup(**settings())
