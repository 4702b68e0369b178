"""The schedule: which sequences run, on which rows and pages. Host work between device calls.

A sequence waits, is read (`prefill`), is decoded (`rounds`), and is done. A `Scheduler` decides
what the next calls do. It knows token ids and lengths, and nothing of models or arrays.

  - Sequences are admitted in the order of their arrival, while rows and pages last. Pages of a
    known prefix are shared (`pages.PagePool`).
  - Prompts are read in chunks. Rounds of the rows that decode run in between.
  - Before rounds, each row gets the pages that it may need. Where pages are short, rows get pages
    for fewer rounds, and pause on the device; then the youngest sequence is preempted: its pages
    go, and it waits again, with what it has generated.

A call may be in flight while the next one is planned: the host does not know yet what it emitted,
and counts on the most that it may have.
"""

from __future__ import annotations

import bisect
import dataclasses
from typing import Any

from specjax.engine.pages import PagePool
from specjax.errors import SpecJAXError
from specjax.kv_cache import pages_for


@dataclasses.dataclass(eq=False)
class Sequence:
    """One completion of a request, from its arrival to its end.

    Attributes:
      token_ids: the prompt and the tokens that the host knows of the output.
      prompt_length: tokens of the prompt.
      max_length: the largest length, prompt and output.
      order: sequences with smaller numbers go first.
      salt: see `PagePool.match`.
      reuses_prefix: whether its prompt may begin with pages of another sequence.
      is_scored: whether log-probabilities of its prompt are asked for. Such prompts are read in
        small chunks and in calls of their own.
      owner: of the scheduler's caller.
      replica: number of the data-parallel replica that it runs on; None while it waits.
      row: its row there.
      pages: its pages, in order.
      num_found: tokens whose pages were found at its last admission.
      num_read: tokens that were read, or whose reading was planned.
      num_complete: how many of the first positions are complete in all pools.
      num_in_flight: tokens that calls in flight emit at most.
      num_sure: tokens that calls in flight emit at least.
      num_cached: prompt tokens whose pages were found at the first admission.
      num_preemptions: how often it was preempted.
      is_done: nothing of it runs any more.
    """

    token_ids: list[int]
    prompt_length: int
    max_length: int
    order: int = 0
    salt: bytes = b""
    reuses_prefix: bool = True
    is_scored: bool = False
    owner: Any = None
    replica: int | None = None
    row: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    num_found: int = 0
    num_read: int = 0
    num_complete: int = 0
    num_in_flight: int = 0
    num_sure: int = 0
    num_cached: int | None = None
    num_preemptions: int = 0
    is_done: bool = False

    @property
    def length(self) -> int:
        """Committed tokens that the host knows."""
        return len(self.token_ids)

    @property
    def num_to_read(self) -> int:
        """Tokens that are left to `prefill`: all before the pending one."""
        return max(0, self.length - 1 - self.num_read)

    def give_up_row(self) -> None:
        """Forgets the row and the pages, and what was read into them."""
        self.replica = self.row = None
        self.pages, self.num_read, self.num_complete = [], 0, 0


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens of a sequence that a call of `prefill` reads."""

    sequence: Sequence
    start: int
    count: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the device does next, in this order.

    Attributes:
      admitted: sequences that were given a row.
      prefill: calls of `prefill`: the chunks of each.
      decoding: sequences of the call of `rounds`; empty for no call.
      max_rounds: most rounds of that call.
      until_a_row_ends: whether it ends with the first sequence that is done.
    """

    admitted: list[Sequence]
    prefill: list[list[Chunk]]
    decoding: list[Sequence]
    max_rounds: int
    until_a_row_ends: bool


class Replica:
    """Rows and pages of one data-parallel replica."""

    def __init__(self, num_rows: int, pool: PagePool):
        self.pool = pool
        self._num_rows = num_rows
        self.reset()

    def reset(self) -> None:
        """Makes all rows and pages free."""
        self.free_rows = list(range(self._num_rows))[::-1]
        self.running: list[Sequence] = []  # in the order of their arrival
        self.pool.forget()


MAX_PASSED = 256  # sequences that wait for a prefix, and that others may pass
SCORED_CHUNK = 64  # tokens of a prompt that are read together with their logits


class Scheduler:
    """See the module. All methods run in the thread of the engine."""

    def __init__(
        self,
        replicas: list[Replica],
        *,
        num_drafts: int,
        chunk_sizes: tuple[int, ...],
        chunk_overhead: int = 0,
        chunk_rows: int = 1,
        prefill_budget: int = 256,
    ):
        """Makes a scheduler.

        Args:
          replicas: with empty pools of pages.
          num_drafts: M, drafts of a round.
          chunk_sizes: the sizes that chunks of a prompt may have, in rising order.
          chunk_overhead: what a chunk costs, whatever its size, in the cost of a token.
          chunk_rows: chunks of a replica in a call of `prefill`.
          prefill_budget: tokens of prompts that a replica reads before rounds run again.
        """
        self.replicas = replicas
        self.waiting: list[Sequence] = []
        self.num_preemptions = 0
        self._num_drafts = num_drafts
        self._first_chunks = first_chunks(chunk_sizes, chunk_overhead)
        self._chunk_rows = chunk_rows
        self._prefill_budget = prefill_budget

    # --- Arrival and end --------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Sequences that have a row."""
        return sum(len(replica.running) for replica in self.replicas)

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence, which `check_fits` accepts, behind those of smaller `order`."""
        bisect.insort(self.waiting, sequence, key=_order)

    def check_fits(self, prompt_length: int, max_length: int) -> None:
        """Checks that a sequence can run if it is alone.

        Raises:
          SpecJAXError: if the cache has too few pages.
        """
        pool = self.replicas[0].pool
        num_needed = pages_for(max_length - 1 + self._num_drafts, pool.page_size)
        if num_needed > pool.num_pages:
            raise SpecJAXError(
                f"a prompt of {prompt_length} tokens with an output of up to "
                f"{max_length - prompt_length} needs {num_needed} pages of {pool.page_size} "
                f"positions, but the cache has {pool.num_pages}; shorten them, or give the cache "
                "more memory"
            )

    def end(self, sequence: Sequence) -> None:
        """Takes a sequence out, whether it waits or runs. Its pages remain in the prefix index."""
        sequence.is_done = True
        if sequence.row is None:
            self.waiting.remove(sequence)
        else:
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Takes the row and the pages of a sequence."""
        replica = self.replicas[sequence.replica]
        num_complete = min(sequence.num_complete, sequence.length - 1)
        complete_ids = sequence.token_ids[:num_complete]
        replica.pool.insert(complete_ids, sequence.pages, sequence.salt)
        replica.pool.release(sequence.pages)
        replica.free_rows.append(sequence.row)
        replica.running.remove(sequence)
        sequence.give_up_row()

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        bisect.insort(self.waiting, sequence, key=_order)

    def reset(self, sequences: list[Sequence]) -> None:
        """Lets all sequences wait, and takes the content of all pages for lost.

        Args:
          sequences: those that are not done.
        """
        for replica in self.replicas:
            replica.reset()
        for sequence in sequences:
            sequence.give_up_row()
            sequence.num_in_flight = sequence.num_sure = 0
        self.waiting = sorted(sequences, key=_order)

    # --- Planning ---------------------------------------------------------------------------------

    def plan(self, max_rounds: int) -> Plan | None:
        """Decides what the device does next.

        Args:
          max_rounds: most rounds of a call, for what the clients accept as delay.

        Returns:
          The plan; None if there is nothing to do before the report of a call in flight is read.
        """
        for replica in self.replicas:
            if not self._secure_pages(replica, max_rounds):
                return None
        admitted, prefill = [], []
        budgets = [self._prefill_budget] * len(self.replicas)
        while True:
            new_rows, new_calls = self._admit(), self._chunks(budgets)
            if not new_rows and not new_calls:
                break
            # Once more: a prefix that somebody waits for may be read by now.
            admitted += new_rows
            prefill += new_calls
        decoding = [row for replica in self.replicas for row in self._ready(replica)]
        if not (admitted or prefill or decoding):
            return None
        is_reading = any(sequence.num_to_read for sequence in self._running())
        rounds = 1 if is_reading else max_rounds
        until_a_row_ends = bool(self.waiting)
        for sequence in decoding:
            self._give_pages(sequence, rounds)
            sequence.num_in_flight += rounds * (self._num_drafts + 1)
            sequence.num_sure += 0 if until_a_row_ends else rounds
        return Plan(admitted, prefill, decoding, rounds, until_a_row_ends)

    def _running(self) -> list[Sequence]:
        return [sequence for replica in self.replicas for sequence in replica.running]

    def _secure_pages(self, replica: Replica, max_rounds: int) -> bool:
        """Gives the rows that decode pages for one round at least; preempts where pages are short.

        Returns False if a report must be read first: what calls in flight emit is not known.
        """
        index = 0
        while index < len(replica.running):
            sequence = replica.running[index]
            if sequence.num_to_read or self._give_pages(sequence, max_rounds):
                index += 1
                continue
            if any(other.num_in_flight for other in replica.running):
                return False
            self._preempt(replica.running[-1])
        return True

    def _give_pages(self, sequence: Sequence, max_rounds: int) -> bool:
        """Gives a row pages for up to `max_rounds`; returns whether it has them for one."""
        pool = self.replicas[sequence.replica].pool
        last_length = sequence.max_length - 1  # of a row that runs another round
        length = min(sequence.length + sequence.num_in_flight, last_length)
        for rounds in (max_rounds, 1):
            length_then = min(length + (rounds - 1) * (self._num_drafts + 1), last_length)
            num_needed = pages_for(length_then + self._num_drafts, pool.page_size)
            new_pages = pool.allocate(max(0, num_needed - len(sequence.pages)))
            if new_pages is not None:
                sequence.pages += new_pages
                return True
        return False

    def _admit(self) -> list[Sequence]:
        """Gives rows and pages to the sequences that wait, in their order.

        One whose next page is being read by another sequence waits for it, and lets others pass.
        """
        admitted = []
        index = 0
        while index < min(len(self.waiting), MAX_PASSED):
            open_replicas = [replica for replica in self.replicas if replica.free_rows]
            if not open_replicas:
                break
            replica = min(open_replicas, key=lambda replica: len(replica.running))
            sequence = self.waiting[index]
            if _is_read_now(sequence, replica):
                index += 1
                continue
            pages = self._pages_to_begin(replica, sequence)
            if pages is None:
                break
            self.waiting.pop(index)
            sequence.replica, sequence.row = self.replicas.index(replica), replica.free_rows.pop()
            sequence.pages = pages
            bisect.insort(replica.running, sequence, key=_order)
            admitted.append(sequence)
        return admitted

    def _pages_to_begin(self, replica: Replica, sequence: Sequence) -> list[int] | None:
        """Returns the pages that a sequence needs for its first round; None if they are short."""
        pool = replica.pool
        is_retry = sequence.num_cached is not None
        pages = []
        if sequence.reuses_prefix:
            pages = pool.match(sequence.token_ids[:-1], sequence.salt, is_retry=is_retry)
        sequence.num_found = len(pages) * pool.page_size
        if not is_retry:
            sequence.num_cached = sequence.num_found
        count = pages_for(sequence.length + self._num_drafts, pool.page_size) - len(pages)
        # A page for each row that runs: without them a sequence would soon be preempted again.
        has_room = count + len(replica.running) <= pool.num_free or not replica.running
        new_pages = pool.allocate(count) if has_room else None
        if new_pages is None:
            pool.release(pages)
            return None
        sequence.num_read = sequence.num_complete = sequence.num_found
        return pages + new_pages

    def _chunks(self, budgets: list[int]) -> list[list[Chunk]]:
        """Plans the calls of `prefill`. Pages of prompts that are complete then can be shared.

        Args:
          budgets: how many tokens each replica may still read. They are reduced.
        """
        calls: list[list[Chunk]] = []
        for number, replica in enumerate(self.replicas):
            num_chunks = [0] * len(calls)  # of this replica, in each call
            for sequence in replica.running:
                index = 0  # chunks of a sequence are read one after the other
                while sequence.num_to_read and budgets[number] > 0:
                    while index < len(calls) and not (
                        num_chunks[index] < self._chunk_rows
                        and calls[index][0].sequence.is_scored == sequence.is_scored
                    ):
                        index += 1
                    if index == len(calls):
                        calls.append([])
                        num_chunks.append(0)
                    chunk = self._next_chunk(sequence)
                    calls[index].append(chunk)
                    num_chunks[index] += 1
                    budgets[number] -= chunk.count
                    index += 1
        return calls

    def _next_chunk(self, sequence: Sequence) -> Chunk:
        start = sequence.num_read
        count = min(sequence.num_to_read, self._first_chunk(sequence.num_to_read))
        if sequence.is_scored:
            count = min(count, SCORED_CHUNK)
        sequence.num_read = sequence.num_complete = start + count
        if not sequence.num_to_read:
            pool = self.replicas[sequence.replica].pool
            pool.insert(sequence.token_ids[: sequence.num_read], sequence.pages, sequence.salt)
        return Chunk(sequence, start, count)

    def _first_chunk(self, num_tokens: int) -> int:
        return self._first_chunks[min(num_tokens, len(self._first_chunks) - 1)]

    def _ready(self, replica: Replica) -> list[Sequence]:
        """Returns the rows of a replica that decode, but those that calls in flight surely end."""
        rows = []
        for sequence in replica.running:
            surely_ends = sequence.length + sequence.num_sure >= sequence.max_length
            if not sequence.num_to_read and not surely_ends:
                rows.append(sequence)
        return rows

    def observe(
        self, sequence: Sequence, plan: Plan, new_ids: list[int], num_complete: int
    ) -> None:
        """Takes in what the rounds of a plan did with a sequence.

        Args:
          sequence: one of those that decode in the plan.
          plan: the plan.
          new_ids: the tokens that it emitted.
          num_complete: how many of the first positions are complete in all pools.
        """
        sequence.num_in_flight -= plan.max_rounds * (self._num_drafts + 1)
        sequence.num_sure -= 0 if plan.until_a_row_ends else plan.max_rounds
        sequence.token_ids += new_ids
        sequence.num_read = sequence.length - 1
        sequence.num_complete = num_complete


def first_chunks(chunk_sizes: tuple[int, ...], overhead: int) -> list[int]:
    """Returns how large the first chunk should be for each number of tokens.

    A chunk costs its size, which the tokens need not fill, and the overhead. The last entry stands
    for all larger numbers.
    """
    largest = chunk_sizes[-1]
    costs, firsts = [0], [0]
    for num_tokens in range(1, largest + 1):
        choices = []
        for size in chunk_sizes:
            cost = size + overhead + costs[max(0, num_tokens - size)]
            choices.append((cost, -size))
        cost, negative_size = min(choices)
        costs.append(cost)
        firsts.append(-negative_size)
    return firsts


def _order(sequence: Sequence) -> int:
    return sequence.order


def _is_read_now(sequence: Sequence, replica: Replica) -> bool:
    """Returns whether a sequence of the replica reads pages that this one would need as well."""
    if not (sequence.reuses_prefix and replica.pool.enable_prefix_caching):
        return False
    page_size = replica.pool.page_size
    for other in replica.running:
        num_common = min(sequence.length, other.length) - 1
        num_common -= num_common % page_size
        if (
            other.num_to_read
            and num_common > other.num_found
            and sequence.salt == other.salt
            and sequence.token_ids[: other.num_found + page_size]
            == other.token_ids[: other.num_found + page_size]
        ):
            return True
    return False
