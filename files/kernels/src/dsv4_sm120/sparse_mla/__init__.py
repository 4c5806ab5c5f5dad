# SPDX-License-Identifier: Apache-2.0
"""Sparse-MLA decode over DeepSeek-V4's fp8 latent cache: launcher of kernel.cu.

Takes the engine's own call (`flash_mla_with_kvcache_sm120` of SGLang 0.5.23) and runs the sliding window and the selected
tokens as one list under one softmax. Lengths are read on the GPU only, so a captured graph serves every length.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
from typing import TYPE_CHECKING

from .. import _lib, build_info

if TYPE_CHECKING:
    import torch

LIBRARY = "sparse_mla"
TILE = 32
HEAD_DIM = 512
TOKEN_BYTES = 584
ITEM_INTS = 8
RECORD_FLOATS = 16 * 512 + 8 * (8 * 16 + 16)
# fewest tiles that a block is given before a row is divided among more units: a step of the kernel
LEAST_TILES_PER_BLOCK = 2
# in tiles of 16 heads: what a tile of 32 heads costs, and a block beside its tiles: for each 16 heads, each block of its cluster,
# each 256 pieces of four sums that it merges
PAIR_COST = 1.5
BLOCK_COST = 2.2
SOURCE_COST = 0.2
PIECES_COST = 0.35
# the merge of a row's units through global memory: by itself, and for each unit, shared by the cluster's blocks
MERGE_COST = 5
UNIT_COST = 2.5
# rows up to this many tiles (1,024 tokens) are never divided: no plan, no merge in global memory
UNDIVIDED_TILES = 32
CLUSTERS = (8, 7, 6, 5, 4, 3, 2, 1)

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_SCOPE = [_P, _L, _I, _P, _L, _P, _I]
_DECODE = [_P, _L, _L, _I, _I, *_SCOPE, *_SCOPE, _P, _F, _P, _L, _L, _P, _P, _I, _P, _P, _I, _I, _I, _P]
_PLAN = [_P, _I, _I, _P, _I, _I, _I, _I, _P, _P, _I, _P]


class Unsupported(ValueError):
    """The call's shapes, types, layout or GPU are not what this kernel was made for; the caller takes its own path."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """How a call is laid over the GPU; follows from sizes alone, never from lengths.

    head_tiles: 16 heads or 32 a block. head_blocks: blocks for a row's heads. cluster: blocks that share a unit of work.
    units: the grid's units (at least the rows). least: fewest tiles of a unit. records: merge records (of 16 heads) needed in
    global memory. A plan is needed when units > rows.
    """

    rows: int
    head_tiles: int
    head_blocks: int
    cluster: int
    units: int
    least: int
    records: int

    @property
    def planned(self) -> bool:
        return self.units > self.rows


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Multiprocessors, and how many clusters of each size run at the same time: (size, number) by falling size, down to 1."""

    sms: int
    clusters: tuple[tuple[int, int], ...]

    def at_once(self, cluster: int) -> int:
        return dict(self.clusters)[cluster]


@functools.cache
def launch_shape(
    rows: int, heads: int, widths: tuple[int, ...], chip: Gpu, cluster: int | None = None, head_tiles: int | None = None
) -> Shape:
    """Returns the launch for `rows` rows of `heads` heads and index widths `widths`; the last two arguments force its form.

    The form is the one with the least work of a block, in tiles: those of a full row divided among the blocks that it can have
    at the same time, the merge of its cluster, and what a block costs beside them, once for each wave; and what merging through
    global memory costs where a row has several units. A row can have more units when there is room for them and its width could
    fill them.
    """
    tiles_of_heads = -(-heads // 16)
    widest = max(1, sum(-(-width // TILE) for width in widths))
    divided = widest > UNDIVIDED_TILES

    def most_units(size: int) -> int:
        return -(-widest // (LEAST_TILES_PER_BLOCK * size)) if divided else 1

    def work(form: tuple[int, int]) -> float:
        size, tiles = form
        clusters, room = rows * -(-tiles_of_heads // tiles), chip.at_once(size)
        units = max(1, min(room // clusters, most_units(size)))
        merge = MERGE_COST + UNIT_COST * units / size if units > 1 else 0
        share = -(-widest // (units * size)) * (PAIR_COST if tiles == 2 else 1)
        block = BLOCK_COST * tiles + SOURCE_COST * size + PIECES_COST * -(-8 * tiles // size)
        return -(-clusters // room) * (share + block) + merge

    forms = [
        (size, tiles)
        for size, _number in chip.clusters
        for tiles in (1, 2)
        if size == (cluster or size) and tiles == (head_tiles or tiles) and (tiles == 1 or tiles_of_heads % 2 == 0)
    ]
    _require(bool(forms), f"no launch with clusters of {cluster} and {head_tiles} head tiles")
    cluster, head_tiles = min(forms, key=lambda form: (work(form), form))
    head_blocks = -(-tiles_of_heads // head_tiles)
    room = max(1, chip.at_once(cluster) // head_blocks)
    units = min(max(room, rows + room // 4), rows * most_units(cluster))
    # only rows of two units or more write records: n <= 2 (n - 1)
    records = 2 * (units - rows) * head_blocks * head_tiles
    least = LEAST_TILES_PER_BLOCK * cluster
    return Shape(rows, head_tiles, head_blocks, cluster, units, least, records)


@functools.cache
def gpu(index: int) -> Gpu:
    """Returns what the launch needs to know of a GPU; raises Unsupported when the library has no code for it."""
    import torch

    from .. import _torch

    capability, built = _torch.capability(index), build_info()["archs"]
    if capability not in ("sm_90", "sm_120a") or (built and capability not in built):
        raise Unsupported(f"no code for {capability}")
    largest = int(os.environ.get("DSV4_SM120_MLA_CLUSTER") or CLUSTERS[0])
    if largest not in CLUSTERS:
        raise Unsupported(f"DSV4_SM120_MLA_CLUSTER={largest} is none of {CLUSTERS}")
    ask = _lib.function(LIBRARY, "dsv4_sparse_mla_active_clusters", [_I, _P])
    found = []
    with torch.cuda.device(index):
        for cluster in CLUSTERS:
            number = ctypes.c_int(0)
            _lib.check(LIBRARY, "active_clusters", ask(cluster, ctypes.byref(number)))
            if number.value > 0 and (cluster <= largest or cluster == 1):
                found.append((cluster, number.value))
    return Gpu(_torch.multiprocessors(index), tuple(found))


def block_scaled() -> bool:
    """Says whether scores are to be made by block-scaled fp8 mma, which only sm_120a has: DSV4_SM120_MLA_BLOCK_SCALED=1.

    Off until it has been measured on that chip.
    """
    return os.environ.get("DSV4_SM120_MLA_BLOCK_SCALED") == "1"


class Workspace:
    """Buffers of one GPU, shared by its calls in stream order; they never grow, so captured graphs keep their pointers."""

    def __init__(self, device: torch.device, chip: Gpu):
        import torch

        # an inference tensor could not be written outside inference mode
        with torch.inference_mode(False):
            self.records = 4 * chip.at_once(1)
            self.partial = torch.empty(self.records * RECORD_FLOATS, dtype=torch.float32, device=device)
            self.counters = torch.zeros(self.records * CLUSTERS[0], dtype=torch.int32, device=device)
        self.device = device
        # per kind of layer and batch size: the plan's buffer, and for which lengths of which capture it was last computed
        self.plans: dict[tuple, torch.Tensor] = {}
        self.planned_for: dict[tuple, tuple] = {}

    def plan_buffer(self, key: tuple, units: int) -> torch.Tensor:
        import torch

        found = self.plans.get(key)
        if found is None:
            with torch.inference_mode(False):
                found = torch.empty(units * ITEM_INTS, dtype=torch.int32, device=self.device)
            self.plans[key] = found
        return found


_workspaces: dict[int, Workspace] = {}


def workspace(device: torch.device) -> Workspace:
    """Returns the workspace of a GPU, made at the first call (about 20 MB on 132 SMs)."""
    import torch

    index = device.index if device.index is not None else torch.cuda.current_device()
    found = _workspaces.get(index)
    if found is None:
        found = _workspaces[index] = Workspace(torch.device("cuda", index), gpu(index))
    return found


def new_step() -> None:
    """Says that lengths changed since the last call: the next call of each kind plans anew.

    Needed only between two steps captured into one graph with the same length tensors; a plan of other lengths gives the
    same output, more slowly.
    """
    for found in _workspaces.values():
        found.planned_for.clear()


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise Unsupported(what)


@dataclasses.dataclass
class _Scope:
    cache: torch.Tensor
    pitch: int
    shift: int
    indices: torch.Tensor
    stride: int
    lengths: torch.Tensor | None
    width: int

    def arguments(self) -> list:
        return [
            self.cache.data_ptr(),
            self.pitch,
            self.shift,
            self.indices.data_ptr(),
            self.stride,
            _address(self.lengths),
            self.width,
        ]


def _scope(name: str, cache: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor | None, rows: int, device) -> _Scope:
    import torch

    _require(cache.dtype in (torch.uint8, torch.float8_e4m3fn), f"{name}: cache of {cache.dtype}")
    _require(
        cache.dim() == 4 and cache.shape[2] == 1 and cache.shape[3] == TOKEN_BYTES,
        f"{name}: cache of shape {tuple(cache.shape)}, want [pages, tokens, 1, {TOKEN_BYTES}]",
    )
    tokens = cache.shape[1]
    _require(tokens & (tokens - 1) == 0 and tokens <= 65536, f"{name}: {tokens} tokens a page")
    # the only stride that means anything: the view's others are those of a record that does not exist
    pitch = cache.stride(0)
    _require(cache.shape[0] <= 1 or pitch >= tokens * TOKEN_BYTES, f"{name}: page pitch {pitch}")
    pitch = max(pitch, tokens * TOKEN_BYTES) if cache.shape[0] <= 1 else pitch
    if cache.shape[0] <= 1:
        pitch = -(-pitch // 16) * 16
    _require(pitch % 16 == 0 and cache.data_ptr() % 16 == 0, f"{name}: cache not aligned to 16 bytes")
    _require(indices.dtype == torch.int32, f"{name}: indices of {indices.dtype}")
    if indices.dim() == 3:
        _require(indices.shape[1] == 1, f"{name}: indices of shape {tuple(indices.shape)}")
        indices = indices[:, 0]
    _require(indices.dim() == 2 and indices.shape[0] == rows, f"{name}: indices of shape {tuple(indices.shape)}")
    width = indices.shape[1]
    _require(width <= 1 or indices.stride(1) == 1, f"{name}: indices are not contiguous in a row")
    if lengths is not None:
        _require(lengths.dtype == torch.int32 and lengths.numel() == rows, f"{name}: lengths {lengths.dtype} x {lengths.numel()}")
        # a tensor of one element can carry any stride
        _require(rows == 1 or (lengths.dim() == 1 and lengths.stride(0) == 1), f"{name}: lengths are not contiguous")
    for tensor in (cache, indices, lengths):
        _require(tensor is None or tensor.device == device, f"{name}: on {getattr(tensor, 'device', None)}, q on {device}")
    # one row's stride can be anything
    return _Scope(cache, pitch, tokens.bit_length() - 1, indices, indices.stride(0) if rows > 1 else width, lengths, width)


def sparse_mla_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    cluster: int | None = None,
    head_tiles: int | None = None,
    scaled: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends each row of `q` to its listed tokens of one or two caches.

    q: [rows, heads, 512] bf16, innermost contiguous. k_cache: [pages, tokens a page (a power of two), 1, 584] uint8 or
    e4m3, the engine's view of a block-split page; only stride(0), the page pitch in bytes, is used. indices: [rows, width]
    or [rows, 1, width] int32 token numbers (page * tokens + offset), negative ones are skipped wherever they stand.
    topk_length: [rows] int32, how many leading indices count (all, if None; clamped to the width). attn_sink: [heads] fp32
    natural-log sink, takes its share of the softmax's sum once. The same again for the second cache, if there is one.
    softmax_scale: 512**-0.5 by default, in units of the natural exponent.

    Returns out [rows, heads, 512] bf16 and lse [rows, heads] fp32 (natural logarithm, without the sink). A row with no
    valid token gives 0 and -inf. Raises Unsupported before anything is launched, KernelError when the launch fails.
    Source: the cache layout and the call are SGLang 0.5.23's (`kernels/ops/attention/flash_mla_sm120.py`).
    """
    import torch

    _require(q.is_cuda, "q is not on a GPU")
    _require(q.dtype == torch.bfloat16 and q.dim() == 3 and q.shape[2] == HEAD_DIM, f"q {q.dtype} {tuple(q.shape)}")
    rows, heads, _ = q.shape
    _require(rows >= 1 and 1 <= heads <= 256, f"{rows} rows of {heads} heads")
    _require(q.stride(2) == 1 and q.stride(0) % 8 == 0 and q.stride(1) % 8 == 0 and q.data_ptr() % 16 == 0, "q is not aligned")
    device = q.device
    first = _scope("k_cache", k_cache, indices, topk_length, rows, device)
    second = None
    if extra_k_cache is not None:
        _require(extra_indices is not None, "extra_k_cache without indices")
        second = _scope("extra_k_cache", extra_k_cache, extra_indices, extra_topk_length, rows, device)
    if attn_sink is not None:
        _require(
            attn_sink.dtype == torch.float32 and attn_sink.is_contiguous() and attn_sink.numel() >= heads and attn_sink.device == device,
            f"attn_sink {attn_sink.dtype} x {attn_sink.numel()}",
        )
    if softmax_scale is None:
        softmax_scale = HEAD_DIM**-0.5
    if out is None:
        out = torch.empty((rows, heads, HEAD_DIM), dtype=torch.bfloat16, device=device)
    lse = torch.empty((rows, heads), dtype=torch.float32, device=device)

    chip = gpu(device.index if device.index is not None else torch.cuda.current_device())
    widths = (first.width, second.width if second else 0)
    if scaled is None:
        scaled = block_scaled()
    shape = launch_shape(rows, heads, widths, chip, cluster, 1 if scaled else head_tiles)
    space = workspace(device)
    stream = torch.cuda.current_stream(device).cuda_stream
    with torch.cuda.device(device):
        items = _plan(space, shape, first, second, widths, stream) if shape.planned else None
        code = _lib.function(LIBRARY, "dsv4_sparse_mla_decode", _DECODE)(
            q.data_ptr(), q.stride(0), q.stride(1), rows, heads,
            *first.arguments(),
            *(second.arguments() if second else [None, 0, 0, None, 0, None, 0]),
            _address(attn_sink), softmax_scale,
            out.data_ptr(), out.stride(0), out.stride(1), lse.data_ptr(),
            _address(items), shape.units, space.partial.data_ptr(), space.counters.data_ptr(), shape.cluster, shape.head_tiles, scaled, stream,
        )  # fmt: skip
    _lib.check(LIBRARY, "sparse_mla_decode", code)
    return out, lse


def _plan(space: Workspace, shape: Shape, first: _Scope, second: _Scope | None, widths: tuple, stream: int) -> torch.Tensor:
    """Returns the plan's buffer, computing it unless this capture has already planned for the same length tensors."""
    _require(shape.records <= space.records, f"{shape.records} merge records, room for {space.records}")
    key = (shape, widths, second is not None)
    items = space.plan_buffer(key, shape.units)
    capture = ctypes.c_ulonglong(0)
    code = _lib.function(LIBRARY, "dsv4_sparse_mla_capture_id", [_P, _P])(stream, ctypes.byref(capture))
    _lib.check(LIBRARY, "capture_id", code)
    lengths = (first.lengths, second.lengths if second else None)
    # the tensors are kept, so that within a capture nothing else gets their addresses
    now = (capture.value, *lengths)
    last = space.planned_for.get(key)
    fresh = capture.value != 0 and last is not None and last[0] == now[0]
    if fresh and all(_address(a) == _address(b) for a, b in zip(last[1:], lengths)):
        return items
    code = _lib.function(LIBRARY, "dsv4_sparse_mla_plan", _PLAN)(
        _address(lengths[0]), widths[0], int(second is not None), _address(lengths[1]), widths[1], shape.rows,
        shape.units, shape.least, items.data_ptr(), space.counters.data_ptr(), shape.records * shape.cluster, stream,
    )  # fmt: skip
    _lib.check(LIBRARY, "sparse_mla_plan", code)
    space.planned_for[key] = now
    return items


def flash_mla_with_kvcache_sm120(**kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    """The engine's call: q [rows, 1, heads, 512]; returns out [rows, 1, heads, 512] bf16 and lse [rows, heads, 1] fp32.

    Keyword arguments and shapes as in SGLang 0.5.23's function of this name; arguments that it ignores are ignored.
    Raises Unsupported for a call that this kernel was not made for, before anything is launched.
    """
    q = kwargs["q"]
    _require(q.dim() == 4 and q.shape[1] == 1, f"q of shape {tuple(q.shape)}")
    _require(kwargs.get("head_dim_v", HEAD_DIM) == HEAD_DIM, f"head_dim_v {kwargs.get('head_dim_v')}")
    out, lse = sparse_mla_decode(
        q[:, 0],
        kwargs["k_cache"],
        kwargs["indices"],
        kwargs.get("topk_length"),
        kwargs.get("attn_sink"),
        kwargs.get("softmax_scale"),
        kwargs.get("extra_k_cache"),
        kwargs.get("extra_indices_in_kvcache"),
        kwargs.get("extra_topk_length"),
    )
    return out.unsqueeze(1), lse.unsqueeze(2)
