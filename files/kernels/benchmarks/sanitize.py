# SPDX-License-Identifier: Apache-2.0
"""Runs top-k, the indexer and the fused pair once each on awkward shapes, for compute-sanitizer.

    compute-sanitizer --tool memcheck|racecheck|initcheck|synccheck --error-exitcode 9 python3 benchmarks/sanitize.py LIB CUDART

LIB: folder of the compiled libraries; CUDART: path of libcudart.so. Logits past a row's length are left uninitialised on purpose;
scores there are NaN, as top-k asks for its first values before it knows the length.
"""

from __future__ import annotations

import ctypes
import pathlib
import random
import sys

from plain_cuda import Runtime, ints, must

library = pathlib.Path(sys.argv[1])
runtime = Runtime(sys.argv[2])
malloc, upload = runtime.malloc, runtime.upload
rng = random.Random(1)


def floats(count: int) -> bytes:
    return bytes((ctypes.c_float * count)(*[rng.gauss(0, 1) for _ in range(count)]))


def download(pointer: int, count: int) -> list[int]:
    return list((ctypes.c_int * count).from_buffer(runtime.download(pointer, 4 * count)))


P, L, I = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int
topk = ctypes.CDLL(str(library / "_dsv4_topk.so")).dsv4_topk
topk.argtypes = [P, L, I, P, P, L, P, P, P, L, I, I, I, I, I, I, P]
indexer = ctypes.CDLL(str(library / "_dsv4_indexer.so")).dsv4_indexer
indexer.argtypes = [P, L, P, L, P, L, P, P, L, I, P, L, P, L, I, I, I, I, P]

WIDTH, K, PAGES = 65536, 512, 1024
lengths = [0, 100, 513, 5001, 40_003, 20_000, 30_000]
rows = len(lengths)
used = [-(-n // 64) for n in lengths]
entries, number = [], 0
for row in range(rows):
    entries += list(range(number, number + used[row])) + [-1] * (PAGES - used[row])
    number += used[row]
table, seq = upload(ints(entries)), upload(ints(lengths))
scores = upload(b"\xff" * (rows * WIDTH * 4))
for row, length in enumerate(lengths):
    if length:
        # the last row is all ties: the slow way
        upload(floats(length) if row < rows - 1 else bytes(4 * length), scores + row * WIDTH * 4)
slots, raw = malloc(rows * K * 4), malloc(rows * K * 4)
stride = WIDTH // 16
maxima = malloc(rows * stride * 4)


def select(values: int, seq_lens: int, counter_set: int, blocks: int, ready: bool = False) -> list[int]:
    """Runs top-k to its end; returns the tokens of all rows."""
    must(topk(values, WIDTH, WIDTH, seq_lens, table, PAGES, slots, raw, maxima, stride, rows, K, 64, counter_set, ready, blocks, None))
    runtime.synchronize()
    return download(raw, rows * K)


first = select(scores, seq, 0, 8)
# few blocks, so each has several units, and enough for the smallest chunks; other counter sets
for counter_set, blocks in ((1, 2), (3, 132)):
    assert select(scores, seq, counter_set, blocks) == first, "top-k depends on the number of blocks"
# no row is long
select(scores, upload(ints([min(n, 16_384) for n in lengths])), 4, 132)
assert sum(i >= 0 for i in first) == sum(min(n, K) for n in lengths)

e4m3 = [x for x in range(256) if x & 0x7F != 0x7F]
block = bytes(rng.choices(e4m3, k=8192))
pool = b"".join(block[i % 8192 :] + block[: i % 8192] + floats(64) for i in range(0, number * 37, 37))
cache, q = upload(pool), upload(bytes(rng.choices(e4m3, k=rows * 8192)))
weights = upload(floats(rows * 64))
logits = malloc(rows * WIDTH * 4)
# with few blocks by the largest tiles, with more by smaller ones, with many each warp has two tiles or one of its own
for next_n, blocks in ((1, 8), (7, 8), (1, 400), (1, 1000), (1, 2500), (7, 1000)):
    shape = (q, 8192, cache, 8448, weights, 64, seq, table, PAGES, PAGES, logits, WIDTH, None, 0)
    must(indexer(*shape, rows // next_n, next_n, 0, blocks, None))
    runtime.synchronize()
for blocks in (8, 400, 1000, 2500):
    shape = (q, 8192, cache, 8448, weights, 64, seq, table, PAGES, PAGES, logits, WIDTH, maxima, stride)
    must(indexer(*shape, rows, 1, K, blocks, None))
    assert sum(i >= 0 for i in select(logits, seq, 2, 8, ready=True)) == sum(min(n, K) for n in lengths)
print("ran")
