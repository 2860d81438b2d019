"""The base of all errors that only the user can fix."""

from __future__ import annotations


class UserError(ValueError):
    """
    Something that only the user can fix. The command prints it without a traceback; other exceptions keep theirs.

    Args:
        *messages (`str`): one per problem. Each says what was given, what is allowed, and the fix.
        exit_code (`int`, *optional*, defaults to `2`): exit code of the command.
    """

    def __init__(self, *messages: str, exit_code: int = 2):
        super().__init__("\n".join(messages))
        self.messages = messages
        self.exit_code = exit_code
