# SPDX-License-Identifier: Apache-2.0
"""Top-k: the reference on the CPU, the kernel on a GPU. h<n> in a name is the hazard's number in NOTES.md."""

import random

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from dsv4_sm120.topk import reference  # noqa: E402
from dsv4_sm120.topk.contest import means_of_neighbours  # noqa: E402

PAGE = 64


def make(rows, width, lengths, k=512, scores=None, generator=None, device="cpu"):
    """Returns (scores, lengths, table, k) with NaN past each length and shuffled pages, padding entries -1."""
    generator = generator or torch.Generator().manual_seed(rows * 131 + width)
    if scores is None:
        scores = torch.randn(rows, width, generator=generator)
    scores = scores.clone()
    lengths = torch.tensor(lengths, dtype=torch.int32)
    pages = -(-width // PAGE)
    table = torch.randperm(rows * pages, generator=generator).view(rows, pages).int()
    for row in range(rows):
        length = max(0, int(lengths[row]))
        scores[row, length:] = float("nan")
        table[row, -(-length // PAGE) :] = -1
    return scores.to(device), lengths.to(device), table.to(device), k


def brute(values, k):
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    return sorted(order[:k])


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 40])
def test_reference_agrees_with_a_plain_sort(length):
    rng = random.Random(length)
    values = [rng.choice([-1.0, 0.0, -0.0, 0.5, rng.random()]) for _ in range(48)]
    scores = torch.tensor([values])
    table = torch.tensor([[3, 0, 7, 1, 9, 2]], dtype=torch.int32)
    slots, raw = reference.topk_transform_paged(scores, torch.tensor([length]), table, 8, 8)
    expected = brute(values[:length], 8)
    assert raw[0].tolist() == expected + [-1] * (8 - len(expected))
    assert slots[0].tolist()[: len(expected)] == [int(table[0, i // 8]) * 8 + i % 8 for i in expected]


def test_h08_reference_sees_nothing_past_the_length():
    scores, lengths, table, _k = make(1, 64, [9])
    _slots, raw = reference.topk_transform_paged(scores, lengths, table, 16, PAGE)
    assert sorted(raw[0, :9].tolist()) == list(range(9)) and (raw[0, 9:] == -1).all()


def test_maxima_bound_the_threshold():
    """What the kernel rests on: the k-th largest of the maxima of disjoint groups never exceeds the k-th largest value,
    and the groups that reach it hold every value that does."""
    rng = random.Random(5)
    for _ in range(300):
        group, k = rng.choice([2, 4, 16]), rng.choice([1, 3, 8])
        levels = rng.choice([2, 5, 1000])
        values = [rng.randrange(levels) for _ in range(rng.randrange(k * group + 1, 400))]
        maxima = [max(values[i : i + group]) for i in range(0, len(values), group)]
        bound = sorted(maxima, reverse=True)[k - 1]
        kept = {i for i, most in enumerate(maxima) if most >= bound}
        assert bound <= sorted(values, reverse=True)[k - 1]
        assert all(i // group in kept for i in brute(values, k))


gpu = pytest.mark.gpu


def run(case, raw=True, poison=-7):
    from dsv4_sm120 import topk

    scores, lengths, table, k = case
    slots = torch.full((scores.shape[0], k), poison, dtype=torch.int32, device="cuda")
    raws = torch.full_like(slots, poison) if raw else None
    topk.topk_transform_paged(scores, lengths, table, slots, PAGE, raws)
    torch.cuda.synchronize()
    return slots.cpu(), raws.cpu() if raw else None


def check(case):
    slots, raw = run(case)
    scores, lengths, table, k = case
    expected_slots, expected_raw = reference.topk_transform_paged(scores, lengths, table, k, PAGE)
    for row in range(slots.shape[0]):
        length = max(0, int(lengths[row]))
        if length > k:
            chosen = scores[row].cpu()[raw[row].long()].sort().values
            assert torch.equal(chosen, scores[row].cpu()[expected_raw[row].long()].sort().values), f"row {row}: values"
    assert torch.equal(raw, expected_raw)
    assert torch.equal(slots, expected_slots)


EDGES = [0, 1, 511, 512, 513, 514, 1023, 1024, 4095, 4096, 4097, 8192, 16383, 16384]
LONG_EDGES = [16385, 16386, 16400, 20479, 20480, 32768, 65535, 100_003, 131_071, 131_072]


@gpu
@pytest.mark.parametrize("length", EDGES)
def test_h19_lengths_at_every_edge(length):
    check(make(1, 16384, [length], device="cuda"))


@gpu
@pytest.mark.parametrize("length", LONG_EDGES)
def test_h19_long_lengths_at_every_edge(length):
    check(make(1, 131072, [length], device="cuda"))


@gpu
@pytest.mark.parametrize("k", [1, 16, 512, 1000, 1024, 1025, 2048])
@pytest.mark.parametrize("length", [300, 3000, 6000, 16384, 20_000, 60_000, 131_072])
def test_every_k(k, length):
    check(make(2, 131072, [length, length // 2], k=k, device="cuda"))


@gpu
@pytest.mark.parametrize("seed", range(6))
def test_random_shapes(seed):
    rng = random.Random(seed)
    rows = rng.choice([1, 2, 5, 16, 33, 64])
    width = rng.choice([1024, 16384, 40_000, 131_072, 262_144 if rows < 6 else 65_536])
    lengths = [rng.choice([rng.randint(0, width), rng.randint(0, min(width, 2000)), width]) for _ in range(rows)]
    check(make(rows, width, lengths, device="cuda"))


@gpu
@pytest.mark.parametrize("rows", [133, 1024, 1025, 3000])
def test_many_rows(rows):
    rng = random.Random(rows)
    check(make(rows, 2048, [rng.randint(0, 2048) for _ in range(rows)], device="cuda"))


@gpu
def test_h07_zero_and_negative_lengths_select_nothing():
    slots, raw = run(make(3, 4096, [0, -1, 1], device="cuda"))
    assert (slots[:2] == -1).all() and (raw[:2] == -1).all() and raw[2, 0] == 0


@gpu
def test_h08_nothing_past_the_length_is_seen():
    base = make(4, 131072, [1000, 16000, 50_001, 131_001], device="cuda")
    first = run(base)
    for junk in (float("inf"), float("-inf"), 1e30):
        scores = base[0].clone()
        for row in range(4):
            scores[row, int(base[1][row]) :] = junk
        again = run((scores, *base[1:]))
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@gpu
def test_h09_padding_entries_of_the_page_table_are_not_used():
    slots, _raw = run(make(3, 131072, [600, 16_385, 70_000], device="cuda"))
    assert (slots >= 0).all()


@gpu
@pytest.mark.parametrize("length", [5000, 16384, 131_072])
@pytest.mark.parametrize(
    "kind",
    [
        "zero", "mostly zero", "two values", "signed zero", "one bin", "ascending", "descending", "inf", "few numbers",
        "best together", "alike neighbours",
    ],
)  # fmt: skip
def test_h20_ties(length, kind):
    generator = torch.Generator().manual_seed(length)
    x = torch.zeros(2, 131072)
    if kind == "mostly zero":
        x[:, ::701] = torch.rand(2, x[:, ::701].shape[1], generator=generator)
    elif kind == "two values":
        x = torch.randint(0, 2, x.shape, generator=generator).float()
    elif kind == "signed zero":
        x = torch.where(torch.rand(x.shape, generator=generator) < 0.5, torch.tensor(-0.0), torch.tensor(0.0))
    elif kind == "one bin":
        x = 1.0 + torch.rand(x.shape, generator=generator) * 1e-3
    elif kind == "ascending":
        x = torch.arange(131072.0).repeat(2, 1)
    elif kind == "descending":
        x = -torch.arange(131072.0).repeat(2, 1)
    elif kind == "inf":
        x = torch.randn(x.shape, generator=generator)
        x[:, ::50] = float("-inf")
        x[:, ::9001] = float("inf")
    elif kind == "few numbers":
        x[:] = float("-inf")
        x[0, ::600] = 1.0
        x[1, ::9] = 2.0
    elif kind == "best together":
        x = torch.randn(x.shape, generator=generator)
        x[0, 1000:1600] += 10
        x[1].view(-1, 32, 32)[:, 3] += 10
    elif kind == "alike neighbours":
        x = means_of_neighbours(*x.shape, 64, generator)
    check(make(2, 131072, [length, length - 3], scores=x, device="cuda"))


@gpu
def test_scores_past_fp16_range():
    generator = torch.Generator().manual_seed(1)
    check(make(2, 16384, [16000, 9000], scores=torch.randn(2, 16384, generator=generator) * 1e7, device="cuda"))
    check(make(2, 40000, [40000, 900], scores=torch.randn(2, 40000, generator=generator) * 1e-9, device="cuda"))


@gpu
def test_strided_scores_and_one_row_strides_h21():
    wide = torch.randn(4, 20000 + 48, device="cuda")
    scores = wide[:, :20000]
    _s, lengths, table, k = make(4, 20000, [20000, 700, 512, 16385], device="cuda")
    check((scores, lengths, table, k))
    single = torch.as_strided(scores, (1, 20000), (1, 1))
    check((single, lengths[:1], table[:1], k))


@gpu
def test_run_to_run_bit_equal():
    case = make(16, 131072, [131072 - 7 * i for i in range(16)], device="cuda")
    first = run(case)
    for _ in range(50):
        again = run(case)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@gpu
def test_h10_h11_graph_replays_with_changing_lengths():
    """Captured at length 1, replayed 10,000 times at changing lengths, checked at random ones; counters reset."""
    from dsv4_sm120 import topk

    rng = random.Random(3)
    rows, width, k = 4, 131072, 512
    scores, lengths, table, _k = make(rows, width, [width] * rows, device="cuda")
    live = torch.ones(rows, dtype=torch.int32, device="cuda")
    slots = torch.empty(rows, k, dtype=torch.int32, device="cuda")
    raw = torch.empty_like(slots)
    topk.topk_transform_paged(scores, live, table, slots, PAGE, raw)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        topk.topk_transform_paged(scores, live, table, slots, PAGE, raw)
    plans = torch.tensor(
        [
            [rng.choice([0, 1, 511, 512, 513, 16384, 16385, rng.randint(1, width), width]) for _ in range(rows)]
            for _ in range(64)
        ],
        dtype=torch.int32,
    ).cuda()
    expected = [reference.topk_transform_paged(scores, plans[i], table, k, PAGE)[1] for i in range(64)]
    for turn in range(10_000):
        live.copy_(plans[turn % 64])
        graph.replay()
        if rng.random() < 0.02:
            torch.cuda.synchronize()
            assert torch.equal(raw.cpu(), expected[turn % 64]), f"replay {turn}"
    torch.cuda.synchronize()
    assert torch.equal(raw.cpu(), expected[9_999 % 64])


@gpu
def test_refusals_leave_the_rest_to_the_engine():
    from dsv4_sm120 import topk

    scores, lengths, table, k = make(2, 4096, [4096, 600], device="cuda")
    out = torch.empty(2, k, dtype=torch.int32, device="cuda")
    assert topk.refusal(scores, lengths, table, out, PAGE) is None
    assert "float32" in topk.refusal(scores.half(), lengths, table, out, PAGE)
    assert "aligned" in topk.refusal(scores[:, 1:-3], lengths, table, out, PAGE)
    assert "power of two" in topk.refusal(scores, lengths, table, out, 48)
    assert "dense" in topk.refusal(
        scores, lengths, table, torch.empty(2, 2 * k, dtype=torch.int32, device="cuda")[:, :k], PAGE
    )
    assert "cpu" in topk.refusal(scores, lengths.cpu(), table, out, PAGE)
    assert "more than" in topk.refusal(
        scores, lengths, table, torch.empty(2, 4096, dtype=torch.int32, device="cuda"), PAGE
    )
