"""The one way in which a user's mistake ends: a sentence and a hint, exit status 2, never a traceback."""

from __future__ import annotations


class UserError(Exception):
    """Something that a person must put right.

    `message` says what is wrong, `hint` what to do; together they are one line on stderr.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message
