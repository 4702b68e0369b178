"""Allocation of pages on the host: free list, reference counts and prefix index.

All pools of an engine (keys and values of the target, of a draft model and of a head, and features)
have P pages of Z positions, and one block table per sequence serves them all. A `PagePool` decides
which page belongs to whom; it never sees what a page contains. It runs between calls of the device
program, in the thread of the engine. Every data-parallel replica has one of its own.

A page is in one of three states:

  referenced  held by one or more sequences
  cached      held by nobody, in the prefix index; `match` may return it, `allocate` may evict it
  free        held by nobody, not in the prefix index

An admission is `match`, then `allocate` for the rest. `insert` makes computed pages available to
other sequences, and `release` gives all pages of a sequence back. Only pages that one sequence
holds are written: new tokens come behind the shared prefix.
"""

from __future__ import annotations

import collections
import hashlib
import secrets
from collections.abc import Iterator, Sequence

import numpy as np

from specjax.errors import SpecJAXError


class PagePool:
    """P pages of Z positions, of which all are free at first.

    Attributes:
      num_pages: P.
      page_size: Z, positions per page.
      enable_prefix_caching: whether there is a prefix index.
      num_queried_tokens: tokens that `match` was asked for, over the life of the pool.
      num_hit_tokens: tokens in the pages that it returned.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        enable_prefix_caching: bool = True,
        seed: int | None = None,
    ):
        """Makes a pool.

        Args:
          num_pages: P.
          page_size: Z, positions per page.
          enable_prefix_caching: if False, `match` finds nothing and `insert` registers nothing.
          seed: makes the hashes of the prefix index reproducible. By default they depend on a
            random secret of this pool, so that nobody outside can compute them, neither to search
            for prompts that collide (one would be answered from the KV of the other) nor to
            recognize a prompt by its hash. No secret hides that a hit is faster than a miss, which
            tells a client what others asked: clients to be kept apart need different salts.

        Raises:
          SpecJAXError: for a size that is not positive.
        """
        for name, value in dict(num_pages=num_pages, page_size=page_size).items():
            if value < 1:
                raise SpecJAXError(f"{name} must be at least 1, got {value}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.enable_prefix_caching = enable_prefix_caching
        self._secret = secrets.token_bytes(32) if seed is None else _sha256(str(seed).encode())
        self._num_holders = [0] * num_pages
        self._free = list(range(num_pages))[::-1]  # a stack: page 0 is taken first
        self._cached = collections.OrderedDict()  # pages as keys, least recently used first
        self._page_of = {}  # the prefix index: hash of a prefix -> its last page
        self._hash_of = {}  # the same, from page to hash

    @property
    def num_free(self) -> int:
        """Number of pages that `allocate` can give: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Number of pages that are in the prefix index and held by nobody."""
        return len(self._cached)

    @property
    def num_referenced(self) -> int:
        """Number of pages that a sequence holds; a shared page counts once."""
        return self.num_pages - self.num_free

    def allocate(self, count: int) -> list[int] | None:
        """Returns `count` pages with one reference each, or None if fewer are free or cached.

        Free pages go first, then the least recently used cached ones, which leave the prefix index.
        With None, nothing changes.

        Raises:
          ValueError: for a negative count.
        """
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        if count > self.num_free:
            return None
        while len(self._free) < count:
            page, _ = self._cached.popitem(last=False)
            del self._page_of[self._hash_of.pop(page)]
            self._free.append(page)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._num_holders[page] = 1
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Gives up one reference to each of `pages`, pages of one sequence in order.

        Pages without further references become cached if they are in the prefix index, else free.

        Raises:
          ValueError: for a page that nobody holds; nothing is released then.
        """
        pages = self._held(pages)
        # The last page is the first to be evicted: a prefix is found from its start, so a page is
        # useless without those before it.
        for page in reversed(pages):
            self._num_holders[page] -= 1
            if self._num_holders[page] == 0:
                if page in self._hash_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def match(
        self, token_ids: Sequence[int], salt: bytes = b"", *, is_retry: bool = False
    ) -> list[int]:
        """Returns the pages of the longest known prefix, and takes a reference to each.

        Args:
          token_ids: the tokens whose KV the caller needs: the prompt *without its last token*. That
            one is pending, and the next round computes its KV. A prompt of n tokens therefore
            reuses at most floor((n - 1) / Z) pages, and needs no prefill if they hold n - 1 tokens.
          salt: only pages inserted with the same salt match.
          is_retry: whether this prompt was counted before, and then had to wait for pages. Its
            tokens are not counted again.

        Returns:
          Full pages only: they hold the first `Z * len(pages)` tokens.
        """
        pages = []
        if not self.enable_prefix_caching:
            return pages
        for prefix_hash in self._prefix_hashes(token_ids, salt):
            if prefix_hash not in self._page_of:
                break
            pages.append(self._page_of[prefix_hash])
        for page in pages:
            self._num_holders[page] += 1
            self._cached.pop(page, None)
        if not is_retry:
            self.num_queried_tokens += len(token_ids)
            self.num_hit_tokens += self.page_size * len(pages)
        return pages

    def insert(self, token_ids: Sequence[int], pages: Sequence[int], salt: bytes = b"") -> None:
        """Adds the full pages of a sequence to the prefix index.

        Where another page is known for the same prefix (two sequences computed it side by side),
        that one stays in the index, and the page here becomes free when it is released. Pages
        behind it are found only while that other page is in the index.

        Args:
          token_ids: the tokens whose KV is complete in every pool; the pending token is not.
          pages: the pages of the sequence in order, which the caller holds. Pages that `token_ids`
            do not fill are ignored.
          salt: see `match`.

        Raises:
          ValueError: for a page that nobody holds, that occurs twice, or that is in the index for
            other tokens, and for too few pages. Nothing is inserted then.
        """
        if not self.enable_prefix_caching:
            return
        num_full = len(token_ids) // self.page_size
        if len(pages) < num_full:
            raise ValueError(f"{len(token_ids)} tokens fill {num_full} pages, got {len(pages)}")
        pages = self._held(pages[:num_full])
        if len(set(pages)) < num_full:
            raise ValueError(f"a page occurs twice in {pages}")
        prefix_hashes = list(self._prefix_hashes(token_ids, salt))
        for page, prefix_hash in zip(pages, prefix_hashes, strict=True):
            if self._hash_of.get(page, prefix_hash) != prefix_hash:
                raise ValueError(f"page {page} is in the prefix index for other tokens")
        for page, prefix_hash in zip(pages, prefix_hashes, strict=True):
            if prefix_hash not in self._page_of:
                self._page_of[prefix_hash] = page
                self._hash_of[page] = prefix_hash

    def reset_prefix_cache(self) -> bool:
        """Forgets all prefixes, as new weights require, and returns whether it did.

        It does nothing while a page is referenced: that sequence would insert KV of old weights.
        """
        if self.num_referenced:
            return False
        self.forget()
        return True

    def forget(self) -> None:
        """Makes all pages free, also those that sequences hold, and forgets all prefixes."""
        self._num_holders = [0] * self.num_pages
        self._free = list(range(self.num_pages))[::-1]
        self._cached.clear()
        self._page_of.clear()
        self._hash_of.clear()

    def check(self) -> None:
        """Asserts what holds after every call: each page has one state, and the index is sound."""
        referenced = [page for page in range(self.num_pages) if self._num_holders[page] > 0]
        assert min(self._num_holders) >= 0, "a reference count is negative"
        pages = sorted([*self._free, *self._cached, *referenced])
        assert pages == list(range(self.num_pages)), "a page is lost, or has two states"
        assert len(referenced) == self.num_referenced
        assert self._cached.keys() <= self._hash_of.keys(), "a cached page is not in the index"
        assert self._hash_of.keys().isdisjoint(self._free), "a free page is in the index"
        pages_by_hash = {prefix_hash: page for page, prefix_hash in self._hash_of.items()}
        assert self._page_of == pages_by_hash, "the two directions of the index differ"

    def _held(self, pages: Sequence[int]) -> list[int]:
        """Returns `pages`; raises ValueError unless each has as many references as it occurs."""
        pages = [int(page) for page in pages]
        for page, times in collections.Counter(pages).items():
            if not 0 <= page < self.num_pages:
                raise ValueError(f"there is no page {page} among {self.num_pages}")
            if times > self._num_holders[page]:
                held = self._num_holders[page]
                raise ValueError(f"page {page} has {held} references, {times} are needed")
        return pages

    def _prefix_hashes(self, token_ids: Sequence[int], salt: bytes) -> Iterator[bytes]:
        """Yields a hash per full page, of all tokens up to its end: sha256(previous, tokens)."""
        tokens = np.asarray(token_ids, np.int32)
        prefix_hash = _sha256(self._secret + salt)
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            page_tokens = tokens[start : start + self.page_size]
            prefix_hash = _sha256(prefix_hash + page_tokens.tobytes())
            yield prefix_hash


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
