# SPDX-License-Identifier: Apache-2.0
"""Runs sparse-MLA decode in each of its forms on awkward shapes, for compute-sanitizer.

    compute-sanitizer --tool memcheck|racecheck|initcheck|synccheck --error-exitcode 9 python3 benchmarks/sanitize_sparse_mla.py LIB CUDART

LIB: folder of the compiled library; CUDART: path of libcudart.so. The forms' outputs are held against each other.
"""

from __future__ import annotations

import array
import ctypes
import pathlib
import random
import sys

from plain_cuda import Runtime, ints, must

runtime = Runtime(sys.argv[2])
malloc, upload = runtime.malloc, runtime.upload
library = ctypes.CDLL(str(pathlib.Path(sys.argv[1]) / "_dsv4_sparse_mla.so"))
P, I, L, F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
SCOPE = [P, L, I, P, L, P, I]
decode = library.dsv4_sparse_mla_decode
decode.argtypes = [P, L, L, I, I, *SCOPE, *SCOPE, P, F, P, L, L, P, P, I, P, P, I, I, I, P]
plan = library.dsv4_sparse_mla_plan
plan.argtypes = [P, I, I, P, I, I, I, I, P, P, I, P]
rng = random.Random(1)
RECORD_BYTES = 4 * library.dsv4_sparse_mla_constant(1)
LEAST = 6


def bfloats(count: int) -> bytes:
    # the upper halves of floats
    return b"".join(array.array("f", [rng.gauss(0, 1)]).tobytes()[2:] for dummy in range(count))


def download(pointer: int, count: int) -> list[float]:
    raw = runtime.download(pointer, 2 * count)
    return array.array("f", b"".join(b"\0\0" + raw[i : i + 2] for i in range(0, len(raw), 2))).tolist()


def cache(pages: int, tokens: int) -> tuple[int, int]:
    """Returns a pool of random tokens, exactly as long as its tokens need, and its page pitch."""
    pitch = -(-tokens * 584 // 576) * 576
    e4m3 = [x for x in range(256) if x & 0x7F < 0x48]
    rows = [bytes(rng.choices(e4m3, k=448)) + bfloats(64) for dummy in range(8)]
    page = b"".join(rows[i % 8] for i in range(tokens)) + bytes(rng.choices(range(120, 125), k=8 * tokens))
    return upload((page.ljust(pitch, b"\xff") * pages)[: pitch * (pages - 1) + 584 * tokens]), pitch


def scope(tokens: int, pages: int, width: int, lengths: list[int]) -> list:
    pool, pitch = cache(pages, tokens)
    listed = [-1 if rng.random() < 0.1 else rng.randrange(pages * tokens) for dummy in range(width * len(lengths))]
    return [pool, pitch, tokens.bit_length() - 1, upload(ints(listed)), width, upload(ints(lengths)), width]


def run(heads: int, rows: int, scopes: list[list], widest: int) -> None:
    q, sink = upload(bfloats(rows * heads * 512)), upload(array.array("f", [rng.gauss(0, 1) for dummy in range(heads)]).tobytes())
    second = scopes[1] if len(scopes) > 1 else [None, 0, 0, None, 0, None, 0]
    want = None
    for cluster in range(1, 9):
        for head_tiles in (1, 2) if heads % 32 == 0 else (1,):
            out, lse = malloc(rows * heads * 1024), malloc(rows * heads * 4)
            units = rows + 4 if widest > 32 else rows
            items = partial = counters = None
            if units > rows:
                records = 2 * (units - rows) * -(-heads // 16)
                items, partial, counters = malloc(units * 32), malloc(records * RECORD_BYTES), malloc(4 * records * cluster)
                first = scopes[0]
                must(
                    plan(
                        first[5], first[6], int(len(scopes) > 1), second[5], second[6], rows, units,
                        min(LEAST, widest), items, counters, records * cluster, None,
                    )
                )  # fmt: skip
            code = decode(
                q, heads * 512, 512, rows, heads, *scopes[0], *second, sink, 512**-0.5, out, heads * 512, 512, lse, items, units,
                partial, counters, cluster, head_tiles, 0, None,
            )  # fmt: skip
            if code == -1:
                continue  # a cluster that is not built
            must(code)
            runtime.synchronize()
            found = download(out, rows * heads * 512)
            want = want or found
            worst = max(abs(a - b) / max(1, abs(b)) for a, b in zip(found, want))
            assert worst < 0.02, f"cluster {cluster}, {head_tiles} head tiles: off by {worst}"
    assert want, "nothing ran"


run(16, 3, [scope(256, 2, 128, [128, 77, 0]), scope(64, 9, 512, [512, 33, 0])], 20)
run(24, 2, [scope(64, 3, 128, [100, 1])], 4)
run(32, 3, [scope(256, 2, 128, [128, 5, 0]), scope(2, 700, 1300, [1300, 40, 0])], 45)
print("ran")
