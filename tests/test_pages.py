"""Allocation of pages: each call alone, and random orders of calls against a slow reference."""

from __future__ import annotations

import dataclasses

import hypothesis
import numpy as np
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from specjax.engine.pages import PagePool
from specjax.errors import SpecJAXError

Z = 4


def cache_prefix(pool: PagePool, token_ids, salt: bytes = b"") -> list[int]:
    """Puts the full pages of a sequence into the prefix index, without references to them."""
    pages = pool.allocate(len(token_ids) // pool.page_size)
    pool.insert(token_ids, pages, salt)
    pool.release(pages)
    return pages


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (-1, 4)])
def test_sizes_must_be_positive(sizes):
    with pytest.raises(SpecJAXError, match="must be at least 1, got"):
        PagePool(*sizes)


def test_allocate_returns_all_pages_or_none():
    pool = PagePool(4, Z)
    assert pool.allocate(5) is None
    assert pool.allocate(0) == []
    assert sorted(pool.allocate(3)) == [0, 1, 2]
    assert pool.allocate(2) is None
    assert (pool.num_free, pool.num_cached, pool.num_referenced) == (1, 0, 3)
    assert pool.allocate(1) == [3]
    pool.check()


def test_a_failed_allocation_evicts_nothing():
    pool = PagePool(4, Z)
    cached = cache_prefix(pool, range(8))
    pool.allocate(1)
    assert pool.allocate(4) is None
    assert pool.match(range(8)) == cached


def test_a_prefix_is_found_up_to_its_last_full_page():
    pool = PagePool(8, Z)
    pages = pool.allocate(3)
    pool.insert(range(11), pages)
    pool.release(pages)
    assert pool.num_cached == 2, "the third page has 3 of 4 tokens"
    assert pool.match(range(11)) == pages[:2]
    assert pool.match([*range(7), 99]) == pages[:1]
    assert pool.match([99, *range(1, 8)]) == []
    pool.check()


@pytest.mark.parametrize("num_tokens, num_pages", [(8, 1), (9, 2), (12, 2), (13, 3)])
def test_the_last_token_of_a_prompt_is_pending(num_tokens, num_pages):
    """A prompt of n tokens reuses at most floor((n - 1) / Z) pages."""
    pool = PagePool(8, Z)
    cache_prefix(pool, range(16))
    prompt = list(range(num_tokens))
    assert len(pool.match(prompt[:-1])) == num_pages == (num_tokens - 1) // Z


def test_a_page_is_found_only_after_the_same_prefix():
    """Keys and values depend on all earlier tokens, too."""
    pool = PagePool(8, Z)
    cache_prefix(pool, [1] * 4 + [2] * 4)
    cache_prefix(pool, [3] * 4)
    assert len(pool.match([3] * 4 + [2] * 4)) == 1
    assert pool.match([2] * 4) == []


def test_salts_do_not_share():
    pool = PagePool(8, Z)
    pages = cache_prefix(pool, range(8), b"alice")
    assert pool.match(range(8), b"bob") == pool.match(range(8)) == []
    assert pool.match(range(8), b"alice") == pages


def test_a_shared_page_is_held_until_its_last_sequence_releases_it():
    pool = PagePool(2, Z)
    pages = cache_prefix(pool, range(8))
    assert pool.match(range(8)) == pool.match(range(8)) == pages
    pool.release(pages)
    assert pool.allocate(1) is None
    assert (pool.num_cached, pool.num_referenced) == (0, 2)
    pool.release(pages)
    assert (pool.num_cached, pool.num_referenced) == (2, 0)


def test_the_least_recently_used_prefix_is_evicted_first_and_its_tail_before_its_head():
    pool = PagePool(6, Z)
    old = cache_prefix(pool, [1] * 12)
    new = cache_prefix(pool, [2] * 12)
    pool.release(pool.match([1] * 12))  # now the old one is the most recently used
    taken = pool.allocate(2)
    assert set(taken) == {new[2], new[1]}
    assert pool.match([2] * 12) == new[:1]
    assert pool.match([1] * 12) == old
    pool.check()


def test_free_pages_are_taken_before_cached_ones():
    pool = PagePool(4, Z)
    pages = cache_prefix(pool, range(8))
    assert set(pool.allocate(2)).isdisjoint(pages)
    assert pool.match(range(8)) == pages


def test_the_first_page_of_a_prefix_wins():
    pool = PagePool(8, Z)
    first, second = pool.allocate(2), pool.allocate(3)
    pool.insert(range(8), first)
    pool.insert(range(12), second)
    assert pool.match(range(12)) == [*first, second[2]]
    pool.release([*first, second[2]])
    pool.release(second)
    assert pool.num_cached == 1, "the duplicates are free"
    pool.check()


def test_inserting_again_adds_the_new_pages():
    pool = PagePool(8, Z)
    pages = pool.allocate(3)
    for num_tokens in (4, 6, 8, 12):
        pool.insert(range(num_tokens), np.array(pages, np.int32))
        assert pool.match(range(12)) == pages[: num_tokens // Z]
    pool.check()


def test_hits_are_counted_in_tokens():
    pool = PagePool(8, Z)
    cache_prefix(pool, range(8))
    pool.match(range(11))
    pool.match(range(3))
    pool.match(range(11), is_retry=True)
    assert (pool.num_queried_tokens, pool.num_hit_tokens) == (14, 8)


def test_prefix_caching_can_be_off():
    pool = PagePool(4, Z, enable_prefix_caching=False)
    cache_prefix(pool, range(8))
    assert pool.match(range(8)) == []
    assert (pool.num_cached, pool.num_free, pool.num_queried_tokens) == (0, 4, 0)


def test_reset_forgets_prefixes_unless_pages_are_referenced():
    pool = PagePool(4, Z)
    cache_prefix(pool, range(8))
    held = pool.match(range(8))
    assert not pool.reset_prefix_cache()
    pool.release(held)
    assert pool.num_cached == 2
    assert pool.reset_prefix_cache()
    assert pool.match(range(8)) == []
    assert (pool.num_cached, pool.num_free) == (0, 4)
    pool.check()


def test_hashes_depend_on_the_seed_and_differ_between_pools_without_one():
    def hashes(seed):
        return list(PagePool(4, Z, seed=seed)._prefix_hashes(range(8), b""))

    assert hashes(1) == hashes(1)
    assert hashes(1) != hashes(2)
    assert hashes(None) != hashes(None)


def test_tokens_may_be_an_array():
    pool = PagePool(4, Z)
    pages = cache_prefix(pool, np.arange(8, dtype=np.int64))
    assert pool.match(range(8)) == pages


@pytest.mark.parametrize(
    "method, arguments, message",
    [
        ("allocate", [-1], "cannot allocate -1"),
        ("release", [[0, 2]], "page 2 has 0 references, 1 are needed"),
        ("release", [[0, 0]], "page 0 has 1 references, 2 are needed"),
        ("release", [[0, 4]], "no page 4 among 4"),
        ("release", [[0, -1]], "no page -1 among 4"),
        ("insert", [range(8), [0]], "8 tokens fill 2 pages, got 1"),
        ("insert", [range(8), [0, 2]], "page 2 has 0 references"),
        ("insert", [[9] * 8, [1, 0]], "page 0 is in the prefix index for other tokens"),
    ],
)
def test_misuse_raises_and_changes_nothing(method, arguments, message):
    pool = PagePool(4, Z)
    pool.insert(range(4), pool.allocate(2))
    with pytest.raises(ValueError, match=message) as raised:
        getattr(pool, method)(*arguments)
    assert raised.type is ValueError, "no SpecJAXError: a user's input did not cause it"
    pool.check()
    assert (pool.num_referenced, pool.num_free) == (2, 2)
    pool.release([0, 1])
    assert pool.num_cached == 1


def test_a_sequence_cannot_hold_a_page_twice():
    pool = PagePool(4, Z)
    [page] = cache_prefix(pool, range(4))
    pool.match(range(4))
    pool.match(range(4))
    with pytest.raises(ValueError, match="occurs twice"):
        pool.insert(range(8), [page, page])


def test_ten_thousand_sequences_leak_no_page():
    rng = np.random.default_rng(0)
    pool = PagePool(32, Z, seed=0)
    starts = [list(rng.integers(0, 50, 20)) for _ in range(6)]
    active, num_refused = [], 0
    for index in range(10_000):
        token_ids = [*starts[rng.integers(6)][: rng.integers(1, 21)], 100 + index]
        pages = pool.match(token_ids[:-1])
        more = pool.allocate(-(-len(token_ids) // Z) - len(pages))
        if more is None:
            num_refused += 1
            pool.release(pages)
        else:
            active.append((token_ids, pages + more))
        while len(active) > rng.integers(12):
            token_ids, pages = active.pop(rng.integers(len(active)))
            pool.insert(token_ids[: rng.integers(len(token_ids) + 1)], pages)
            pool.release(pages)
        if index % 100 == 0:
            pool.check()
    assert 0 < num_refused < 5000 and pool.num_hit_tokens > 0.3 * pool.num_queried_tokens
    for _, pages in active:
        pool.release(pages)
    pool.check()
    assert (pool.num_referenced, pool.num_free) == (0, 32)
    assert pool.reset_prefix_cache()
    assert sorted(pool.allocate(32)) == list(range(32))


@dataclasses.dataclass
class Known:
    """An entry of the reference's prefix index."""

    page: int
    last_release: int = 0


class Reference:
    """A pool that searches instead of hashing; a prefix is a salt and all tokens."""

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages, self.page_size = num_pages, page_size
        self.held = []  # one entry per reference
        self.index: dict[tuple[bytes, tuple[int, ...]], Known] = {}
        self.time = 0

    def prefixes(self, token_ids, salt):
        for end in range(self.page_size, len(token_ids) + 1, self.page_size):
            yield salt, tuple(token_ids[:end])

    def cached(self) -> list[tuple[bytes, tuple[int, ...]]]:
        """Returns the prefixes in the order of eviction: in one release, the longest goes first."""
        unheld = [prefix for prefix, known in self.index.items() if known.page not in self.held]
        return sorted(unheld, key=lambda prefix: (self.index[prefix].last_release, -len(prefix[1])))

    def free(self) -> set[int]:
        known = {known.page for known in self.index.values()}
        return set(range(self.num_pages)) - set(self.held) - known

    def check_allocated(self, count: int, pages: list[int] | None):
        free, cached = self.free(), self.cached()
        if count > len(free) + len(cached):
            assert pages is None
            return
        assert len(pages) == len(set(pages)) == count
        evicted = cached[: max(0, count - len(free))]
        assert set(pages) <= free | {self.index[prefix].page for prefix in evicted}
        for prefix in evicted:
            del self.index[prefix]
        self.held += pages

    def release(self, pages):
        self.time += 1
        for page in pages:
            self.held.remove(page)
        for known in self.index.values():
            if known.page in pages:
                known.last_release = self.time

    def match(self, token_ids, salt) -> list[int]:
        pages = []
        for prefix in self.prefixes(token_ids, salt):
            if prefix not in self.index:
                break
            pages.append(self.index[prefix].page)
        self.held += pages
        return pages

    def insert(self, token_ids, pages, salt):
        for prefix, page in zip(self.prefixes(token_ids, salt), pages, strict=False):
            self.index.setdefault(prefix, Known(page))


@dataclasses.dataclass
class Sequence:
    token_ids: list[int]
    salt: bytes
    pages: list[int]


# Prompts are prefixes of these texts and the pool is small, so that most runs share and evict
# prefixes.
TEXTS = [(b"", [0] * 8), (b"", [0, 0, 1, 1, 1, 1, 1, 1]), (b"", [1] * 8), (b"salt", [0] * 8)]


class AnyOrderOfCalls(stateful.RuleBasedStateMachine):
    """Sequences start, grow, enter the prefix index and end, as in an engine."""

    @stateful.initialize(num_pages=st.integers(4, 9), page_size=st.integers(1, 2))
    def make(self, num_pages, page_size):
        self.pool = PagePool(num_pages, page_size)
        self.reference = Reference(num_pages, page_size)
        self.sequences: list[Sequence] = []

    def allocate_for(self, num_tokens, num_pages) -> list[int] | None:
        count = -(-num_tokens // self.pool.page_size) - num_pages
        pages = self.pool.allocate(count)
        self.reference.check_allocated(count, pages)
        return pages

    def insert_into_both(self, sequence, num_tokens):
        call = sequence.token_ids[:num_tokens], sequence.pages, sequence.salt
        self.pool.insert(*call)
        self.reference.insert(*call)

    def release_from_both(self, pages):
        self.pool.release(pages)
        self.reference.release(pages)

    @stateful.rule(text=st.sampled_from(TEXTS), num_tokens=st.integers(1, 8), stays=st.booleans())
    def start(self, text, num_tokens, stays):
        salt, token_ids = text[0], text[1][:num_tokens]
        pages = self.pool.match(token_ids[:-1], salt)
        assert pages == self.reference.match(token_ids[:-1], salt)
        more = self.allocate_for(num_tokens, len(pages))
        if more is None:
            self.release_from_both(pages)
            return
        self.sequences.append(Sequence(token_ids, salt, pages + more))
        if not stays:
            self.end(-1)

    @stateful.precondition(lambda self: self.sequences)
    @stateful.rule(index=st.integers(0, 7), new=st.lists(st.integers(0, 1), max_size=4))
    def grow(self, index, new):
        sequence = self.sequences[index % len(self.sequences)]
        num_tokens = len(sequence.token_ids) + len(new)
        more = self.allocate_for(num_tokens, len(sequence.pages))
        if more is not None:
            sequence.token_ids = sequence.token_ids + new
            sequence.pages += more

    @stateful.precondition(lambda self: self.sequences)
    @stateful.rule(index=st.integers(0, 7), num_tokens=st.integers(0, 12))
    def insert(self, index, num_tokens):
        """As after a chunk of a prefill."""
        self.insert_into_both(self.sequences[index % len(self.sequences)], num_tokens)

    @stateful.precondition(lambda self: self.sequences)
    @stateful.rule(index=st.integers(0, 7))
    def end(self, index):
        sequence = self.sequences.pop(index % len(self.sequences))
        self.insert_into_both(sequence, len(sequence.token_ids) - 1)
        self.release_from_both(sequence.pages)

    @stateful.rule(count=st.integers(0, 4))
    def pass_through(self, count):
        """Pages that never enter the prefix index, but push others out of it."""
        pages = self.allocate_for(count * self.pool.page_size, 0)
        if pages is not None:
            self.release_from_both(pages)

    @stateful.invariant()
    def agrees(self):
        self.pool.check()
        assert self.pool.num_cached == len(self.reference.cached())
        assert self.pool.num_free == self.pool.num_cached + len(self.reference.free())
        assert self.pool.num_referenced == len(set(self.reference.held))

    def teardown(self):
        assert self.pool.reset_prefix_cache() == (not self.sequences)
        while self.sequences:
            self.end(0)
            self.agrees()
        assert self.pool.num_free == self.pool.num_pages
        assert self.pool.reset_prefix_cache()
        assert self.pool.num_cached == 0


# A failure reports the calls that led to it, at most 40. `phases` skips the search for a shorter
# list, which takes minutes.
AnyOrderOfCalls.TestCase.settings = hypothesis.settings(
    max_examples=100,
    stateful_step_count=40,
    phases=[hypothesis.Phase.generate],
    deadline=None,
    derandomize=True,
    database=None,
)
TestAnyOrderOfCalls = AnyOrderOfCalls.TestCase
