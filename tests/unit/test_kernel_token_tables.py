"""Entering rows and sampled tokens into the device's tables, against plain Python."""

from __future__ import annotations

import pytest
import torch

from fineinfer.kernels.token_tables import BLOCK, enter_rows, enter_tokens

POISON = -77
TABLE_SIZE, MAX_LENGTH = 7, 70
SIZES = [0, 1, 3, 65, BLOCK, BLOCK + 1, 300]


def enter_rows_plainly(fields: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor, ids: torch.Tensor) -> None:
    """One row after the other; a padding row without a token gets token 0, which every model has."""
    for index, (token, position, slot, row) in enumerate(fields[:4].T.tolist()):
        if slot < 0:
            ids[index] = max(token, 0)
            continue
        slots[row, position] = slot
        if token >= 0:
            tokens[row, position] = token
        ids[index] = tokens[row, position]


def enter_tokens_plainly(
    sampled: torch.Tensor, sample_rows: torch.Tensor, fields: torch.Tensor, tokens: torch.Tensor
) -> None:
    for token, column in zip(sampled.tolist(), sample_rows.tolist(), strict=True):
        if column >= 0:
            position, row = int(fields[1, column]) + 1, int(fields[3, column])
            if position < tokens.shape[1]:
                tokens[row, position] = token


def random_fields(num_rows: int, generator: torch.Generator, known: bool | None = None) -> torch.Tensor:
    """[6, num_rows]: distinct places, a third of the rows padding and half the ids unknown, if not told."""

    def whole(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (num_rows,), generator=generator, dtype=torch.int32)

    places = torch.randperm(TABLE_SIZE * MAX_LENGTH, generator=generator)[:num_rows].int()
    ids, slots = whole(0, 50_000), whole(0, 2**31 - 1)
    is_known = whole(0, 2) == 1 if known is None else torch.full((num_rows,), known)
    ids = torch.where(is_known, ids, -whole(1, 9))
    slots = torch.where(whole(0, 3) == 0, -whole(1, 9), slots)
    rest = torch.full((2, num_rows), POISON, dtype=torch.int32)
    return torch.stack((ids, places % MAX_LENGTH, slots, places // MAX_LENGTH, *rest))


def random_tables(generator: torch.Generator, gap: int = 0) -> torch.Tensor:
    """[2, TABLE_SIZE, MAX_LENGTH]: slot table and token table, rows ``gap`` apart."""
    shape = (2, TABLE_SIZE, MAX_LENGTH + gap)
    return torch.randint(0, 50_000, shape, generator=generator, dtype=torch.int32)[..., :MAX_LENGTH]


def copy_to(device: torch.device, strided: torch.Tensor, gap: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same values in rows ``gap`` apart on the device, and the whole with what lies between."""
    whole = torch.full((*strided.shape[:-1], strided.shape[-1] + gap), POISON, dtype=torch.int32, device=device)
    part = whole[..., : strided.shape[-1]]
    part.copy_(strided)
    return part, whole


@pytest.mark.parametrize("gap", [0, 5])
@pytest.mark.parametrize("known", [True, False, None], ids=["known", "unknown", "mixed"])
@pytest.mark.parametrize("num_rows", SIZES)
def test_rows_are_entered_and_resolved_as_one_after_the_other(num_rows, known, gap, kernel_device) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    fields, tables = random_fields(num_rows, generator, known), random_tables(generator)
    on_device, whole = copy_to(kernel_device, tables, gap)
    given, _ = copy_to(kernel_device, fields, gap)
    ids = torch.full((num_rows + 1,), POISON, dtype=torch.int32, device=kernel_device)
    part = ids[:num_rows]
    assert enter_rows(given, on_device[0], on_device[1], part) is part
    want = torch.empty(num_rows, dtype=torch.int32)
    enter_rows_plainly(fields, tables[0], tables[1], want)
    assert torch.equal(on_device.cpu(), tables)
    assert ids.tolist() == [*want.tolist(), POISON]
    assert torch.equal(given.cpu(), fields)
    assert (whole[..., MAX_LENGTH:] == POISON).all()  # nothing between the rows


@pytest.mark.parametrize("gap", [0, 5])
@pytest.mark.parametrize("num_samples", SIZES)
def test_sampled_tokens_are_entered_behind_their_rows(num_samples, gap, kernel_device) -> None:
    generator = torch.Generator().manual_seed(num_samples)
    fields, tables = random_fields(300, generator), random_tables(generator)
    fields[1, :40] = MAX_LENGTH - 1  # nothing may come behind the last position; the next row begins there
    fields[1, 40:60] = MAX_LENGTH - 2
    places = (fields[3] * MAX_LENGTH + fields[1]).tolist()
    first_of = {place: column for column, place in reversed(list(enumerate(places)))}
    columns = torch.tensor([first_of[place] for place in places], dtype=torch.int32)  # a place has one token
    sample_rows = columns.unique()[torch.randperm(len(columns.unique()), generator=generator)][:num_samples]
    sample_rows = torch.cat((sample_rows, torch.full((num_samples - len(sample_rows),), -3, dtype=torch.int32)))
    sample_rows[1::4] = -1
    sampled = torch.randint(0, 50_000, (num_samples,), generator=generator, dtype=torch.int32)
    on_device, whole = copy_to(kernel_device, tables, gap)
    given, _ = copy_to(kernel_device, fields, gap)
    enter_tokens(sampled.to(kernel_device), sample_rows.to(kernel_device), given, on_device[1])
    before = tables.clone()
    enter_tokens_plainly(sampled, sample_rows, fields, tables[1])
    assert torch.equal(on_device.cpu(), tables)
    assert (whole[..., MAX_LENGTH:] == POISON).all()
    assert num_samples < 3 or not torch.equal(before, tables)


def test_the_last_position_takes_a_row_and_drops_what_comes_behind_it(kernel_device) -> None:
    tables = torch.zeros(2, 3, 4, dtype=torch.int32, device=kernel_device)
    fields = torch.tensor([[11, 12], [3, 2], [5, 6], [1, 2]], dtype=torch.int32, device=kernel_device)
    ids = torch.empty(2, dtype=torch.int32, device=kernel_device)
    enter_rows(fields, tables[0], tables[1], ids)
    sampled, rows = (torch.tensor(pair, dtype=torch.int32, device=kernel_device) for pair in ([21, 22], [0, 1]))
    enter_tokens(sampled, rows, fields, tables[1])
    assert tables[0].tolist() == [[0, 0, 0, 0], [0, 0, 0, 5], [0, 0, 6, 0]]
    assert tables[1].tolist() == [[0, 0, 0, 0], [0, 0, 0, 11], [0, 0, 12, 22]]


def test_a_step_reads_the_token_that_the_step_before_chose(kernel_device) -> None:
    tables = torch.full((2, 2, 8), POISON, dtype=torch.int32, device=kernel_device)
    ids = torch.empty(1, dtype=torch.int32, device=kernel_device)
    row = torch.zeros(1, dtype=torch.int32, device=kernel_device)
    seen = []
    for position in range(7):
        token = 5 if position == 0 else -1
        fields = torch.tensor([[token], [position], [position], [1]], dtype=torch.int32, device=kernel_device)
        seen += enter_rows(fields, tables[0], tables[1], ids).tolist()
        enter_tokens(ids * 2, row, fields, tables[1])
    assert seen == [5 * 2**n for n in range(7)]
    assert tables[1, 1].tolist() == [5 * 2**n for n in range(8)] and (tables[:, 0] == POISON).all()


def test_samples_of_nobody_leave_the_table_as_it_is(kernel_device) -> None:
    tables = random_tables(torch.Generator().manual_seed(0)).to(kernel_device)
    before = tables.clone()
    fields = random_fields(3, torch.Generator().manual_seed(1), known=True).to(kernel_device)
    nobody = torch.tensor([-1, -1, -(2**31)], dtype=torch.int32, device=kernel_device)
    enter_tokens(torch.ones(3, dtype=torch.int32, device=kernel_device), nobody, fields, tables[1])
    assert torch.equal(tables, before)


def test_tables_laid_out_differently_are_refused(kernel_device) -> None:
    tables = torch.zeros(2, 6, 8, dtype=torch.int32, device=kernel_device)
    fields = torch.zeros(4, 1, dtype=torch.int32, device=kernel_device)
    ids = torch.zeros(1, dtype=torch.int32, device=kernel_device)
    for slot_table, token_table in ((tables[0], tables[1, ::2]), (tables[0, :, :4].contiguous(), tables[1])):
        with pytest.raises(ValueError, match="laid out alike"):
            enter_rows(fields, slot_table, token_table, ids)


@pytest.mark.gpu
def test_offsets_past_two_to_the_31() -> None:
    """Two tables of three rows 2**30 apart, woven into each other: 8 GB."""
    device = torch.device("cuda")
    memory = torch.full((2**31 + 16,), POISON, dtype=torch.int32, device=device)
    slot_table, token_table = (memory.as_strided((3, 8), (2**30, 1), offset) for offset in (0, 8))
    fields = torch.tensor([[41], [3], [9], [2]], dtype=torch.int32, device=device)
    ids = torch.empty(1, dtype=torch.int32, device=device)
    enter_rows(fields, slot_table, token_table, ids)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    enter_tokens(ids + 1, zero, fields, token_table)
    assert ids.tolist() == [41] and slot_table[2, 3] == 9
    assert token_table[2, 3:5].tolist() == [41, 42]
    assert int((memory != POISON).sum()) == 3
