"""The one exception that SpecJAX raises for input it cannot use."""


class SpecJAXError(ValueError):
    """Input that cannot be used: a checkpoint, an option, a prompt.

    The message is one line that names the offending thing and says what would be right. The command
    line prints it and exits with code 2; it never shows a traceback for it.
    """
