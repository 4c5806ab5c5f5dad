# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is asked of the load client, and what its JSON must hold before it counts as figures."""

from __future__ import annotations

import copy
import json
import os
import sys
import textwrap
import time

import pytest

from ansible_collections.blackwell.dsv4.plugins.module_utils import serving_benchmark as logic

RUN = {"workload": "short", "input_tokens": 64, "output_tokens": 4, "streams": 2, "requests": 3, "repeat": 1, "seed": 7}
# In the shape of the client's JSON, made by a run against the rehearsal engine and shortened.
DOCUMENT = {
    "backend": "sglang-oai-chat", "max_concurrency": 2, "random_input_len": 64, "server_info": {"api_key": "hidden-key-1"},
    "duration": 0.578, "completed": 3, "total_output_tokens": 12, "total_output_tokens_retokenized": 12,
    "request_throughput": 5.19, "output_throughput": 20.76, "median_ttft_ms": 98.926, "p99_ttft_ms": 159.216,
    "median_itl_ms": 4.627, "p99_itl_ms": 12.258, "median_tpot_ms": 5.715,
    "input_lens": [70, 71, 72], "output_lens": [4, 4, 4], "errors": ["", "", ""],
    "ttfts": [0.1, 0.09, 0.15], "itls": [[0.004, 0.005, 0.004]] * 3, "generated_texts": ["a", "b", "c"],
}


def changed(**values):
    return dict(copy.deepcopy(DOCUMENT), **values)


def test_figures_are_the_clients_and_the_servers_counts():
    assert logic.figures(DOCUMENT, 3) == {
        "ttft_ms": 98.926, "ttft_p99_ms": 159.216, "itl_ms": 4.627, "itl_p99_ms": 12.258, "tpot_ms": 5.715,
        "output_tokens_per_s": 20.76, "requests_per_s": 5.19, "duration_s": 0.578, "input_tokens": 71.0, "output_tokens": 4.0,
    }


@pytest.mark.parametrize("document, words", [
    pytest.param(changed(completed=0, errors=["Unauthorized: "] * 3), "3 of 3 requests failed: Unauthorized:", id="refused"),
    pytest.param(changed(completed=2, errors=["", "broken\npipe", ""]), "1 of 3 requests failed: broken pipe", id="one-failed"),
    pytest.param(changed(completed=2), "1 of 3 requests failed: no reason given", id="one-missing"),
    pytest.param(changed(itls=[[0.004] * 3, [], [0.004] * 3]), "1 of 3 streams were cut", id="one-stream-cut"),
    pytest.param(changed(total_output_tokens_retokenized=3), "3 of 3 streams were cut: 3 tokens came of 12", id="all-streams-cut"),
    pytest.param({key: value for key, value in DOCUMENT.items() if key != "median_itl_ms"}, "not as expected: KeyError", id="key-gone"),
    pytest.param(changed(median_ttft_ms=None), "not as expected: TypeError", id="no-number"),
])
def test_what_would_not_be_figures_of_the_load_is_refused(document, words):
    with pytest.raises(logic.BenchmarkError, match=words):
        logic.figures(document, 3)


def test_speculation_that_brings_tokens_in_bursts_is_not_taken_for_a_cut():
    assert logic.figures(changed(itls=[[0.004] * 3, [0.004] * 2, [0.004] * 2]), 3)


def test_the_request_measures_what_a_client_sees():
    wanted = logic.request("http://127.0.0.1:30001/", "deepseek-v4-flash", "/m", RUN, "secret-key-9")
    assert wanted["base_url"] == "http://127.0.0.1:30001" and wanted["backend"] == "sglang-oai-chat"
    assert (wanted["random_input_len"], wanted["random_output_len"], wanted["max_concurrency"], wanted["num_prompts"], wanted["seed"]) == (64, 4, 2, 3, 7)
    assert wanted["warmup_requests"] == 0, "the client's warm-up sends the first prompt twice"
    assert wanted["headers"] == ["Authorization: Bearer secret-key-9"]
    body = json.loads(wanted["extra_request_body"])
    assert body == {"stream_options": {"include_usage": True}, "chat_template_kwargs": {"thinking": False}}
    assert logic.request("http://h:1", "m", "/m", RUN)["headers"] == []


@pytest.fixture
def client(tmp_path, monkeypatch):
    """Calls the real runner with a package in the client's place whose run_config is the given body."""

    def call(body, timeout=20, key="secret-key-9"):
        folder = tmp_path / "sglang" / "srt" / "rust_extensions"
        folder.mkdir(parents=True, exist_ok=True)
        # The package itself must not be imported: the real one loads torch.
        (tmp_path / "sglang" / "__init__.py").write_text("raise SystemExit('sglang was imported')", encoding="utf-8")
        (folder / "_bench.py").write_text("def run_config(text):\n" + textwrap.indent(textwrap.dedent(body), "    "), encoding="utf-8")
        information = tmp_path / "sglang-9.9.dist-info"
        information.mkdir(exist_ok=True)
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9\n", encoding="utf-8")
        monkeypatch.setattr(logic, "RUNNER", "import sys; sys.path.insert(0, %r)\n%s" % (str(tmp_path), logic.RUNNER.lstrip()))
        return logic.measure(sys.executable, logic.request("http://127.0.0.1:1", "m", "/m", RUN, key), timeout)

    return call


def test_the_answer_is_found_among_what_the_client_prints(client):
    outcome = client("import os\nos.write(1, b'=== Result ===\\n')\nprint('more')\nreturn %r" % json.dumps(DOCUMENT))
    assert outcome["status"] == "ok" and outcome["client"] == "9.9" and outcome["figures"]["ttft_ms"] == 98.926
    assert "hidden-key-1" not in json.dumps(outcome), "the client's document holds the server's arguments"


def test_the_key_is_in_no_argument_and_no_environment(client):
    body = """
        import glob, json
        seen = "".join(open(path, "rb").read().decode("latin-1") for path in ("/proc/self/cmdline", "/proc/self/environ"))
        raise RuntimeError("visible" if "secret-key-9" in seen else "hidden, header %s" % ("secret-key-9" in text))
    """
    assert client(body)["reason"] == "the client failed: hidden, header True"


@pytest.mark.parametrize("body, status, words", [
    ("raise RuntimeError('cannot find a tokenizer')", "failed", "the client failed: cannot find a tokenizer"),
    ("import os, sys\nos.write(2, b'thread panicked\\n')\nos._exit(101)", "failed", "the client ended with status 101: thread panicked"),
    ("return '{}'", "failed", "the client's document is not as expected: KeyError"),
])
def test_a_client_that_fails_is_told(client, body, status, words):
    outcome = client(body)
    assert (outcome["status"], outcome["figures"]) == (status, {}) and outcome["reason"].startswith(words)


def test_a_run_that_takes_too_long_is_ended(client, tmp_path):
    mark = tmp_path / "pid"
    outcome = client("import os, time\nopen(%r, 'w').write(str(os.getpid()))\ntime.sleep(60)" % str(mark), timeout=1)
    assert outcome["status"] == "timeout" and outcome["reason"] == "not finished within 1 s"
    time.sleep(0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text(encoding="ascii")), 0)


def test_a_client_that_is_not_there_is_told():
    outcome = logic.measure("/nonexistent/bin/python", {"num_prompts": 1}, 5)
    assert outcome["status"] == "failed" and outcome["reason"] == "/nonexistent/bin/python does not run: No such file or directory"
