# SPDX-License-Identifier: Apache-2.0
"""Indexer logits, alone and fused with top-k. h<n> in a name is the hazard's number in NOTES.md."""

import random

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from dsv4_sm120.indexer import reference  # noqa: E402
from dsv4_sm120.topk import reference as topk_reference  # noqa: E402

PAGE = 64


def make(lengths, max_seq_len, seed=0, device="cpu", pool_pages=None, pitch=PAGE * 132, next_n=1):
    """Returns (q, cache, weights, lengths, table, max_seq_len); pages are spread over the pool in random order, the
    cache is NaN wherever no token of a row lies, table padding is -1."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    requests = rows // next_n
    pages = -(-max_seq_len // PAGE)
    needed = [-(-max(0, max(lengths[i * next_n : (i + 1) * next_n])) // PAGE) for i in range(requests)]
    pool = pool_pages or max(1, sum(needed) + 3)
    flat = torch.full((pool, pitch), 0x7F, dtype=torch.uint8)
    ids = torch.randperm(pool, generator=generator)[: sum(needed)].tolist()
    table = torch.full((rows, pages), -1, dtype=torch.int32)
    for request in range(requests):
        mine, ids = ids[: needed[request]], ids[needed[request] :]
        longest = max(lengths[request * next_n : (request + 1) * next_n])
        for number, page in enumerate(mine):
            tokens = min(PAGE, longest - number * PAGE)
            keys = (torch.randn(tokens, 128, generator=generator) * 2).to(torch.float8_e4m3fn)
            flat[page, : tokens * 128] = keys.view(torch.uint8).flatten()
            scales = torch.rand(tokens, generator=generator) + 0.1
            flat[page, PAGE * 128 : PAGE * 128 + tokens * 4] = scales.view(torch.uint8)
        for row in range(request * next_n, (request + 1) * next_n):
            used = -(-max(0, lengths[row]) // PAGE)
            table[row, :used] = torch.tensor(mine[:used], dtype=torch.int32)
    q = torch.randn(rows, 1, 64, 128, generator=generator).to(torch.float8_e4m3fn)
    weights = torch.randn(rows, 64, generator=generator)
    flat = flat.to(device)
    cache = torch.as_strided(flat, (pool, PAGE, 1, 132), (pitch, 132, 132, 1))
    seq = torch.tensor(lengths, dtype=torch.int32, device=device)
    return q.to(device), cache, weights.to(device), seq, table.to(device), max_seq_len


def test_reference_agrees_with_a_plain_loop():
    q, cache, weights, lengths, table, width = make([70, 3], 128)
    logits, *_scales = reference.paged_mqa_logits(q, cache, weights, lengths, table, width)
    for row, token in ((0, 0), (0, 63), (0, 64), (0, 69), (1, 2)):
        page = cache[int(table[row, token // PAGE])].reshape(-1)
        start = token % PAGE * 128
        key = page[start : start + 128].view(torch.float8_e4m3fn).double().tolist()
        scale = float(page[8192 + token % PAGE * 4 : 8196 + token % PAGE * 4].clone().view(torch.float32))
        total = 0.0
        for head in range(64):
            product = sum(a * b for a, b in zip(q[row, 0, head].double().tolist(), key))
            total += max(product, 0.0) * float(weights[row, head])
        assert logits[row, token].item() == pytest.approx(total * scale, rel=1e-9)
    assert logits[1, 3:].isnan().all()


def test_h12_reference_takes_the_pitch_from_the_stride():
    dense, padded = make([130], 192), make([130], 192, pitch=PAGE * 132 + 4096)
    first = reference.paged_mqa_logits(*dense)[0][0, :130]
    assert torch.equal(first, reference.paged_mqa_logits(*padded)[0][0, :130])


@pytest.mark.parametrize("steps", [4, 8])
def test_operands_meet_in_the_products(steps):
    """The order that kernel.cu gives the 128 products, against the fragment layouts of m16n8k32 (sm_120a, four steps)
    and m16n8k16 (sm_90, eight): each dimension of a token must meet the same dimension of a head, once."""
    each = 128 // steps // 4  # products of a step and thread: 8 or 4

    def dimensions(thread):
        """The bytes that a quad's thread holds, as the loads find them."""
        return [*range(16 * thread, 16 * thread + 16), *range(64 + 16 * thread, 80 + 16 * thread)]

    def places(thread, step):
        """k indices of a thread's operand registers in order, of A (rows g) and B alike: PTX ISA, mma fragments."""
        width = each // 2
        return [half * 4 * width + width * thread + i for half in (0, 1) for i in range(width)]

    met = []
    for step in range(steps):
        a = {place: dimensions(t)[step * each + i] for t in range(4) for i, place in enumerate(places(t, step))}
        b = {place: dimensions(t)[step * each + i] for t in range(4) for i, place in enumerate(places(t, step))}
        assert sorted(a) == list(range(128 // steps)) and a == b
        met += a.values()
    assert sorted(met) == list(range(128))


gpu = pytest.mark.gpu


def run(case, next_n=1, poison=None):
    from dsv4_sm120 import indexer

    q, cache, weights, lengths, table, width = case
    assert indexer.refusal(q, cache, weights, lengths, table, width, next_n) is None
    logits = torch.full((q.shape[0], width), float("nan"), device="cuda")
    indexer.launch(q, cache, weights, lengths, table, logits, None, next_n)
    torch.cuda.synchronize()
    return logits


def check(case, next_n=1):
    logits = run(case, next_n).cpu()
    expected, *scales = reference.paged_mqa_logits(*case)
    allowed = reference.allowance(*scales, torch.cuda.get_device_capability()[0])
    for row in range(logits.shape[0]):
        length = max(0, int(case[3][row]))
        error = (logits[row, :length].double() - expected[row, :length]).abs()
        assert (error <= allowed[row, :length]).all(), f"row {row}: {error.max()}"
        assert logits[row, length:].isnan().all(), f"row {row}: written past its length"


@gpu
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 1024, 5000])
def test_h19_lengths_at_every_edge(length):
    check(make([length], 8192, seed=length, device="cuda"))


@gpu
@pytest.mark.parametrize("seed", range(5))
def test_random_shapes(seed):
    rng = random.Random(seed)
    rows = rng.choice([1, 3, 16, 64])
    lengths = [rng.choice([0, 1, rng.randint(0, 300), rng.randint(0, 9000)]) for _ in range(rows)]
    check(make(lengths, 16384, seed=seed, device="cuda"))


@gpu
def test_many_rows():
    rng = random.Random(9)
    check(make([rng.randint(0, 200) for _ in range(700)], 512, seed=9, device="cuda"))


@gpu
@pytest.mark.parametrize("next_n", [2, 3, 4, 5, 8])
def test_rows_of_one_request_share_keys(next_n):
    lengths = []
    for base in (500, 0, 1, 3000, 63, 64, 15, 16):
        lengths += [base + i for i in range(next_n)]
    lengths[next_n : 2 * next_n] = [0] * next_n
    check(make(lengths, 4096, seed=next_n, device="cuda", next_n=next_n), next_n)


@gpu
def test_h06_h07_empty_and_padded_rows():
    check(make([0, 0, 1, 0, 700, 1], 1024, device="cuda"))
    check(make([0], 1024, device="cuda"))


@gpu
def test_h08_h09_h14_nothing_outside_the_lengths_is_used():
    """make() fills the pool outside valid tokens with NaN and the table's padding with -1; check() finds either."""
    check(make([1, 63, 65, 130, 4000], 8192, device="cuda"))


@gpu
@pytest.mark.parametrize("pitch", [PAGE * 132 + 16, 1_002_240])
def test_h12_page_pitch_from_the_stride(pitch):
    check(make([200, 130], 512, pitch=pitch, device="cuda"))


@gpu
def test_h13_pool_above_four_gib():
    pages = 5 * 2**30 // (PAGE * 132)
    small = make([300], 512, device="cuda")
    pool = torch.empty((pages, PAGE * 132), dtype=torch.uint8, device="cuda")
    table = small[4].clone()
    for number, page in enumerate((pages - 1, 0, pages // 2, pages - 2, 2**31 // (PAGE * 132) + 1)):
        pool[page] = small[1].view(small[1].shape[0], -1)[int(table[0, number])]
        table[0, number] = page
    big = (small[0], pool.view(pages, PAGE, 1, 132), *small[2:4], table, 512)
    assert torch.equal(run(big)[0, :300], run(small)[0, :300])


@gpu
def test_h21_one_row_with_odd_strides():
    q, cache, weights, lengths, table, width = make([200], 512, device="cuda")
    odd = (torch.as_strided(q, q.shape, (1, 8192, 128, 1)), cache, torch.as_strided(weights, (1, 64), (1, 1)))
    check((*odd, lengths, torch.as_strided(table, table.shape, (1, 1)), width))


@gpu
def test_run_to_run_bit_equal():
    case = make([9000, 100, 3000, 0, 777], 16384, device="cuda")
    first = run(case)
    for _ in range(20):
        assert torch.equal(first.nan_to_num(nan=-1), run(case).nan_to_num(nan=-1))


def run_fused(case, k=512, next_n=1):
    from dsv4_sm120 import indexer

    q, cache, weights, lengths, table, width = case
    logits = torch.full((q.shape[0], width), float("nan"), device="cuda")
    slots = torch.full((q.shape[0], k), -7, dtype=torch.int32, device="cuda")
    raw = torch.full_like(slots, -7)
    assert indexer.fused_refusal(q, cache, weights, lengths, table, logits, slots, PAGE, raw, next_n) is None
    indexer.fused_launch(q, cache, weights, lengths, table, logits, slots, PAGE, raw, next_n)
    torch.cuda.synchronize()
    return logits, slots, raw


def check_fused(case, k=512, next_n=1):
    """The fused pair must choose exactly what top-k chooses from the logits of the same indexer."""
    plain = run(case, next_n)
    expected = topk_reference.topk_transform_paged(plain, case[3], case[4], k, PAGE)
    logits, slots, raw = run_fused(case, k, next_n)
    assert torch.equal(raw.cpu(), expected[1]) and torch.equal(slots.cpu(), expected[0])
    for row in range(logits.shape[0]):
        if int(case[3][row]) <= k:
            assert logits[row].isnan().all(), f"row {row} has no need of scores"


@gpu
@pytest.mark.parametrize(
    "lengths", [[1024], [0, 1, 512, 513, 511], [16384, 16385, 16400, 20_000], [131_072], [131_071, 3, 40_000]]
)
def test_fused_equals_the_pair(lengths):
    check_fused(make(lengths, 131_072, seed=len(lengths), device="cuda"))


@gpu
@pytest.mark.parametrize("next_n", [2, 4])
def test_fused_with_shared_keys(next_n):
    lengths = [base + i for base in (600, 17_000, 510) for i in range(next_n)]
    check_fused(make(lengths, 131_072, seed=next_n, device="cuda", next_n=next_n), next_n=next_n)


@gpu
def test_fused_narrow_table():
    check_fused(make([3000, 4096, 100], 4096, device="cuda"))


@gpu
def test_h10_h11_fused_graph_replays_with_changing_lengths():
    from dsv4_sm120 import indexer

    rng = random.Random(4)
    rows, width = 3, 40_000
    case = make([width] * rows, width, seed=4, device="cuda")
    q, cache, weights, lengths, table, _width = case
    full = run(case)
    live = torch.ones_like(lengths)
    logits = torch.empty(rows, width, device="cuda")
    slots = torch.empty(rows, 512, dtype=torch.int32, device="cuda")
    raw = torch.empty_like(slots)

    def step():
        indexer.fused_launch(q, cache, weights, live, table, logits, slots, PAGE, raw)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    choices = [0, 1, 511, 512, 513, 16384, 16385, width]
    plans = torch.tensor(
        [[rng.choice([*choices, rng.randint(1, width)]) for _ in range(rows)] for _ in range(48)], dtype=torch.int32
    ).cuda()
    expected = [topk_reference.topk_transform_paged(full, plans[i], table, 512, PAGE)[1] for i in range(48)]
    for turn in range(10_000):
        live.copy_(plans[turn % 48])
        graph.replay()
        if rng.random() < 0.02:
            torch.cuda.synchronize()
            assert torch.equal(raw.cpu(), expected[turn % 48]), f"replay {turn}"
    torch.cuda.synchronize()
    assert torch.equal(raw.cpu(), expected[9_999 % 48])


@gpu
def test_refusals_leave_the_rest_to_the_engine():
    from dsv4_sm120 import indexer

    q, cache, weights, lengths, table, width = make([200, 100], 512, device="cuda")
    assert indexer.refusal(q, cache, weights, lengths, table, width) is None
    assert "float8" in indexer.refusal(q.float(), cache, weights, lengths, table, width)
    assert "shape" in indexer.refusal(q[:, :, :32], cache, weights, lengths, table, width)
    assert "cache" in indexer.refusal(q, cache[..., :68], weights, lengths, table, width)
    assert "dimensions" in indexer.refusal(q, cache, weights, lengths[:, None], table, width)
    assert "request" in indexer.refusal(q, cache, weights, lengths, table, width, next_n=3)
