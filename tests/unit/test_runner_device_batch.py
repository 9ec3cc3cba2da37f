"""A plan's chunks laid out for the device, and the buffer that takes them there."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fineinfer.adapters.batch import AdapterSegment
from fineinfer.memory.kv_cache import KVCache
from fineinfer.request import SamplingParams
from fineinfer.runner.device_batch import (
    ADAPTERS,
    IDS,
    LENGTHS,
    NUM_FIELDS,
    NUM_HOST_COPIES,
    POSITIONS,
    ROPE_LENGTHS,
    SLOTS,
    TABLE_ROWS,
    InputBuffer,
    lay_out,
)
from fineinfer.scheduler.plan import Chunk
from fineinfer.scheduler.sequence import Sequence

CPU = torch.device("cpu")
MAX_ROWS, MAX_LEN = 8, 40


def make_cache() -> KVCache:
    return KVCache(MAX_ROWS * MAX_LEN, MAX_ROWS, MAX_LEN)


def sequence(
    kv: KVCache, name: str, num_prompt: int, num_output: int = 0, adapter: int | None = None, in_flight: int = 0
) -> Sequence:
    """Tokens 100, 101, ... by position; a row with a slot for each, those in flight included."""
    ids = list(range(100, 100 + num_prompt + num_output))
    made = Sequence(name, b"api", ids[:num_prompt], SamplingParams(), 4096, 0.0, adapter_slot=adapter)
    made.output, made.num_in_flight = ids[num_prompt:], in_flight
    made.row = kv.open_row(made.num_tokens)
    return made


def decode(made: Sequence) -> Chunk:
    return Chunk(made, made.num_tokens - 1, 1, samples=True)


def test_single_rows_come_first_and_adapters_stand_together_in_each_part() -> None:
    kv = make_cache()
    names = {"a": 2, "b": None, "c": 0, "d": 2, "e": None, "f": 0, "g": 1}
    made = {name: sequence(kv, name, 6, adapter=adapter) for name, adapter in names.items()}
    chunks = (
        Chunk(made["a"], 0, 3, False),
        decode(made["b"]),
        decode(made["d"]),
        Chunk(made["c"], 0, 6, True),
        decode(made["f"]),
        Chunk(made["e"], 2, 2, False),
        Chunk(made["g"], 3, 1, False),  # one row of a prompt that chooses nothing
    )
    batch = lay_out(chunks, kv)
    assert [chunk.sequence.request_id for chunk in batch.chunks] == ["b", "f", "g", "d", "e", "c", "a"]
    assert batch.num_decodes == 4 and batch.num_rows == 4 + 2 + 6 + 3
    assert batch.spans == [(4, 2, 2, made["e"].row), (6, 6, 0, made["c"].row), (12, 3, 0, made["a"].row)]
    assert batch.sample_rows == [0, 1, 3, 11]
    assert batch.segments == [
        AdapterSegment(0, 1, 2),
        AdapterSegment(1, 2, 3),
        AdapterSegment(2, 3, 4),
        AdapterSegment(0, 6, 12),
        AdapterSegment(2, 12, 15),
    ]


def test_an_adapter_at_the_end_of_the_single_rows_and_the_start_of_the_spans_is_one_segment() -> None:
    kv = make_cache()
    first, second, long = (sequence(kv, name, 4, adapter=3) for name in "abc")
    batch = lay_out((Chunk(long, 0, 4, True), decode(first), decode(second)), kv)
    assert batch.segments == [AdapterSegment(3, 0, 6)]


def test_without_adapters_the_order_of_the_plan_is_kept() -> None:
    kv = make_cache()
    made = [sequence(kv, name, 5) for name in "abcd"]
    batch = lay_out((Chunk(made[3], 0, 2, False), decode(made[2]), Chunk(made[0], 1, 4, True), decode(made[1])), kv)
    assert [chunk.sequence.request_id for chunk in batch.chunks] == ["c", "b", "d", "a"] and not batch.segments


def test_rows_of_one_kind_alone() -> None:
    kv = make_cache()
    made = [sequence(kv, name, 5) for name in "ab"]
    decodes = lay_out(tuple(decode(item) for item in made), kv)
    assert decodes.num_decodes == decodes.num_rows == 2 and not decodes.spans and decodes.sample_rows == [0, 1]
    spans = lay_out(tuple(Chunk(item, 1, 3, False) for item in made), kv)
    assert spans.num_decodes == 0 and spans.num_rows == 6 and not spans.sample_rows
    empty = lay_out((), kv)
    assert empty.num_rows == 0 and empty.fields.shape == (NUM_FIELDS, 0) and empty.fields.dtype == np.int32


def test_a_token_in_flight_has_no_id_yet() -> None:
    kv = make_cache()
    known, waiting = sequence(kv, "a", 3, 2), sequence(kv, "b", 3, 2, in_flight=1)
    first = sequence(kv, "c", 4, in_flight=1)  # the prompt has just run; all of its tokens are the device's
    batch = lay_out((decode(known), decode(waiting), decode(first)), kv)
    assert batch.fields[IDS].tolist() == [104, -1, -1]
    assert batch.fields[POSITIONS].tolist() == [4, 5, 4]
    assert batch.fields[LENGTHS].tolist() == [5, 6, 5]
    assert batch.fields[SLOTS].tolist() == [int(kv.slots(item.row)[-1]) for item in (known, waiting, first)]


@pytest.mark.parametrize("length", [1, 3])
def test_a_sequence_without_a_row_is_refused(length: int) -> None:
    kv = make_cache()
    lost, other = sequence(kv, "lost", 5), sequence(kv, "other", 5)
    lost.row = None
    with pytest.raises(RuntimeError, match="lost"):
        lay_out((decode(other), Chunk(lost, 0, length, False)), kv)


drawn_chunks = st.lists(
    st.tuples(
        st.integers(1, 20),  # prompt
        st.integers(0, 10),  # output
        st.sampled_from([None, 0, 1, 2]),  # adapter
        st.booleans(),  # decoding, its newest token in flight
        st.integers(0, 29),  # start, ...
        st.integers(1, 30),  # ... length, cut to what there is
    ),
    max_size=MAX_ROWS,
)


@settings(max_examples=200, deadline=None)
@given(drawn_chunks, st.randoms(use_true_random=False))
def test_every_row_says_whose_it_is_and_what_it_sees(drawn, rng) -> None:
    kv, chunks = make_cache(), []
    filler = kv.open_row(7)  # so that rows do not begin at multiples of anything
    for index, (num_prompt, num_output, adapter, in_flight, start, length) in enumerate(drawn[: MAX_ROWS - 1]):
        made = sequence(kv, str(index), num_prompt, num_output, adapter, int(in_flight))
        if in_flight:
            chunks.append(decode(made))
        else:
            start = min(start, made.num_tokens - 1)
            length = min(length, made.num_tokens - start)
            chunks.append(Chunk(made, start, length, start + length == made.num_tokens))
    kv.close_row(filler)
    rng.shuffle(chunks)
    batch = lay_out(tuple(chunks), kv)
    assert sorted(map(id, batch.chunks)) == sorted(map(id, chunks))
    single = [chunk.length == 1 for chunk in batch.chunks]
    assert single == sorted(single, reverse=True) and batch.num_decodes == sum(single)

    row, sample_rows, owners, spans = 0, [], [], []
    for chunk in batch.chunks:
        owner = chunk.sequence
        if chunk.length > 1:
            spans.append((row, chunk.length, chunk.start, owner.row))
        for position in range(chunk.start, chunk.start + chunk.length):
            tokens = owner.prompt + owner.output
            want = {
                IDS: tokens[position] if position < len(tokens) else -1,
                POSITIONS: position,
                SLOTS: kv.slots(owner.row)[position],
                TABLE_ROWS: owner.row,
                LENGTHS: position + 1 if chunk.length == 1 else 0,
                ROPE_LENGTHS: max(len(owner.prompt), position + 1),
                ADAPTERS: -1 if owner.adapter_slot is None else owner.adapter_slot,
            }
            assert {field: batch.fields[field, row] for field in range(NUM_FIELDS)} == want
            owners.append(owner.adapter_slot)
            row += 1
        if chunk.samples:
            sample_rows.append(row - 1)
    assert batch.num_rows == row and batch.sample_rows == sample_rows and batch.spans == spans

    adapters = [None] * row
    for segment in batch.segments:
        assert segment.start < segment.end and adapters[segment.start : segment.end] == [None] * (
            segment.end - segment.start
        )
        adapters[segment.start : segment.end] = [segment.slot] * (segment.end - segment.start)
    assert adapters == owners
    for part in (owners[: batch.num_decodes], owners[batch.num_decodes :]):
        runs = [slot for slot, _ in groupby(part)]
        assert len(runs) == len(set(runs)), "an adapter stands in two places"


# ---------------------------------------------------------------- upload


def test_parts_come_one_after_the_other_with_the_bits_of_floats() -> None:
    buffer = InputBuffer(20, CPU)
    whole = np.arange(6, dtype=np.int32).reshape(2, 3)
    real = np.array([[0.5], [-0.0], [np.pi]], dtype=np.float32)
    sent = buffer.upload(whole, real, np.array([9], dtype=np.int32))
    assert sent.dtype == torch.int32 and sent.shape == (10,)
    assert sent.data_ptr() == buffer.device.data_ptr()
    assert sent[:6].tolist() == [0, 1, 2, 3, 4, 5] and sent[9] == 9
    floats = sent[6:9].view(torch.float32)
    assert torch.equal(floats, torch.from_numpy(real)[:, 0]) and torch.signbit(floats[1])
    assert not buffer.device[10:].any()


def test_parts_need_not_be_contiguous_and_may_be_empty() -> None:
    buffer = InputBuffer(8, CPU)
    table = np.arange(12, dtype=np.int32).reshape(3, 4)
    none = np.zeros((0, 4), dtype=np.int32)
    assert buffer.upload(table[:, :2], none, table[0, 2:]).tolist() == [0, 1, 4, 5, 8, 9, 2, 3]
    assert buffer.upload(none).shape == (0,)


def test_what_follows_the_parts_stays_on_the_device() -> None:
    buffer = InputBuffer(6, CPU)
    buffer.upload(np.arange(1, 7, dtype=np.int32))
    buffer.upload(np.array([-1, -2], dtype=np.int32))
    assert buffer.device.tolist() == [-1, -2, 3, 4, 5, 6]


def test_more_than_the_capacity_is_refused() -> None:
    with pytest.raises(ValueError):
        InputBuffer(3, CPU).upload(np.zeros(2, dtype=np.int32), np.zeros(2, dtype=np.int32))


def test_a_host_array_rests_until_the_others_had_their_turn() -> None:
    """An asynchronous copy may still read it."""
    buffer = InputBuffer(2, CPU)
    for turn in range(1, 3 * NUM_HOST_COPIES + 1):
        buffer.upload(np.array([turn, -turn], dtype=np.int32))
        held = sorted(tuple(host.tolist()) for host in buffer._hosts)
        newest = range(max(1, turn - NUM_HOST_COPIES + 1), turn + 1)
        assert held == sorted([(n, -n) for n in newest] + [(0, 0)] * (NUM_HOST_COPIES - len(newest)))
        assert buffer.device.tolist() == [turn, -turn]
