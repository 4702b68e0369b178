"""The exception and the warning of SpecJAX."""


class SpecJAXError(ValueError):
    """Input that cannot be used: a checkpoint, an option, a prompt.

    The message is one line that names the offending input and states what is valid. The command
    line prints it and exits with code 2, without a traceback.
    """


class SpecJAXWarning(UserWarning):
    """Input that is used, but probably not as intended. The message is one line."""
