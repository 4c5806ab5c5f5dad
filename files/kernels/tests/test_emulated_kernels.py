# SPDX-License-Identifier: Apache-2.0
"""The text of top-k and the indexer, for both architectures, run by tests/emulator on the CPU, against the references.

No GPU of the target's architecture is at hand, so this is what has run of its code: the logic, the layout of operands and
the barriers, not what the compiler makes of them.
"""

import ctypes
import pathlib
import random
import shutil
import subprocess

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from dsv4_sm120 import indexer, topk  # noqa: E402
from dsv4_sm120.indexer import reference as indexer_reference  # noqa: E402
from dsv4_sm120.indexer.test_indexer import make as indexer_case  # noqa: E402
from dsv4_sm120.topk import reference as topk_reference  # noqa: E402
from dsv4_sm120.topk.contest import means_of_neighbours  # noqa: E402
from dsv4_sm120.topk.test_topk import make as topk_case  # noqa: E402

EMULATOR = pathlib.Path(__file__).with_name("emulator")
SOURCE = EMULATOR.parents[1] / "src" / "dsv4_sm120"
PAGE = 64
ARCHS = {"sm_90": 900, "sm_120a": 1200}
compiler = shutil.which("g++")
pytestmark = pytest.mark.skipif(compiler is None, reason="needs g++")


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    """Returns a kernel folder's C function, compiled for the CPU: emulated(folder, arch, argtypes)."""
    folder, made = tmp_path_factory.mktemp("emulated"), {}

    def get(name, arch, argtypes):
        if (name, arch) not in made:
            library = folder / f"{name}_{arch}.so"
            # no symbol is shared between the libraries
            command = [compiler, "-x", "c++", "-std=c++17", "-O2", "-w", "-fPIC", "-shared", "-fno-gnu-unique"]
            command += [f"-D__CUDA_ARCH__={ARCHS[arch]}", f"-I{EMULATOR}", f"-I{SOURCE / 'csrc' / 'common'}"]
            subprocess.run([*command, str(SOURCE / name / "kernel.cu"), "-o", str(library)], check=True)
            made[name, arch] = getattr(ctypes.CDLL(str(library)), f"dsv4_{name}")
            made[name, arch].argtypes = argtypes
        return made[name, arch]

    return get


def select(function, case, blocks, ready=False):
    """Runs top-k; ready: with the granule maxima as the indexer leaves them. Returns (slots, raw)."""
    scores, lengths, table, k = case
    rows, width = scores.shape
    slots = torch.full((rows, k), -7, dtype=torch.int32)
    raw = slots.clone()
    maxima = torch.full((rows, topk.maxima_stride(width)), float("nan"))
    if ready:
        for row in range(rows):
            for start in range(0, max(0, int(lengths[row])), topk.GRANULE):
                end = min(start + topk.GRANULE, int(lengths[row]))
                maxima[row, start // topk.GRANULE] = scores[row, start:end].max()
    pointers = [tensor.data_ptr() for tensor in (slots, raw, maxima)]
    code = function(
        scores.data_ptr(), scores.stride(0), width, lengths.data_ptr(), table.data_ptr(), table.stride(0),
        *pointers, maxima.shape[1], rows, k, PAGE, 0, int(ready), blocks, None,
    )  # fmt: skip
    assert code == 0
    return slots, raw


def check_selection(function, case, blocks=7, ready=False):
    slots, raw = select(function, case, blocks, ready)
    expected_slots, expected_raw = topk_reference.topk_transform_paged(*case[:3], case[3], PAGE)
    assert torch.equal(raw, expected_raw) and torch.equal(slots, expected_slots)


@pytest.fixture(scope="session", params=ARCHS)
def emulated_topk(emulated, request):
    return emulated("topk", request.param, topk._ARGUMENTS)


@pytest.mark.parametrize("lengths", [[0, 1, 512, 513, -3], [1024, 4095, 4096, 4097], [16383, 16384, 5000]])
def test_topk_short_rows(emulated_topk, lengths):
    check_selection(emulated_topk, topk_case(len(lengths), 16384, lengths))


@pytest.mark.parametrize("lengths", [[16385], [131_072, 700, 16_400, 0], [65_535, 40_003]])
@pytest.mark.parametrize("ready", [False, True])
def test_topk_long_rows(emulated_topk, lengths, ready):
    check_selection(emulated_topk, topk_case(len(lengths), 131_072, lengths), ready=ready)


@pytest.mark.parametrize("k", [1, 1000, 1025, 2048])
def test_topk_every_k(emulated_topk, k):
    check_selection(emulated_topk, topk_case(3, 65_536, [300, 6000, 40_000], k=k))


@pytest.mark.parametrize("levels", [1, 2, 40, 4000])
def test_topk_ties(emulated_topk, levels):
    """One level: all equal. Few: the bytes of the key decide. Many: ranks within a bin decide."""
    generator = torch.Generator().manual_seed(levels)
    scores = torch.randint(0, levels, (3, 32_768), generator=generator) / levels - 0.5
    check_selection(emulated_topk, topk_case(3, 32_768, [3000, 9000, 32_000], scores=scores))


def test_topk_rows_past_the_first_32(emulated_topk):
    lengths = [600 + 40 * row for row in range(40)] + [20_000]
    check_selection(emulated_topk, topk_case(len(lengths), 20_480, lengths), blocks=9)


@pytest.mark.parametrize(
    ("lengths", "blocks"),
    [
        ([131_072], 33),
        ([131_072], 132),
        ([131_072, 131_031, 70_001, 1024], 132),
        ([131_072] * 16, 132),
        ([16_385, 16_384, 20_000, 3], 64),
    ],
    ids=str,
)
def test_topk_from_the_chunks_best(emulated_topk, lengths, blocks):
    check_selection(emulated_topk, topk_case(len(lengths), 131_072, lengths), blocks)


@pytest.mark.parametrize("k", [1, 256, 700, 1024, 2048])
def test_topk_from_the_chunks_best_for_every_k(emulated_topk, k):
    check_selection(emulated_topk, topk_case(2, 131_072, [131_072, 50_000], k=k), 132)


@pytest.mark.parametrize("width", [100_000, 65_536, 40_004])
def test_topk_from_the_chunks_best_of_every_width(emulated_topk, width):
    check_selection(emulated_topk, topk_case(2, width, [width, width // 2 + 3]), 132)


def test_topk_where_the_best_lie_together(emulated_topk):
    """In a stretch, in one chunk of them all, at the end, and alike over 64 neighbours: chunks leave too few, or too many
    are alike, and the last block has to see it."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(4, 131_072, generator=generator)
    scores[0, 100:700] += 10
    scores[1].view(-1, 32, 32)[:, 3] += 10
    scores[2, -5000:] += 3
    scores[3] = means_of_neighbours(1, 131_072, 64, generator)
    check_selection(emulated_topk, topk_case(4, 131_072, [131_072] * 4, scores=scores), 132)


def test_topk_few_numbers_among_minus_infinity(emulated_topk):
    """Fewer than k threads or granules have a number: no bound can be had from their maxima."""
    generator = torch.Generator().manual_seed(2)
    scores = torch.full((4, 131_072), float("-inf"))
    scores[0, ::600] = 1.0
    scores[1, torch.randperm(131_072, generator=generator)[:700]] = torch.randn(700, generator=generator)
    scores[2, :9000:40] = 2.0
    scores[3] = torch.randn(131_072, generator=generator)
    scores[3].view(-1, 32, 32)[:, 5] = float("-inf")
    case = topk_case(4, 131_072, [131_072, 131_072, 9000, 131_072], scores=scores)
    for blocks in (7, 132):
        for ready in (False, True):
            check_selection(emulated_topk, case, blocks, ready)


@pytest.mark.parametrize(("scale", "shift"), [(1e-6, 0.0), (1e30, 0.0), (1.0, -1e3), (1e-3, 1.0)])
def test_topk_scores_of_every_size(emulated_topk, scale, shift):
    scores = torch.randn(3, 131_072, generator=torch.Generator().manual_seed(3)) * scale + shift
    check_selection(emulated_topk, topk_case(3, 131_072, [131_072, 40_000, 2000], scores=scores), 132)


@pytest.mark.parametrize("rows", [1, 16, 33, 64, 65])
@pytest.mark.parametrize("width", [1024, 3004, 131_072])
def test_topk_where_no_row_is_long(emulated_topk, rows, width):
    rng = random.Random(rows)
    longest = min(width, 4097)
    choices = [0, 1, min(512, width), 513, 700, 1024, min(longest, 4096), longest]
    lengths = [rng.choice([*choices, rng.randint(1, longest)]) for dummy in range(rows)]
    for ready in (False, True):
        check_selection(emulated_topk, topk_case(rows, width, lengths), 132, ready)


@pytest.mark.parametrize("levels", [1, 5, 40, 400])
def test_topk_ties_in_short_rows(emulated_topk, levels):
    scores = torch.randint(0, levels, (8, 16_384), generator=torch.Generator().manual_seed(levels)) / levels - 0.5
    lengths = [513, 600, 1000, 1024, 2000, 4096, 4097, 16_384]
    check_selection(emulated_topk, topk_case(8, 16_384, lengths, scores=scores), 132)


def score(function, case, next_n=1, skip=0, blocks=5):
    """Runs the indexer; returns (logits, maxima), NaN where nothing was written."""
    q, cache, weights, lengths, table, width = case
    rows = q.shape[0]
    logits = torch.full((rows, width), float("nan"))
    maxima = torch.full((rows, topk.maxima_stride(width)), float("nan"))
    code = function(
        q.data_ptr(), q.stride(0), cache.data_ptr(), cache.stride(0), weights.data_ptr(), weights.stride(0),
        lengths.data_ptr(), table.data_ptr(), table.stride(0), table.shape[1], logits.data_ptr(), width,
        maxima.data_ptr(), maxima.shape[1], rows // next_n, next_n, skip, blocks, None,
    )  # fmt: skip
    assert code == 0
    return logits, maxima


@pytest.fixture(scope="session", params=ARCHS)
def emulated_indexer(emulated, request):
    """Returns the function, and the compute capability's major number of what it stands for."""
    return emulated("indexer", request.param, indexer._ARGUMENTS), ARCHS[request.param] // 100


def check_scores(emulated_indexer, case, major=None, **options):
    """major: of another architecture whose exactness is asked for."""
    function, its_major = emulated_indexer
    major = major or its_major
    logits, maxima = score(function, case, **options)
    expected, *scales = indexer_reference.paged_mqa_logits(*case)
    allowed = indexer_reference.allowance(*scales, major)
    for row, length in enumerate(case[3].tolist()):
        length = length if length > options.get("skip", 0) else 0
        error = (logits[row, :length].double() - expected[row, :length]).abs()
        assert (error <= allowed[row, :length]).all(), f"row {row}: {error.max()}"
        assert logits[row, length:].isnan().all(), f"row {row}: written past its length"
        most = [logits[row, i : min(i + topk.GRANULE, length)].max() for i in range(0, length, topk.GRANULE)]
        assert maxima[row, : len(most)].tolist() == [float(x) for x in most]


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ([1], {}),
        ([17, 64, 65, 0, 130, -2], {}),
        ([1500, 3, 700, 0, 2049], {"blocks": 2}),
        ([1500, 3, 700, 0, 1300], {"blocks": 3}),
        ([200, 3, 127, 0, 129], {"blocks": 7}),
        ([300, 3, 0, 512, 256, 257], {"blocks": 6, "skip": 3}),
        ([100, 600, 30, 513], {"skip": 512}),
        ([70] * 33 + [200], {"blocks": 9}),
        ([300] * 20, {"blocks": 4}),
        ([300] * 20, {"blocks": 30, "skip": 100}),
        ([40] * 62 + [3, 0, 90], {"blocks": 9}),
        ([30, 31, 32, 33, 500, 501, 502, 503], {"next_n": 4, "blocks": 3}),
        ([3200, 3201], {"next_n": 2, "blocks": 1}),
        ([62, 64, 65, 63, 10, 300, 1, 0], {"next_n": 4, "blocks": 4}),
    ],
    ids=str,
)
def test_indexer(emulated_indexer, lengths, options):
    case = indexer_case(lengths, 4096, seed=len(lengths), next_n=options.get("next_n", 1))
    check_scores(emulated_indexer, case, **options)


@pytest.mark.parametrize("weight", [1e-30, 1.0, 1e20])
def test_indexer_at_the_ends_of_the_range(emulated_indexer, weight):
    """The largest dot products that fp8 allows, beside weights that no 16-bit format could hold as they are."""
    q, cache, weights, *rest = indexer_case([300, 70, 0], 512, seed=3)
    q = q.float().sign().mul(448).to(q.dtype)
    cache[cache == 0x7F] = 0x7E  # all keys and their scales' poison; what lies past the lengths is not looked at
    flat = cache.view(cache.shape[0], -1)
    flat[:, : PAGE * 128] = q[0, 0, 5].view(torch.uint8).repeat(PAGE)
    check_scores(emulated_indexer, (q, cache, weights * weight, *rest))


def test_indexer_rounds_nothing_but_what_fp16_cannot_hold(emulated_indexer):
    """Dot products of few bits: both architectures owe fp32's exactness, the weights' lower bits included."""
    q, cache, *rest = indexer_case([300, 70], 512, seed=5)
    flat = cache.view(cache.shape[0], -1)[:, : PAGE * 128]
    flat[:] = torch.randint(-1, 2, flat.shape, generator=torch.Generator().manual_seed(5)).to(q.dtype).view(torch.uint8)
    check_scores(emulated_indexer, (q.float().sign().to(q.dtype), cache, *rest), major=12)


def test_indexer_at_random(emulated_indexer):
    rng = random.Random(seed := 11)
    print("seed", seed)
    for dummy in range(12):
        next_n = rng.choice([1, 1, 1, 2, 4])
        requests = rng.choice([1, 2, 3, 5, 16, 33, 64, 65]) if next_n == 1 else rng.choice([1, 2, 5])
        most = rng.choice([40, 300, 2500]) if requests < 8 else rng.choice([20, 100, 300])
        lengths = [rng.choice([0, -1, 1, rng.randint(0, most), most]) for dummy in range(requests * next_n)]
        case = indexer_case(lengths, 4096, seed=rng.randint(0, 999), next_n=next_n)
        check_scores(emulated_indexer, case, next_n=next_n, skip=rng.choice([0, 17, most // 2]), blocks=rng.choice([1, 3, 5, 17, 40]))
