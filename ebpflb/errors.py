# SPDX-License-Identifier: Apache-2.0
"""All errors that ebpflb raises itself; each message is one line for the operator.

Where another library's error or an OSError is caught, one of these is raised from it.
"""


class EbpflbError(Exception):
    """Something the operator can act on: shown as one line, without a traceback."""


class InvalidObject(EbpflbError):
    """An invalid API object: which field, and what is wrong with it."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class ConfigurationError(EbpflbError):
    """An invalid configuration: a line for each field, with its path."""


class ClusterError(EbpflbError):
    """The cluster's objects cannot be read: configuration, authentication, a missing directory."""


class CompileError(EbpflbError):
    """The compiler rejected bpf/, or is missing; has the compiler's own text."""


class VerifierError(EbpflbError):
    """The kernel rejected a program; has its name and the last lines of the verifier's log."""


class KernelError(EbpflbError):
    """A bpf(2) call failed: which call, on what, and the errno's meaning."""

    def __init__(self, what: str, errno: int, reason: str) -> None:
        super().__init__(f"{what}: {reason}")
        self.errno = errno


class NodeError(EbpflbError):
    """This machine lacks something that is needed; says what, and what to do about it."""
