"""The one exception that SpecJAX raises for input it cannot use."""


class SpecJAXError(ValueError):
    """Input that cannot be used: a checkpoint, an option, a prompt.

    The message is one line that names the offending input and states what is valid. The command
    line prints it and exits with code 2, without a traceback.
    """
