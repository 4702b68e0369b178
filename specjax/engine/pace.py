"""How often the decode loop returns to the host."""

from __future__ import annotations

SECONDS_PER_CALL = 0.25  # so that an interrupt is heeded well within a second
FIRST_ROUNDS = 8
STREAMING_ROUNDS = 4


class Pace:
    """Chooses the number of rounds of each call of the loop.

    The number never changes the result, nor what is compiled.

    Attributes:
      rounds: of the next call.
    """

    def __init__(self, is_streaming: bool, is_only_process: bool):
        """Starts with few rounds.

        Args:
          is_streaming: whether tokens are shown while they are generated; then rounds stay few.
          is_only_process: whether the number may follow measured times, which differ between
            processes.
        """
        self._is_fixed = is_streaming or not is_only_process
        self.rounds = STREAMING_ROUNDS if is_streaming else FIRST_ROUNDS

    def update(self, seconds: float) -> None:
        """Adapts the number of rounds to the time that the last call took."""
        if self._is_fixed:
            return
        fitting = int(self.rounds * SECONDS_PER_CALL / max(seconds, 1e-6))
        self.rounds = max(1, min(fitting, 2 * self.rounds))
