# SPDX-License-Identifier: Apache-2.0
"""Configuration files with errors are rejected (kube-proxy.md 15)."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ebpflb.config import config_file
from ebpflb.errors import ConfigurationError
from tests.kit.hostile_files import NOT_NESTED, lay


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.conf"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"---\n",
        b"apiVersion",
        b"- a\n- b\n",
        b"{ this: is: no: yaml",
        b'{"kind": "KubeProxyConfiguration", ',
        b"\x00\x01\x02",
        b"kind: \xff\xfe",
        b"? [a]\n: 1\n",
        b'{"a":' * 10**5 + b"1" + b"}" * 10**5,
        b"a: &x [*x]\n",
        b"a: !!python/object:os.system x\n",
    ],
)
def test_no_configuration(file: Path, text: bytes) -> None:
    """A file that is not a mapping, such as half of a file, is rejected in a line that names it."""
    file.write_bytes(text)
    with pytest.raises(ConfigurationError) as refused:
        config_file.read(file)
    assert all(line.startswith(f"{file}: ") for line in str(refused.value).splitlines())


def test_no_file(file: Path) -> None:
    """A missing file is named."""
    with pytest.raises(ConfigurationError, match=f"{file}: No such file"):
        config_file.read(file)


@pytest.mark.parametrize("make", NOT_NESTED.values(), ids=NOT_NESTED)
def test_what_is_no_file(file: Path, make: Callable[[Path], None]) -> None:
    """An endless device, a pipe or a huge sparse file is named, and not read."""
    lay(make, file)
    with pytest.raises(ConfigurationError, match=str(file)):
        config_file.read(file)
