"""Which implementation of an operation runs."""

IMPLEMENTATIONS = ("xla",)


def choose(implementation: str | None) -> str:
    """The implementation to run: `implementation` itself, or the best one for this machine where it is None.

    Raises:
      ValueError: a name that does not exist. An explicit wish is never replaced by something else.
    """
    if implementation is None:
        return "xla"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} does not exist; there is: {', '.join(IMPLEMENTATIONS)}")
    return implementation
