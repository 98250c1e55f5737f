# SPDX-License-Identifier: Apache-2.0
"""What a file of settings cannot say of the package; everything else is in setup.cfg.

Environment: SOURCE_URL, the repository's address, such as https://github.com/OWNER/ebpflb.
"""

import os
import re
from distutils.command.install_data import install_data  # setuptools' own
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools_scm import get_version

# [text](target) or ![text](target) with a target inside of the repository.
LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?:|#)([^)]*)\)")
INFO = Path("PKG-INFO")  # in a source archive: what it was made from


def description(readme: str, url: str, tag: str, folder: str = "", kept: str = "$^") -> str:
    """A page of ``folder`` for where its relative links lead nowhere, as README.md in an index.

    They become absolute; without ``url`` only their text is left. Those that match ``kept`` stay.
    """

    def absolute(link: re.Match[str]) -> str:
        mark, text, target = link.groups()
        if re.match(kept, target):
            return link[0]
        if not url:
            return "" if mark else text
        path = os.path.normpath(os.path.join(folder, target))
        return f"{mark}[{text}]({url}/{'raw' if mark else 'blob'}/{tag}/{path})"

    return LINK.sub(absolute, readme)


def source_url(info: Message) -> str:
    """The repository's address that a source archive was made with; "" if there was none."""
    found = (each.partition(", ") for each in info.get_all("Project-URL", []))
    return next((address for name, _, address in found if name == "Source"), "")


class InstallData(install_data):
    """Installs docs/ as well, whose pages link to each other and to CHANGELOG.md."""

    url = tag = ""

    def run(self) -> None:
        super().run()
        for page in (path for path in map(Path, self.outfiles) if path.parent.name == "docs"):
            kept = r"(\w[\w-]*|\.\./CHANGELOG)\.md"
            page.write_text(description(page.read_text(), self.url, self.tag, "docs", kept))


def settings() -> dict[str, Any]:
    """For ``setup``. A source archive keeps its version, and the file that names its commit."""
    info = HeaderParser().parsestr(INFO.read_text() if INFO.exists() else "")
    version, url = info["Version"], os.environ.get("SOURCE_URL") or source_url(info)
    tag = f"v{version or get_version()}" if url else ""
    InstallData.url, InstallData.tag = url, tag
    found: dict[str, Any] = {
        "cmdclass": {"install_data": InstallData},
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
