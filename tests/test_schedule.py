"""The schedule and the budget of an engine, without a device."""

from __future__ import annotations

import numpy as np
import pytest

from specjax.config import Runtime
from specjax.decode import DecodeConfig
from specjax.engine import budget, generate, runner
from specjax.engine.pages import PagePool
from specjax.engine.schedule import Replica, Scheduler, Sequence, first_chunks
from specjax.errors import SpecJAXError, SpecJAXWarning
from support.models import tiny

CONFIG = tiny(1).config


def make_scheduler(num_pages=20, num_rows=3, **options) -> Scheduler:
    replica = Replica(num_rows, PagePool(num_pages, 4, seed=0))
    defaults = dict(num_drafts=2, chunk_sizes=(4, 8), prefill_budget=8)
    return Scheduler([replica], **{**defaults, **options})


def sequence(prompt_length: int, max_new=8, order=0, **options) -> Sequence:
    ids = [order + 100 * i for i in range(prompt_length)]
    return Sequence(ids, prompt_length, prompt_length + max_new, order=order, **options)


def planned(plan) -> list[tuple[int, int, int]]:
    """The chunks of a plan: order of the sequence, start and count."""
    chunks = [chunk for call in plan.prefill for chunk in call]
    return [(chunk.sequence.order, chunk.start, chunk.count) for chunk in chunks]


def test_chunks_cost_least():
    firsts = first_chunks((16, 64, 256), overhead=16)
    found = {n: firsts[n] for n in (1, 16, 17, 40, 64, 65, 90, 130, 256)}
    assert found == {
        1: 16,
        16: 16,
        17: 16,  # 2 x (16 + 16) are less than 64 + 16
        40: 64,
        64: 64,
        65: 64,
        90: 64,
        130: 64,
        256: 256,
    }
    assert first_chunks((16, 64, 256), overhead=10**6)[65] == 256


def test_prompts_are_read_in_order_and_one_round_runs_in_between():
    scheduler = make_scheduler()
    for order, length in enumerate((13, 3)):
        scheduler.add(sequence(length, order=order))
    first = scheduler.plan(16)
    assert planned(first) == [(0, 0, 8)]
    assert (len(first.admitted), first.decoding, first.max_rounds) == (2, [], 1)
    second = scheduler.plan(16)
    assert planned(second) == [(0, 8, 4), (1, 0, 2)]
    assert [s.order for s in second.decoding] == [0, 1] and second.max_rounds == 16
    assert not second.until_a_row_ends


def test_a_call_ends_with_a_row_where_another_waits():
    scheduler = make_scheduler(num_rows=1)
    for order in range(2):
        scheduler.add(sequence(1, order=order))
    plan = scheduler.plan(16)
    assert [s.order for s in plan.decoding] == [0] and plan.until_a_row_ends


def test_rows_that_surely_end_in_a_call_are_in_no_further_one():
    scheduler = make_scheduler()
    scheduler.add(sequence(1, max_new=4))
    scheduler.add(sequence(1, max_new=8, order=1))
    assert len(scheduler.plan(4).decoding) == 2
    assert [s.order for s in scheduler.plan(4).decoding] == [1]
    assert scheduler.plan(4) is None


def test_the_youngest_is_preempted_and_goes_on_where_it_was():
    scheduler = make_scheduler(num_pages=6)
    old, young = sequence(3, max_new=14), sequence(3, max_new=14, order=1)
    for each in (old, young):
        scheduler.add(each)
    plan = scheduler.plan(1)
    while young.row is not None:
        for each in plan.decoding:
            scheduler.observe(each, plan, [7], each.length)
        plan = scheduler.plan(1)
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    assert scheduler.waiting == [young] and young.length > 3 and not young.pages
    scheduler.end(old)
    (back,) = scheduler.plan(1).admitted
    assert back is young and young.num_found == 8  # two pages were complete, and still are there
    scheduler.end(young)
    pool = scheduler.replicas[0].pool
    pool.check()
    assert pool.num_referenced == 0


def test_a_prefix_that_is_being_read_is_waited_for():
    scheduler = make_scheduler(num_rows=4, prefill_budget=8)
    prompt = list(range(1, 18))
    scheduler.add(Sequence(list(prompt), 17, 20, order=0))
    scheduler.add(Sequence([*prompt[:12], 30, 31], 14, 18, order=1))
    scheduler.add(Sequence(list(prompt), 17, 20, order=2, salt=b"other"))
    scheduler.add(sequence(9, order=3))  # others pass
    assert [s.order for s in scheduler.plan(1).admitted] == [0, 2, 3]
    # The first prompt is read by now, and the second one begins with its first three pages.
    plan = scheduler.plan(1)
    assert [(s.order, s.num_found) for s in plan.admitted] == [(1, 12)]


def test_prompts_that_arrive_together_share_what_is_read_in_the_same_plan():
    scheduler = make_scheduler(num_rows=4, prefill_budget=100)
    for order in range(4):
        scheduler.add(Sequence([*range(1, 18), 20 + order], 18, 20, order=order))
    plan = scheduler.plan(1)
    assert [s.num_found for s in plan.admitted] == [0, 16, 16, 16]
    assert sum(chunk.count for call in plan.prefill for chunk in call) == 17 + 3


def test_nobody_waits_for_a_prefix_where_none_is_kept():
    replica = Replica(3, PagePool(20, 4, seed=0, enable_prefix_caching=False))
    scheduler = Scheduler([replica], num_drafts=2, chunk_sizes=(4, 8), prefill_budget=8)
    for order in range(3):
        scheduler.add(Sequence(list(range(1, 18)), 17, 20, order=order))
    assert [s.order for s in scheduler.plan(1).admitted] == [0, 1, 2]


def test_a_reset_lets_all_wait_and_forgets_the_pages():
    scheduler = make_scheduler()
    first, second = sequence(9, order=0), sequence(3, order=1)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.plan(1)
    scheduler.reset([second, first])
    assert scheduler.waiting == [first, second] and not scheduler.num_running
    pool = scheduler.replicas[0].pool
    pool.check()
    assert pool.num_referenced == pool.num_cached == 0
    assert [s.num_found for s in scheduler.plan(1).admitted] == [0, 0]


def test_scored_prompts_have_calls_of_their_own():
    scheduler = make_scheduler(chunk_rows=2)
    for order, is_scored in enumerate((False, True, False)):
        scheduler.add(sequence(3, order=order, is_scored=is_scored))
    calls = scheduler.plan(1).prefill
    assert [[chunk.sequence.order for chunk in call] for call in calls] == [[0, 2], [1]]


# --- Memory ---------------------------------------------------------------------------------------


def config(page_size=16) -> DecodeConfig:
    return DecodeConfig(CONFIG, runtime=Runtime(page_size=page_size))


def test_one_long_prompt_does_not_multiply_the_pages_of_a_call():
    positions_B = np.array([900, *[20] * 63])
    # Of 57 and 15 x 2 pages, the next power of two; and never more than rows of the longest.
    assert generate._num_pages(positions_B, 16, 1024, 16) == 128
    assert generate._num_pages(positions_B, 1, 1024, 16) == 64
    assert generate._num_pages(np.array([20] * 3), 3, 32, 16) == 6


def test_bytes_of_a_page():
    params = (tiny(1).params, None)
    per_position = 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim * 4
    assert budget.bytes_per_page(params, config()) == 16 * per_position


def test_too_little_memory_says_how_much_is_missing():
    with pytest.raises(SpecJAXError, match=r"max_model_len=100 tokens takes 7.00 GiB .* for 2.00"):
        budget.num_pages(config(), 4, 100, fitting=2, page_bytes=2**30)
    assert budget.num_pages(config(), 4, 100, fitting=10**9, page_bytes=1) == 4 * 4 * 7


def test_a_context_that_memory_does_not_hold_is_cut_with_a_warning():
    with pytest.warns(SpecJAXWarning, match="the cache holds 32 tokens, less than the model's con"):
        assert budget.cut_context(config(), 100, num_pages=2) == 32
    assert budget.cut_context(config(), 30, num_pages=2) == 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(gpu_memory_utilization=0), r"gpu_memory_utilization must be in \(0, 1\], got 0"),
        (dict(kv_cache_gib=-1), "kv_cache_gib must be positive, got -1"),
    ],
)
def test_memory_out_of_range_is_refused(options, message):
    with pytest.raises(SpecJAXError, match=message):
        budget.available_bytes(config(), 4, **options)


def test_numbers_of_rows():
    assert budget.num_rows(5, 2) == 3
    assert runner.row_buckets(12) == (1, 2, 4, 8, 12)
    for wrong in (0, True, 1.5):
        with pytest.raises(SpecJAXError, match="max_num_seqs must be an integer of at least 1"):
            budget.num_rows(wrong, 1)
