# SPDX-License-Identifier: Apache-2.0
"""What the API server answers, read within bounded memory, whatever it sends.

Compressed answers are not asked for, and not expanded: they count as garbage.
"""

from collections.abc import Iterator
from io import BytesIO

from urllib3 import BaseHTTPResponse

from ebpflb.errors import ClusterError

# Of an object etcd takes 1.5 MB; a page has up to 500 objects, of which most are small.
LARGEST_PAGE, LARGEST_LINE, LARGEST_STATUS = 256 << 20, 16 << 20, 1 << 20  # bytes


def whole(response: BaseHTTPResponse, largest: int) -> bytes:
    """Raises ClusterError for more than ``largest`` bytes, and what the connection raises."""
    found = BytesIO()
    for part in response.stream(decode_content=False):
        found.write(part)
        if found.tell() > largest:
            raise ClusterError(f"the answer has more than {largest} bytes")
    return found.getvalue()


def lines(response: BaseHTTPResponse) -> Iterator[bytes]:
    """The lines that have an end; raises ClusterError for one of more than LARGEST_LINE bytes, and
    what the connection raises.
    """
    begun, size = list[bytes](), 0
    for part in response.stream(decode_content=False):
        *ended, rest = part.split(b"\n")
        if ended:
            yield b"".join([*begun, ended[0]])
            yield from ended[1:]
            begun, size = [], 0
        begun.append(rest)
        size += len(rest)
        if size > LARGEST_LINE:
            raise ClusterError(f"a line of the watch has more than {LARGEST_LINE} bytes")
