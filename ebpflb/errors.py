# SPDX-License-Identifier: Apache-2.0
"""All errors that ebpflb raises itself; each message is one line for the operator.

If another library's error or an OSError is caught, an error of ours is raised from it, with the
text of ``in_words``.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice

# Parts of library messages beside the reason: urllib3's objects, Python's errno, ssl's source line.
_PYTHON = [
    (re.compile(pattern), words)
    for pattern, words in (
        (r"^(?:<[\w.]+ object at \w+>|\w+\(host='?[^()]*\)): ", ""),
        (r"\[Errno -?\d+\] ", ""),
        (r"\[SSL: \w+\] ", ""),
        (r" ?\(_ssl\.c:\d+\)", ""),
        (r"\bIncompleteRead\(([^()]*)\)", r"\1"),
        (r"Exceeds the limit \(\d+ digits\) for integer string conversion.*", "too many digits"),
        (r"^Command .* timed out after ([\d.]+) seconds$", r"not ended after \1 s"),
    )
]

# msgspec's names of types -> JSON's; of array, object and null they are the same.
_JSON_TYPES = {"int": "integer", "str": "string", "bool": "boolean", "float": "number"}

LONGEST_VALUE = 64  # characters of a value, where a message quotes it
LONGEST_LINE = 400  # characters of foreign text that a message quotes
MOST_LINES = 20  # about one object


def escaped(text: str, kept: str = "") -> str:
    """Escape control characters, on which a terminal would act, except those in ``kept``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """Make foreign text fit for a message: one line of bounded length, without control characters,
    that can be encoded.
    """
    words = " ".join(text[: 4 * LONGEST_LINE].split())
    shown = escaped(words)
    return shown if len(shown) <= LONGEST_LINE else f"{shown[:LONGEST_LINE]}..."


def some_lines(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the first of these texts, each as one line, and the number of the remaining ones.

    An object may have an error in each of 100,000 entries.
    """
    rest = iter(texts)
    first = tuple(map(one_line, islice(rest, MOST_LINES)))
    more = sum(1 for _ in rest)
    return (*first, f"and {more} more") if more else first


def quoted(value: str) -> str:
    """Return a foreign value in quotes, shortened if it is long: an annotation may have 256 KB."""
    end = "..." if len(value) > LONGEST_VALUE else ""
    return f'"{escaped(value[:LONGEST_VALUE])}{end}"'


class EbpflbError(Exception):
    """An error that the operator can act on: shown as one line, without a traceback."""


class InvalidObject(EbpflbError):
    """An invalid API object: the field, and what is wrong with it."""

    def __init__(self, field: str, reason: str) -> None:
        self.field = one_line(field)
        self.reason = one_line(reason)
        super().__init__(f"{self.field}: {self.reason}")


def unexpected(error: Exception) -> InvalidObject:
    """Return the text for an object that could not be read because of a bug."""
    return InvalidObject("object", f"unexpected {type(error).__name__}: {error}")


class ConfigurationError(EbpflbError):
    """An invalid configuration: a line for each field, with its path."""


class ClusterError(EbpflbError):
    """The cluster's objects cannot be read: configuration, authentication, a missing directory."""


class CompileError(EbpflbError):
    """The compiler rejected bpf/, or is missing; the message has the compiler's own text."""


class VerifierError(EbpflbError):
    """The kernel rejected a program; the message has its name and the end of the verifier's log."""


class KernelError(EbpflbError):
    """A bpf(2) call failed: which call, on what, and the errno's meaning."""

    def __init__(self, what: str, errno: int, reason: str) -> None:
        super().__init__(f"{what}: {reason}")
        self.errno = errno


class NodeError(EbpflbError):
    """This machine lacks something; the message says what, and what to do about it."""


class NotFound(NodeError):
    """No object has the wanted name; the message has similar names."""


def in_words(error: BaseException) -> str:
    """Return an error of Python or of a library as one line for the operator.

    It names file and reason, without classes, errnos or lines of source.
    """
    if isinstance(error, EbpflbError):
        return str(error)
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {plain(error.strerror)}"
    if isinstance(error, OSError) and error.strerror:
        return plain(error.strerror)
    if error.args and isinstance(error.args[-1], BaseException):  # urllib3: ("broken", the reason)
        return ": ".join(
            [*(plain(str(it)).rstrip(".") for it in error.args[:-1]), in_words(error.args[-1])]
        )
    return plain(str(error)) or type(error).__name__


@contextmanager
def instead_of_os_error(what: str, kind: type[EbpflbError] = NodeError) -> Iterator[None]:
    """Raise an error for the operator, of this kind, where an OSError ends the block."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error.args[-1]}") from error


def plain(text: str) -> str:
    """Return a library's message in one line, without Python's own words."""
    for pattern, words in _PYTHON:
        text = pattern.sub(words, text)
    return one_line(text)


def log_once(say: Callable[[str, str], None], line: str, reason: str, last: str | None) -> str:
    """Log a reason with a logger's method, unless it equals the last one; return the reason."""
    if reason != last:
        say(line, reason)
    return reason


def in_json_words(reason: str) -> str:
    """Return msgspec's message about a value, in terms of JSON instead of Python."""

    def renamed(quoted: re.Match[str]) -> str:
        return re.sub(r"\w+", lambda word: _JSON_TYPES.get(word[0], word[0]), quoted[1])

    return re.sub(r"`([^`$]*)`", renamed, reason)
