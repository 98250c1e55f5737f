# SPDX-License-Identifier: Apache-2.0
"""The whole family of errors; each message is one line for the operator.

Foreign errors become one of these at the door where they arise (``raise ... from``).
"""


class EbpflbError(Exception):
    """Something the operator can act on: shown as one line, without a traceback."""


class InvalidObject(EbpflbError):
    """An API object that cannot be meant: which field, and what is wrong with it."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class ConfigurationError(EbpflbError):
    """A configuration that cannot be meant: a line for each field, with its path."""


class ClusterError(EbpflbError):
    """What the cluster says cannot be read: configuration, authentication, a missing folder."""


class CompileError(EbpflbError):
    """The compiler refused bpf/, or is not there; carries the compiler's own text."""


class VerifierError(EbpflbError):
    """The kernel refused a program; carries its name and the last lines of the log."""


class KernelError(EbpflbError):
    """The kernel refused a bpf(2) call: which call, on what, and the errno's meaning."""

    def __init__(self, what: str, errno: int, reason: str) -> None:
        super().__init__(f"{what}: {reason}")
        self.errno = errno


class NodeError(EbpflbError):
    """This machine lacks something that the datapath needs, and what to do about it."""
