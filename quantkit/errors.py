"""Errors a user can meet. Each states a fact and one remedy, and knows its exit code."""

from __future__ import annotations

from typing import ClassVar


class QuantkitError(Exception):
    """A fact with its numbers and names, and one thing to do about it.

    Args:
        message: what is wrong, naming the file, tensor or option.
        hint: the remedy, or "" when there is none.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(QuantkitError):
    """An argument, option, recipe or calibration source that cannot be used."""


class CheckpointError(QuantkitError):
    """A checkpoint that cannot be read, or that holds something it must not hold."""


class UnsupportedScheme(QuantkitError):
    """A bit width, group size or format that the model's shapes do not allow."""


class NumericalError(QuantkitError):
    """Arithmetic broke: a non-finite activation, a Gram matrix that no damping could factor."""


class Interrupted(QuantkitError):
    """The user stopped a run that can go on where it was."""

    exit_code: ClassVar[int] = 130


class ResourceError(QuantkitError):
    """This machine is too small: memory, disk or device. The same command may pass elsewhere."""

    exit_code: ClassVar[int] = 3
