# SPDX-License-Identifier: Apache-2.0
"""Tests of sparse-MLA decode. Those marked `gpu` need a GPU of compute capability 9.0 or 12.0 and the built library
(DSV4_SM120_LIB for a source tree); the others check the reference, the layout, the plan and the kernel's arithmetic on the
CPU. "Hazard n" is a number of the list in NOTES.md."""

from __future__ import annotations

import itertools
import math
import random
import struct

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import dsv4_sm120.sparse_mla as mla  # noqa: E402
from dsv4_sm120 import _lib, operation  # noqa: E402
from dsv4_sm120.sparse_mla import contest, hook, reference  # noqa: E402
from dsv4_sm120.sparse_mla.contest import SCALE, SCOPES, expected  # noqa: E402


def _no_gpu() -> str:
    if not torch.cuda.is_available():
        return "no GPU"
    if torch.cuda.get_device_capability() not in ((9, 0), (12, 0)):
        return "GPU of compute capability %d.%d" % torch.cuda.get_device_capability()
    try:
        _lib.load(mla.LIBRARY)
    except _lib.KernelError as error:
        return str(error)
    return ""


NO_GPU = _no_gpu()


def gpu(function):
    return pytest.mark.gpu(pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU or "-")(function))


# --- an independent reading of the cache and of the softmax: bytes, tables and Python floats ------------------------------


def e4m3(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def token(cache: torch.Tensor, slot: int) -> list[float]:
    """Decodes one token from the storage's bytes, by address."""
    raw = memoryview(cache.new_empty(0).set_(cache.untyped_storage()).numpy()).toreadonly()
    tokens = cache.shape[1]
    base = cache.storage_offset() + (slot // tokens) * cache.stride(0)
    row, scale = base + (slot % tokens) * 576, base + tokens * 576 + (slot % tokens) * 8
    nope = [e4m3(raw[row + i]) * 2.0 ** (raw[scale + i // 64] - 127) for i in range(448)]
    rope = [struct.unpack("<f", b"\0\0" + bytes(raw[row + 448 + 2 * i : row + 450 + 2 * i]))[0] for i in range(64)]
    return nope + rope


def attend(query: list[float], tokens: list[list[float]], sink: float | None) -> tuple[list[float], float]:
    """One head over decoded tokens, one at a time with a running maximum."""
    top, total, sums = -math.inf, 0.0, [0.0] * 512
    for values in tokens:
        score = math.fsum(a * b for a, b in zip(query, values)) * SCALE
        new = max(top, score)
        shrink = math.exp(top - new) if total else 0.0
        weight = math.exp(score - new)
        total = total * shrink + weight
        sums = [s * shrink + weight * v for s, v in zip(sums, values)]
        top = new
    if not tokens:
        return [0.0] * 512, -math.inf
    share = total + (math.exp(sink - top) if sink is not None else 0.0)
    return [s / share for s in sums], top + math.log(total)


def cpu_case(*shape, **options):
    return contest.case(*shape, **options, device="cpu")


# --- CPU: the reference and the bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [256, 64, 2])
@pytest.mark.parametrize("pitch_extra", [0, 576 * 3 + 16])
def test_layout_by_address(tokens, pitch_extra):
    """Hazards 12, 14: pages at any pitch; padding and the eighth scale byte are 0xFF and never seen."""
    cache = reference.random_cache(3, tokens, reference.page_bytes(tokens) + pitch_extra)
    slots = torch.tensor([0, 1, tokens - 1, tokens, 3 * tokens - 1])
    found = reference.gather(cache, slots)
    for i, slot in enumerate(slots.tolist()):
        assert found[i].tolist() == token(cache, slot)
    assert torch.isfinite(found).all()


def test_page_pitches_of_the_engine():
    assert [reference.page_bytes(n) for n in (256, 64, 2)] == [149_760, 37_440, 1_728]


def test_every_code_and_scale():
    """Hazard 15: 0 is 2^-127, 255 is NaN, 0x7F and 0xFF are NaN."""
    cache = reference.empty_cache(1, 256)
    codes = torch.arange(256, dtype=torch.uint8)
    nope = codes.unsqueeze(1).expand(256, 448)
    scales = torch.arange(256, dtype=torch.uint8).unsqueeze(1).expand(256, 7)
    reference.write(cache, torch.arange(256), nope, scales, torch.zeros(256, 64, dtype=torch.bfloat16))
    found = reference.gather(cache, torch.arange(256))
    for code in range(256):
        want = e4m3(code) * 2.0 ** (code - 127) if code != 255 else math.nan
        assert found[code, 0].item() == want or (math.isnan(want) and found[code, 0].isnan())
    assert found[0, 0] == 0 and found[127].isnan().any() and found[255, 0].isnan()


def test_quantise_round_trip():
    latent = torch.randn(50, 512)
    cache = reference.empty_cache(1, 64)
    reference.write(cache, torch.arange(50), *reference.quantise(latent))
    found = reference.gather(cache, torch.arange(50))
    assert (found - latent).norm() / latent.norm() < 0.03
    # the power of two is the smallest one that fits
    rows, _ = reference.sections(cache)
    top = rows[0, :50, :448].contiguous().view(torch.float8_e4m3fn).float().abs().view(50, 7, 64).amax(-1)
    assert (top > 224 * 0.93).all() and (top <= 448).all()


@pytest.mark.parametrize("scopes", [[(256, 1, 9)], [(64, 2, 7), (2, 20, 8)]])
@pytest.mark.parametrize("sink", [True, False])
def test_reference_against_bytes_and_plain_floats(scopes, sink):
    """Hazards 1, 3, 17, 18: the sink once, -1 anywhere, no rotation, V is all 512 values."""
    case = cpu_case(3, 2, scopes, seed=len(scopes), holes=0.3, sink=sink)
    out, lse = expected(case)
    for row, head in itertools.product(range(3), range(2)):
        tokens = []
        for cache, indices, lengths in (
            (case["k_cache"], case["indices"], case["topk_length"]),
            (case.get("extra_k_cache"), case.get("extra_indices"), case.get("extra_topk_length")),
        ):
            if cache is not None:
                listed = indices[row, : lengths[row]].tolist()
                tokens += [token(cache, slot) for slot in listed if slot >= 0]
        want, want_lse = attend(case["q"][row, head].tolist(), tokens, case["attn_sink"][head].item() if sink else None)
        assert torch.allclose(out[row, head], torch.tensor(want, dtype=torch.float64), atol=1e-12)
        assert lse[row, head].item() == pytest.approx(want_lse, abs=1e-12)


def test_reference_empty_rows():
    """Hazards 2, 5: no valid token gives 0 and -inf, with a sink as well; also when entries exist but all are -1."""
    case = cpu_case(3, 4, [(64, 2, 32)], lengths=[[0, 32, 5]])
    case["indices"][1:] = -1
    out, lse = expected(case)
    assert (out == 0).all() and (lse == -math.inf).all()


def test_reference_ignores_what_masked_entries_point_at():
    """Hazard 4: slots of NaN behind entries beyond the length."""
    case = cpu_case(2, 4, [(64, 2, 32)], holes=0, lengths=[[16, 0]])
    want = expected(case)[0]
    rows, scales = reference.sections(case["k_cache"])
    unused = sorted(set(range(128)) - set(case["indices"][0, :16].tolist()))
    for slot in unused:
        rows[slot // 64, slot % 64] = 0xFF
    case["indices"][0, 16:] = unused[0]
    assert torch.equal(expected(case)[0], want)


# --- CPU: the plan and the launch ------------------------------------------------------------------------------------------


def brute_force_size(tiles, budget, least):
    size = 1
    while sum(max(1, math.ceil(n / size)) for n in tiles) > budget:
        size += 1
    return max(size, min(least, max([1, *tiles])))


def test_plan_against_brute_force():
    rng = random.Random(5)
    for _ in range(400):
        rows = rng.randint(1, 40)
        tiles = [rng.choice([0, 1, rng.randint(0, 40), rng.randint(0, 300)]) for _ in range(rows)]
        budget, least = rows + rng.randint(0, 60), rng.choice([1, 6, 48])
        units = reference.plan(tiles, budget, least)
        assert rows <= len(units) <= budget
        size = brute_force_size(tiles, budget, least)
        slots = []
        for row, n in enumerate(tiles):
            mine = [u for u in units if u[0] == row]
            assert [u[3] for u in mine] == list(range(len(mine))) and {u[4] for u in mine} == {len(mine)}
            # contiguous, complete, even
            assert mine[0][1] == 0 and mine[-1][2] == n and all(a[2] == b[1] for a, b in zip(mine, mine[1:]))
            lengths = [u[2] - u[1] for u in mine]
            assert max(lengths) - min(lengths) <= 1 and max(lengths) <= size
            assert len(mine) == max(1, math.ceil(n / size))
            if len(mine) > 1:
                slots += [u[5] + u[3] for u in mine]
        assert slots == list(range(len(slots)))
        assert len(slots) <= 2 * (budget - rows)


H200 = mla.Gpu(132, ((8, 15), (7, 15), (6, 17), (5, 22), (4, 30), (3, 39), (2, 66), (1, 132)))
SM120 = mla.Gpu(188, ((8, 20), (4, 44), (2, 94), (1, 188)))


@pytest.mark.parametrize("chip", [H200, SM120, mla.Gpu(188, ((1, 188),)), mla.Gpu(7, ((2, 3), (1, 7)))])
def test_launch_shape(chip):
    for rows, heads, width in itertools.product([1, 2, 8, 16, 33, 64, 65, 512, 8192], [8, 16, 24, 32, 48, 64, 96], [0, 512, 4096, 8192]):
        shape = mla.launch_shape(rows, heads, (128, width), chip)
        assert shape.cluster in dict(chip.clusters)
        assert shape.head_blocks * shape.head_tiles * 16 >= heads
        # no block without a head, no block of one tile that was made for two
        assert (shape.head_blocks - 1) * shape.head_tiles * 16 + 16 * (shape.head_tiles - 1) < heads
        assert shape.units >= rows and shape.records <= 4 * chip.at_once(1)
        if width <= 512:
            assert not shape.planned

    def forms(chip, heads, width, rows):
        shapes = [mla.launch_shape(n, heads, (128, width), chip) for n in rows]
        return [(s.cluster, s.head_tiles) if heads > 16 else s.cluster for s in shapes]

    assert forms(H200, 16, 512, (1, 15, 16, 22, 23, 31, 40, 66, 67, 132)) == [8, 8, 5, 5, 4, 3, 2, 2, 3, 1]
    assert forms(H200, 16, 0, (1, 30, 31, 66, 67)) == [4, 4, 3, 2, 1]
    assert forms(H200, 16, 4096, (1, 8, 16, 64)) == [8, 6, 6, 2]
    assert forms(H200, 64, 512, (1, 4, 8, 64)) == [(8, 1), (5, 1), (3, 1), (1, 2)]
    assert forms(H200, 64, 4096, (1, 8, 16, 64)) == [(8, 1), (6, 2), (2, 2), (1, 2)]
    assert forms(SM120, 16, 512, (20, 21, 44, 45, 94, 95)) == [8, 4, 4, 2, 2, 1]
    forced = mla.launch_shape(8, 64, (128, 512), H200, cluster=4, head_tiles=1)
    assert (forced.cluster, forced.head_tiles, forced.head_blocks) == (4, 1, 4)
    with pytest.raises(mla.Unsupported):
        mla.launch_shape(1, 16, (128, 0), SM120, cluster=3)


# --- CPU: the kernel's arithmetic ------------------------------------------------------------------------------------------


def row_of_column(n):
    return 4 + ((n >> 1) ^ 1) if n & 1 else n >> 1


def swizzle(row, chunk):
    return chunk ^ (row & 2)


def banks(addresses, width):
    return [b for a in addresses for b in range(a // 4 % 32, a // 4 % 32 + width // 4)]


def test_shared_memory_reads_are_free_of_conflicts():
    assert sorted(row_of_column(n) for n in range(8)) == list(range(8))
    assert [row_of_column(2 * c) for c in range(4)] == [0, 1, 2, 3]
    assert [row_of_column(2 * c + 1) for c in range(4)] == [4 + (c ^ 1) for c in range(4)]
    for row in range(16):
        assert sorted(swizzle(row, c) for c in range(36)) == list(range(36))
    lanes = [(lane >> 2, lane & 3) for lane in range(32)]
    for chunk0 in range(0, 28, 4):
        key = [row_of_column(g) * 576 + swizzle(row_of_column(g), chunk0 + c) * 16 for g, c in lanes]
        value = [c * 576 + swizzle(c, chunk0 + (g >> 1)) * 16 + (g & 1) * 8 for g, c in lanes]
        odd = [(4 + (c ^ 1)) * 576 + swizzle(c, chunk0 + (g >> 1)) * 16 + (g & 1) * 8 for g, c in lanes]
        assert all(swizzle(4 + (c ^ 1), 0) == swizzle(c, 0) for c in range(4))
        for phase in range(4):
            assert len(set(banks(key[8 * phase : 8 * phase + 8], 16))) == 32
        for phase in range(2):
            assert len(set(banks(value[16 * phase : 16 * phase + 16], 8))) == 32
            assert len(set(banks(odd[16 * phase : 16 * phase + 16], 8))) == 32
    rope = [c * 576 + swizzle(c, 28 + g) * 16 for g, c in lanes]
    rope_key = [row_of_column(g) * 576 + swizzle(row_of_column(g), 28 + c) * 16 for g, c in lanes]
    for phase in range(4):
        assert len(set(banks(rope[8 * phase : 8 * phase + 8], 16))) == 32
        assert len(set(banks(rope_key[8 * phase : 8 * phase + 8], 16))) == 32


def joined(upper, lower, exponent):
    """What the two parts of a query stand for, [..., 448]."""
    return torch.ldexp(upper.float() + lower.float() / 16, exponent).flatten(-4)


def model(case, cluster, units, scaled=False):
    """The kernel's numbers: steps of 64 tokens, lazily moved references of rows (whole numbers) and of groups' scales, f16
    probabilities, merge."""
    q, log2e, lift = case["q"].float(), math.log2(math.e), 10
    if scaled:
        q = torch.cat([joined(*reference.split_query(case["q"][..., :448])), q[..., 448:]], -1)
    outs = []
    for row in range(q.shape[0]):
        keys, scales = [], []
        for cache, indices, lengths in (
            (case["k_cache"], case["indices"], case["topk_length"]),
            (case.get("extra_k_cache"), case.get("extra_indices"), case.get("extra_topk_length")),
        ):
            if cache is None:
                continue
            listed = indices[row, : lengths[row]]
            listed = listed[listed >= 0].long()
            data, exponents = (s[listed // cache.shape[1], listed % cache.shape[1]] for s in reference.sections(cache))
            nope = data[:, :448].contiguous().view(torch.float8_e4m3fn).float()
            keys.append(torch.cat([nope, data[:, 448:].contiguous().view(torch.bfloat16).float()], 1))
            scales.append(exponents[:, :7].float())
        k, scale = torch.cat(keys).view(-1, 8, 64), torch.cat(scales)
        share = torch.einsum("hgd,tgd->htg", q[row].view(-1, 8, 64), k)
        share[..., :7] *= torch.exp2(scale - 127)
        score = share.sum(-1) * (SCALE * log2e)
        parts = []
        blocks, tiles = cluster * units, -(-len(k) // 32)
        shares = [range(tiles * n // blocks, tiles * (n + 1) // blocks) for n in range(blocks)]
        for share in shares:
            top, total, sums = torch.full((len(q[row]),), -1e30), torch.zeros(len(q[row])), torch.zeros(len(q[row]), 8, 64)
            largest = torch.full((7,), -1000.0)
            for tile in share[::2]:
                at = slice(32 * tile, 32 * min(tile + 2, share.stop))
                now = torch.where(scale[at].amax(0) > largest + 2, scale[at].amax(0), largest)
                sums[:, :7] *= torch.exp2(largest - now).view(1, 7, 1)
                largest = now
                m = score[:, at].amax(1)
                new = torch.where(m > top + 3, m.ceil(), top)
                total, sums = total * torch.exp2(top - new), sums * torch.exp2(top - new).view(-1, 1, 1)
                top = new
                p = torch.exp2(score[:, at] - top.unsqueeze(1))
                total = total + p.sum(1)
                field = (scale[at] - largest + lift + 15).clamp(0, 30)
                factor = torch.where(field > 0, torch.exp2(field - 15), torch.zeros(())).half()
                scaled = p.half().unsqueeze(2) * factor
                assert scaled.isfinite().all()
                sums[:, :7] += torch.einsum("htg,tgd->hgd", scaled.float(), k[at, :7])
                upper = p.bfloat16().float()
                sums[:, 7] += torch.einsum("ht,td->hd", upper + (p - upper).bfloat16().float(), k[at, 7])
            shift = torch.cat([largest - 127 - lift, torch.zeros(1)])
            parts.append((top, top.unsqueeze(1) + shift, total, sums))
        top, tops = (torch.stack([part[n] for part in parts]).amax(0) for n in (0, 1))
        total = sum(torch.exp2(t - top) * n for t, _, n, _ in parts)
        sums = sum(torch.exp2(e - tops).unsqueeze(2) * s for _, e, _, s in parts)
        sink = torch.exp2(case["attn_sink"] * log2e - top) if case["attn_sink"] is not None else 0
        factor = torch.where(total.unsqueeze(1) == 0, torch.zeros(()), torch.exp2(tops - top.unsqueeze(1)) / (total + sink).unsqueeze(1))
        outs.append((sums * factor.unsqueeze(2)).flatten(1).bfloat16())
    return torch.stack(outs)


@pytest.mark.parametrize("cluster,units", [(1, 1), (8, 3)])
@pytest.mark.parametrize("spread", [0, 2, 8, 16])
@pytest.mark.parametrize("scaled", [False, True])
def test_model_of_the_kernel(cluster, units, spread, scaled):
    """Scales relative to the largest of their group lose nothing, be they 2^32 apart: the engine's are at most 2^20. Nor do
    queries in two e4m3 parts."""
    case = cpu_case(4, 16, [(256, 1, 128), (64, 16, 512)], seed=3, spread=spread, lengths=[[128, 77, 0, 1], [512, 300, 0, 0]])
    if spread > 2:
        # keep the scores in range: a softmax over one token tests nothing
        case["q"] = case["q"] * 2.0 ** -spread
    out, (want, _) = model(case, cluster, units, scaled), expected(case)
    assert ((out.double() - want).norm() / want.norm()).item() < 1.85e-3
    assert (out[2] == 0).all()


@pytest.mark.parametrize("scopes", [[(256, 1, 128)], [(256, 1, 128), (64, 16, 512)]])
@pytest.mark.parametrize("cluster,units", [(2, 1), (5, 1), (8, 3)])
def test_model_is_the_same_in_every_split(scopes, cluster, units):
    """References that are whole numbers make every rescaling exact: only the order of fp32 sums is left of a split, which now
    and then flips a bf16 rounding. (With the maxima themselves f16 rounds otherwise in each split: 0.9e-3 to 1.2e-3.)"""
    case = cpu_case(4, 16, scopes, seed=3, holes=0, lengths=[[width] * 4 for _tokens, _pages, width in scopes])
    one, many = model(case, 1, 1).double(), model(case, cluster, units).double()
    assert ((one - many).norm() / one.norm()).item() < 1e-4


# --- CPU: the block-scaled form ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("magnitude", [2.0**-60, 1.0, 2.0**60])
def test_queries_in_two_e4m3_parts(magnitude):
    """Exact for values down to 2^-13 of their block's largest, and off by 2^-21 of that at most below."""
    generator = torch.Generator().manual_seed(3)
    fall = torch.exp2(-40 * torch.rand(64, 448, generator=generator) ** 2)
    q = (torch.randn(64, 448, generator=generator) * fall * magnitude).bfloat16()
    q[0], q[1, :64] = 0, 0
    upper, lower, exponent = reference.split_query(q)
    assert upper.float().isfinite().all() and lower.float().isfinite().all()
    found, largest = joined(upper, lower, exponent), q.float().view(64, 7, 4, 2, 8).abs().amax((-3, -1), keepdim=True)
    largest = largest.expand(64, 7, 4, 2, 8).flatten(1)
    near = q.float().abs() >= largest * 2.0**-13
    assert near.float().mean() > 0.5 and torch.equal(found[near], q.float()[near])
    assert ((found - q.float()).abs() <= largest * 2.0**-21).all() and not torch.equal(found, q.float())
    # neither part alone would do
    assert ((upper.double().ldexp(exponent).flatten(1) - q.double()).norm() / q.double().norm()).item() > 1e-2


def mma_scaled(a, b, scale_a, scale_b, byte_a, byte_b):
    """mma.m16n8k32 with .scale_vec::1X by its definition, from the registers of 32 lanes: a [32, 4, 4 bytes] and b [32, 2, 4 bytes]
    decoded, scales [32, 4 bytes]. Returns d [16, 8]."""
    left, right = torch.zeros(16, 32, dtype=torch.float64), torch.zeros(32, 8, dtype=torch.float64)
    for lane, byte in itertools.product(range(32), range(4)):
        g, c = lane >> 2, lane & 3
        for r in range(4):
            left[g + 8 * (r & 1), 16 * (r >> 1) + 4 * c + byte] = a[lane, r, byte]
        for r in range(2):
            right[16 * r + 4 * c + byte, g] = b[lane, r, byte]
    # thread-id 0: lanes 4 g and 4 g + 1 give the scales of rows g and g + 8, lane 4 g that of column g
    rows = torch.tensor([float(scale_a[4 * (m % 8) + m // 8, byte_a]) - 127 for m in range(16)], dtype=torch.float64)
    columns = torch.tensor([float(scale_b[4 * n, byte_b]) - 127 for n in range(8)], dtype=torch.float64)
    return torch.exp2(rows).unsqueeze(1) * (left @ right) * torch.exp2(columns)


def test_block_scaled_fragments():
    """The registers that the block-scaled form gives to the mma are the scores of 16 heads and 8 tokens over two groups: by lanes,
    bytes and the instruction's definition against plain products."""
    case = cpu_case(1, 16, [(64, 1, 8)], seed=5, holes=0, lengths=[[8]])
    q, tokens = case["q"][0], reference.gather(case["k_cache"], torch.arange(8))
    rows, scales = (s[0] for s in reference.sections(case["k_cache"]))
    upper, lower, exponent = reference.split_query(q[:, :448])
    for quarter in range(3):
        d = torch.zeros(16, 8, dtype=torch.float64)
        a, sa = torch.zeros(2, 32, 16, 4), torch.zeros(2, 32, 4)
        b, sb = torch.zeros(2, 32, 4, 4), torch.zeros(32, 4)
        for lane in range(32):
            g, c, token = lane >> 2, lane & 3, row_of_column(lane >> 2)
            # one 16-bit load: the quarter's two scales
            sb[lane, :2] = scales[token, 2 * quarter : 2 * quarter + 2].float()
            for group in range(2):
                at = 2 * quarter + group
                chunk = rows[token, 64 * at + 16 * c : 64 * at + 16 * c + 16].contiguous().view(torch.float8_e4m3fn).float()
                b[group, lane] = chunk.view(4, 4)
                for k, h, i in itertools.product(range(2), range(2), range(2)):
                    for term, part in enumerate((upper, lower)):
                        a[group, lane, 8 * k + 4 * term + 2 * i + h] = part[g + 8 * h, at, c, k, 4 * i : 4 * i + 4].float()
                for k in range(2):
                    power = exponent[g + 8 * (c & 1), at, 0, k, 0] + 127
                    sa[group, lane, 2 * k], sa[group, lane, 2 * k + 1] = power, power - 4
        for group, k, term in itertools.product(range(2), range(2), range(2)):
            first = 8 * k + 4 * term
            d += mma_scaled(a[group][:, first : first + 4], b[group][:, 2 * k : 2 * k + 2], sa[group], sb, 2 * k + term, group)
        at = slice(128 * quarter, 128 * quarter + 128)
        want = q[:, at].double() @ tokens[[row_of_column(n) for n in range(8)]][:, at].T
        assert torch.allclose(d, want, rtol=1e-6, atol=1e-6)


# --- CPU: what the launcher refuses ----------------------------------------------------------------------------------------


def test_scope_checks():
    cache, indices, lengths = reference.empty_cache(2, 64), torch.zeros(3, 1, 128, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    cpu = torch.device("cpu")
    found = mla._scope("k", cache, indices, lengths, 3, cpu)
    assert (found.pitch, found.shift, found.width, found.stride) == (37_440, 6, 128, 128)
    # hazard 21: one row's strides mean nothing
    one = mla._scope("k", cache, torch.zeros(1, 128, dtype=torch.int32).as_strided((1, 128), (1, 1)), lengths[:1], 1, cpu)
    assert one.stride == 128
    for bad in (
        dict(cache=cache.to(torch.int16)),
        dict(cache=cache[:, :, :, :576]),
        dict(cache=cache[:, :48]),
        dict(indices=indices.long()),
        dict(indices=indices[:2]),
        dict(indices=indices.expand(3, 1, 128).permute(0, 2, 1).reshape(3, 128, 1)),
        dict(lengths=lengths.long()),
        dict(lengths=lengths[:2]),
    ):
        arguments = {"cache": cache, "indices": indices, "lengths": lengths, **bad}
        with pytest.raises(mla.Unsupported):
            mla._scope("k", arguments["cache"], arguments["indices"], arguments["lengths"], 3, cpu)
    with pytest.raises(mla.Unsupported):
        mla.flash_mla_with_kvcache_sm120(q=torch.zeros(1, 1, 16, 512), k_cache=cache, indices=indices)


# --- CPU: the hook ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def enabled(monkeypatch):
    monkeypatch.delenv("DSV4_SM120_STRICT", raising=False)
    monkeypatch.delenv("DSV4_SM120_MLA_MAX_ROWS", raising=False)
    operation.enable({hook.NAME})
    yield
    operation.enable(set())


def through_hook(**kwargs):
    return hook.around(lambda *a, **k: ("stock", a, k), **kwargs)


def test_hook_serves_and_passes_keywords(enabled, monkeypatch):
    monkeypatch.setattr(mla, "flash_mla_with_kvcache_sm120", lambda **k: ("ours", k))
    q = torch.zeros(4, 1, 16, 512)
    assert through_hook(q=q, k_cache=1) == ("ours", {"q": q, "k_cache": 1})
    operation.enable(set())
    assert through_hook(q=q)[0] == "stock"


def test_hook_leaves_prefill_and_what_it_was_not_made_for(enabled, monkeypatch):
    def refuse(**kwargs):
        raise mla.Unsupported("a reason")

    assert through_hook(q=torch.zeros(513, 1, 1, 512))[0] == "stock"
    monkeypatch.setenv("DSV4_SM120_MLA_MAX_ROWS", "64")
    monkeypatch.setattr(mla, "flash_mla_with_kvcache_sm120", refuse)
    q = torch.zeros(64, 1, 1, 512)
    assert through_hook(q=q) == ("stock", (), {"q": q})
    assert operation.enabled(hook.NAME)
    # arguments that cannot be checked by name
    assert hook.around(lambda *a, **k: ("stock", a, k), q) == ("stock", (q,), {})


def test_hook_turns_off_after_a_failed_launch(enabled, monkeypatch):
    def fail(**kwargs):
        raise _lib.KernelError("CUDA error 719")

    monkeypatch.setattr(mla, "flash_mla_with_kvcache_sm120", fail)
    assert through_hook(q=torch.zeros(4, 1, 16, 512))[0] == "stock"
    assert not operation.enabled(hook.NAME)


# --- GPU -------------------------------------------------------------------------------------------------------------------


def run(case, **options):
    """Runs the kernel on poisoned output and a workspace full of NaN."""
    space = mla.workspace(case["q"].device)
    space.partial.fill_(float("nan"))
    out = torch.full((*case["q"].shape[:2], 512), float("nan"), dtype=torch.bfloat16, device="cuda")
    out, lse = mla.sparse_mla_decode(**case, out=out, **options)
    torch.cuda.synchronize()
    assert int(space.counters.abs().sum()) == 0
    return out, lse


def compare(case, **options):
    out, lse = run(case, **options)
    assert (found := contest.fault((out, lse), expected(case))) is None, found
    return out


@gpu
@pytest.mark.parametrize("scopes", SCOPES)
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("rows", [1, 3, 16, 65])
def test_random_shapes(scopes, heads, rows):
    compare(contest.case(rows, heads, SCOPES[scopes], seed=rows + heads))


@gpu
@pytest.mark.parametrize("cluster", mla.CLUSTERS)
def test_splits_agree(cluster):
    """Splits 1 against n: 2e-4 as a whole, one bf16 step in each value; bit-equal from run to run."""
    case = contest.case(5, 16, SCOPES["c128 long"], seed=9, lengths=[[128, 1, 0, 128, 60], [4096, 4000, 17, 0, 2048]])
    out = compare(case, cluster=cluster)
    for _ in range(20):
        assert torch.equal(run(case, cluster=cluster)[0], out)
    one = run(case, cluster=1)[0].float()
    assert ((one - out.float()).norm() / one.norm()).item() < 2e-4
    assert ((one - out.float()).abs() <= one.abs() * 2.0**-7 + 1e-6).all()


@gpu
@pytest.mark.parametrize("cluster", mla.CLUSTERS)
@pytest.mark.parametrize("scopes", ["swa", "c4", "c128 long"])
def test_head_tiles_agree(cluster, scopes):
    """Blocks of 16 heads and of 32 give the same, whatever the cluster."""
    case = contest.case(3, 64, SCOPES[scopes], seed=4)
    one, two = (compare(case, cluster=cluster, head_tiles=n).float() for n in (1, 2))
    assert ((one - two).norm() / one.norm()).item() < 2e-4


@gpu
def test_many_rows():
    compare(contest.case(700, 16, [(256, 40, 128), (64, 300, 64)]))


@gpu
def test_hazards_1_2_3_5_6():
    """Sink once; empty rows; -1 inside the length, also as the only entry (C4 lengths are clamped to >= 1); whole tiles of
    -1; padded rows (index 0, length 1, extra -1)."""
    case = contest.case(6, 16, SCOPES["c4"], lengths=[[128, 0, 1, 1, 128, 128], [512, 0, 1, 1, 512, 1]])
    case["indices"][2], case["extra_indices"][2] = 0, -1
    case["indices"][3], case["extra_indices"][3] = -1, -1
    case["indices"][4, :70] = -1
    case["extra_indices"][4, 16:496] = -1
    case["extra_indices"][5] = -1
    compare(case)
    case["attn_sink"] = torch.full((16,), 50.0, device="cuda")
    assert (run(case)[0].abs() < 1e-3).all()
    case["attn_sink"] = None
    compare(case)


@gpu
def test_hazards_3_4_14_nan_behind():
    assert (found := contest.holes()) is None, found


@gpu
@pytest.mark.parametrize("place,value", [(5, 0x7F), (5, 0xFF), (447, 0x7F), ("scale", 255)])
def test_hazard_15_nan_comes_out(place, value):
    """A NaN that is listed comes out, in its row alone."""
    case = contest.case(3, 16, SCOPES["c4"], holes=0, lengths=[[64, 64, 64], [100, 100, 100]])
    slot = 256 * 40 - 1
    case["indices"].clamp_(max=slot - 1)
    case["indices"][1, 3] = slot
    rows, scales = reference.sections(case["k_cache"])
    if place == "scale":
        scales[-1, -1, 4] = value
    else:
        rows[-1, -1, place] = value
    out, dummy = run(case)
    assert out[1].isnan().any() and not out[0].isnan().any() and not out[2].isnan().any()


@gpu
def test_hazard_15_extreme_scales():
    """ue8m0 0 (2^-127) and exponents far apart within a group."""
    case = contest.case(2, 16, SCOPES["c4"], spread=16)
    case["q"] = case["q"] * 2.0**-16
    compare(case)
    reference.sections(case["k_cache"])[1][..., 2] = 0
    reference.sections(case["extra_k_cache"])[1][..., 2] = 0
    compare(case)


@gpu
def test_every_code_is_exact():
    """One listed token: the output is its value, rounded to bf16, for every e4m3 code under several scales."""
    for exponent in (100, 120, 127, 134, 150):
        cache = reference.empty_cache(1, 256, device="cuda")
        codes = torch.arange(256, dtype=torch.uint8, device="cuda")
        codes = torch.where((codes & 0x7F) == 0x7F, torch.zeros_like(codes), codes)
        nope = torch.stack([codes.roll(k) for k in range(448)], 1)
        scales = torch.full((256, 7), exponent, dtype=torch.uint8, device="cuda")
        reference.write(cache, torch.arange(256, device="cuda"), nope, scales, torch.randn(256, 64, device="cuda").bfloat16())
        q = (torch.randn(256, 16, 512, device="cuda") * 1e-3).bfloat16()
        case = {"q": q, "k_cache": cache, "indices": torch.arange(256, device="cuda", dtype=torch.int32).view(256, 1)}
        out, _ = run(case)
        want = reference.gather(cache, torch.arange(256, device="cuda")).bfloat16()
        assert torch.equal(out, want.unsqueeze(1).expand(256, 16, 512))


@gpu
@pytest.mark.parametrize("magnitude", [2.0**-20, 1.0, 2.0**10])
def test_query_range(magnitude):
    """f16 query fragments are rescaled per head: small and large queries lose nothing."""
    case = contest.case(3, 16, SCOPES["c4"], holes=0)
    case["q"] = (case["q"].float() * magnitude * torch.exp2(torch.randint(-6, 6, (3, 16, 1), device="cuda").float())).bfloat16()
    compare(case)


@gpu
def test_hazards_12_13_page_pitch_and_far_pages():
    """Pages interleaved with other layers' (pitch of 1,002,240 + 16 B and more), and rows past 4 GiB."""
    case = contest.case(4, 16, [(256, 8, 128), (64, 6000, 512)], pitch=1_002_240 - 37_440 + 16)
    assert case["extra_k_cache"].stride(0) * 6000 > 2**32
    case["extra_indices"][:, :256] = torch.randint(64 * 5900, 64 * 6000, (4, 256), device="cuda").int()
    compare(case)


@gpu
def test_hazard_10_replays_with_changing_lengths():
    assert (found := contest.replays(10_000, 500)) is None, found
    assert int(mla.workspace(torch.device("cuda")).counters.abs().sum()) == 0


@gpu
def test_plan_kernel_equals_python():
    """The device's plan against the one in reference.py, and hazard 11: it clears counters that an aborted launch left."""
    rng = random.Random(2)
    plan = _lib.function(mla.LIBRARY, "dsv4_sparse_mla_plan", mla._PLAN)
    for rows in (1, 5, 64, 1023, 1025, 3000):
        l0 = [rng.randint(0, 128) for _ in range(rows)]
        l1 = [rng.choice([0, rng.randint(0, 4096), 4096]) for _ in range(rows)]
        budget, least = rows + 30, 12
        d0, d1 = (torch.tensor(v, dtype=torch.int32, device="cuda") for v in (l0, l1))
        items = torch.full((budget, 8), 77, dtype=torch.int32, device="cuda")
        counters = torch.full((64,), 3, dtype=torch.int32, device="cuda")
        stream = torch.cuda.current_stream().cuda_stream
        assert plan(d0.data_ptr(), 128, 1, d1.data_ptr(), 4096, rows, budget, least, items.data_ptr(), counters.data_ptr(), 64, stream) == 0
        found = items.tolist()
        want = reference.plan([-(-a // mla.TILE) + -(-b // mla.TILE) for a, b in zip(l0, l1)], budget, least)
        for got, (row, begin, end, part, parts, slot) in zip(found, want):
            assert got[:7] == [row, begin, end, part | parts << 16, l0[row], l1[row], slot]
        assert all(got[0] == -1 for got in found[len(want) :]) and int(counters.sum()) == 0


@gpu
def test_stale_plan_is_right():
    """A plan made for other lengths costs time, not correctness."""
    case = contest.case(4, 16, SCOPES["c128 long"], lengths=[[128] * 4, [4096] * 4])
    run(case)
    space = mla.workspace(case["q"].device)
    frozen, original = dict(space.plans), mla._plan
    try:
        mla._plan = lambda space, shape, first, second, widths, stream: next(
            v for k, v in frozen.items() if k[0] == shape and k[1] == widths
        )
        for lengths in ([5, 4096, 4000, 0], [0, 0, 0, 0], [4096, 1, 2, 3]):
            case["extra_topk_length"].copy_(torch.tensor(lengths, device="cuda"))
            compare(case)
    finally:
        mla._plan = original


@gpu
def test_hazard_26_heads_do_not_mix():
    assert (found := contest.padded_heads()) is None, found


@pytest.mark.gpu
@pytest.mark.skipif(bool(NO_GPU) or torch.cuda.get_device_capability() != (12, 0), reason=NO_GPU or "needs compute capability 12.0")
@pytest.mark.parametrize("scopes", ["swa", "c4", "c128 long"])
@pytest.mark.parametrize("cluster", mla.CLUSTERS)
def test_block_scaled_form(scopes, cluster):
    """Scores by block-scaled mma keep the same bounds, queries of any size included; NaN and infinite ones stay in their head."""
    case = contest.case(5, 16, SCOPES[scopes], seed=6)
    case["q"] = (case["q"].float() * torch.exp2(torch.randint(-6, 6, (5, 16, 1), device="cuda").float())).bfloat16()
    compare(case, scaled=True, cluster=cluster)
    case["q"][:, 3], case["q"][:, 5, 70] = float("nan"), float("inf")
    out, _ = run(case, scaled=True, cluster=cluster)
    others = [n for n in range(16) if n not in (3, 5)]
    assert torch.equal(out[:, others], run(dict(case, q=case["q"].nan_to_num(0, 0, 0)), scaled=True, cluster=cluster)[0][:, others])


@gpu
@pytest.mark.skipif(bool(NO_GPU) or torch.cuda.get_device_capability() == (12, 0), reason="this GPU has block-scaled mma")
def test_block_scaled_form_is_refused_elsewhere():
    case = contest.case(1, 16, SCOPES["swa"])
    with pytest.raises(_lib.KernelError, match="no code for this GPU"):
        mla.sparse_mla_decode(**case, scaled=True)


@gpu
def test_engine_call():
    """The engine's shapes: [rows, 1, heads, 512] in and out, lse [rows, heads, 1], strided q, e4m3 view, unknown arguments."""
    case = contest.case(3, 16, SCOPES["c4"])
    wide = torch.randn(3, 1, 64, 512, device="cuda").bfloat16()
    wide[:, 0, :16] = case["q"]
    cache = case["k_cache"].view(torch.float8_e4m3fn)
    out, lse = mla.flash_mla_with_kvcache_sm120(
        q=wide[:, :, :16], k_cache=cache, indices=case["indices"].unsqueeze(1), topk_length=case["topk_length"],
        attn_sink=case["attn_sink"], head_dim_v=512, softmax_scale=SCALE, extra_k_cache=case["extra_k_cache"],
        extra_indices_in_kvcache=case["extra_indices"].unsqueeze(1), extra_topk_length=case["extra_topk_length"],
        block_table=None, cache_seqlens=None, tile_scheduler_metadata=None, is_fp8_kvcache=True,
    )  # fmt: skip
    want, want_lse = run(case)
    assert out.shape == (3, 1, 16, 512) and lse.shape == (3, 16, 1)
    assert torch.equal(out[:, 0], want) and torch.equal(lse[..., 0], want_lse)
