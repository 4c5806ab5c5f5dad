# SPDX-License-Identifier: Apache-2.0
"""The hooks between the engine's calls and the launchers, without PyTorch: tensors are stand-ins."""

import types

import pytest

from dsv4_sm120 import _lib, indexer, operation, sparse_mla, topk
from dsv4_sm120.indexer import hook as indexer_hook
from dsv4_sm120.sparse_mla import hook as sparse_mla_hook
from dsv4_sm120.topk import hook as topk_hook


class Tensor:
    def __init__(self, *shape, at=None):
        self.shape = shape
        self.at = id(self) if at is None else at

    def new_empty(self, shape):
        return Tensor(*shape)

    def data_ptr(self):
        return self.at


@pytest.fixture
def calls(monkeypatch):
    """Records launches in order; refusals are None unless a test sets them."""
    made = []
    monkeypatch.setattr(topk, "refusal", lambda *a: None)
    monkeypatch.setattr(indexer, "refusal", lambda *a: None)
    monkeypatch.setattr(indexer, "fused_refusal", lambda *a: None)
    monkeypatch.setattr(topk, "launch", lambda *a: made.append(("topk", a)))
    monkeypatch.setattr(indexer, "launch", lambda *a: made.append(("indexer", a)))
    monkeypatch.setattr(indexer, "fused_launch", lambda *a: made.append(("fused", a)))
    monkeypatch.delenv("DSV4_SM120_STRICT", raising=False)
    yield made
    operation.enable(set())


Q, CACHE, WEIGHT, LENGTHS, TABLE, OUT = (
    Tensor(4, 1, 64, 128),
    Tensor(9, 64, 1, 132),
    Tensor(4, 64),
    Tensor(4),
    Tensor(4, 8),
    Tensor(4, 512),
)


def engine(made):
    """Returns the engine's three functions as the registry would wrap them."""

    def stock_topk(*arguments):
        made.append(("stock topk", arguments))

    def stock_logits(*arguments):
        made.append(("stock logits", arguments))
        return Tensor(4, 512)

    def select(*arguments):
        return topk_hook.around(stock_topk, *arguments)

    def logits(*arguments):
        return indexer_hook.logits_around(stock_logits, *arguments)

    return select, logits


class Backend:
    """Calls its halves as forward_c4_indexer does."""

    def __init__(self, made, choice="sgl"):
        self.select, self.logits = engine(made)
        self.made = made
        self.dsa_topk_backend = types.SimpleNamespace(
            is_torch=lambda: choice == "torch",
            is_flashinfer=lambda: choice == "flashinfer",
            should_use_topk_v2=lambda: choice == "v2",
        )
        self.choice = choice

    def forward_c4_indexer(self, x, q_lora, c4_indexer, forward_batch):
        scores = self.logits(Q, CACHE, WEIGHT, LENGTHS, TABLE, None, 512, False)
        if self.choice == "sgl":
            self.select(scores, LENGTHS, TABLE, OUT, 64, None)
        return "done"

    def run(self, batch=None):
        return indexer_hook.forward_around(Backend.forward_c4_indexer, self, None, None, None, batch)


def verify(count):
    mode = types.SimpleNamespace(is_target_verify=lambda: True)
    return types.SimpleNamespace(forward_mode=mode, spec_info=types.SimpleNamespace(draft_token_num=count))


def names(made):
    return [name for name, _arguments in made]


def test_nothing_enabled_everything_goes_to_the_engine(calls):
    assert Backend(calls).run() == "done"
    assert names(calls) == ["stock logits", "stock topk"]


def test_each_half_alone(calls):
    operation.enable({"topk"})
    Backend(calls).run()
    operation.enable({"indexer"})
    Backend(calls).run()
    assert names(calls) == ["stock logits", "topk", "indexer", "stock topk"]


def test_both_halves_are_not_fused_unless_asked(calls):
    operation.enable({"topk", "indexer"})
    Backend(calls).run()
    assert names(calls) == ["indexer", "topk"]


def test_the_pair_is_one_launch_with_both_arguments(calls):
    operation.enable({"indexer_topk"})
    Backend(calls).run()
    (name, arguments) = calls[0]
    assert names(calls) == ["fused"] and name == "fused"
    assert arguments[:5] == (Q, CACHE, WEIGHT, LENGTHS, TABLE) and arguments[6:] == (OUT, 64, None, 1)


@pytest.mark.parametrize("choice", ["torch", "flashinfer", "v2"])
def test_another_topk_backend_is_never_fused(calls, choice):
    operation.enable({"indexer_topk"})
    Backend(calls, choice).run()
    assert names(calls) == ["stock logits"]


def test_what_cannot_be_fused_still_gets_its_logits(calls, monkeypatch):
    monkeypatch.setattr(indexer, "fused_refusal", lambda *a: "too large")
    operation.enable({"indexer_topk"})
    Backend(calls).run()
    assert names(calls) == ["indexer", "topk"]


def test_other_lengths_at_the_second_half_are_not_fused(calls):
    operation.enable({"indexer_topk"})
    backend = Backend(calls)
    select = backend.select
    backend.select = lambda scores, lengths, *rest: select(scores, Tensor(4), *rest)
    backend.run()
    assert names(calls) == ["indexer", "topk"]


def test_logits_that_go_elsewhere_are_an_error_and_leave_no_trace(calls):
    operation.enable({"indexer_topk"})
    backend = Backend(calls)
    backend.select = lambda *a: None
    with pytest.raises(RuntimeError, match="somewhere else"):
        backend.run()
    assert Backend(calls).run() == "done"


def test_verify_rows_share_their_request_when_asked(calls, monkeypatch):
    operation.enable({"indexer_topk"})
    Backend(calls).run(verify(4))
    assert calls[-1][1][-1] == 1
    monkeypatch.setenv("DSV4_SM120_SHARE_KEYS", "1")
    for count, expected in ((4, 4), (2, 2), (3, 1), (64, 1), (0, 1)):
        Backend(calls).run(verify(count))
        assert calls[-1][1][-1] == expected


def test_a_refusal_falls_back_and_is_said_once(calls, monkeypatch, caplog):
    monkeypatch.setattr(topk, "refusal", lambda *a: "scores are torch.float16")
    operation.enable({"topk"})
    select, _logits = engine(calls)
    for _ in range(3):
        select(Tensor(4, 512), LENGTHS, TABLE, OUT, 64)
    assert names(calls) == ["stock topk"] * 3
    assert sum("float16" in entry.getMessage() for entry in caplog.records) == 1


def test_clean_logits_go_to_the_engine(calls):
    operation.enable({"indexer"})
    _select, logits = engine(calls)
    logits(Q, CACHE, WEIGHT, LENGTHS, TABLE, None, 512)
    assert names(calls) == ["stock logits"]


def test_a_failed_launch_turns_the_operation_off(calls, monkeypatch):
    def broken(*arguments):
        raise _lib.KernelError("CUDA error 98")

    monkeypatch.setattr(topk, "launch", broken)
    operation.enable({"topk"})
    select, _logits = engine(calls)
    select(Tensor(4, 512), LENGTHS, TABLE, OUT, 64)
    assert names(calls) == ["stock topk"] and not operation.enabled("topk")


def test_a_failed_launch_is_fatal_in_strict_mode(calls, monkeypatch):
    def broken(*arguments):
        raise _lib.KernelError("CUDA error 98")

    monkeypatch.setattr(topk, "launch", broken)
    monkeypatch.setenv("DSV4_SM120_STRICT", "1")
    operation.enable({"topk"})
    select, _logits = engine(calls)
    with pytest.raises(_lib.KernelError):
        select(Tensor(4, 512), LENGTHS, TABLE, OUT, 64)


def test_ours_serves_the_rows_that_it_won(calls):
    backend = Backend(calls)
    operation.enable({"topk", "indexer"}, {"topk": {"all": [[1, 2], [5, 64]]}, "indexer": {"all": [[4, 4]]}})
    backend.run()
    assert [name for name, _arguments in calls] == ["indexer", "stock topk"]
    calls.clear()
    operation.enable({"topk", "indexer", "indexer_topk"}, {"indexer_topk": {"all": [[1, 3]]}})
    backend.run()
    assert [name for name, _arguments in calls] == ["indexer", "topk"]
    calls.clear()
    operation.enable({"topk", "indexer", "indexer_topk"}, {"indexer_topk": {"all": [[4, 16]]}})
    backend.run()
    assert [name for name, _arguments in calls] == ["fused"]


@pytest.mark.parametrize(
    ("page", "rows", "served"),
    [(None, 1, True), (None, 9, False), (64, 9, True), (2, 1, False), (256, 1, False)],
)
def test_ours_serves_the_layers_that_it_won(monkeypatch, page, rows, served):
    monkeypatch.setattr(sparse_mla, "flash_mla_with_kvcache_sm120", lambda **call: "ours")
    operation.enable({"sparse_mla"}, {"sparse_mla": {"swa": [[1, 4]], "c4": [[1, 64]]}})
    extra = None if page is None else Tensor(10, page, 1, 584)
    found = sparse_mla_hook.around(lambda **call: "stock", q=Tensor(rows, 1, 16, 512), extra_k_cache=extra)
    operation.enable(set())
    assert found == ("ours" if served else "stock")
