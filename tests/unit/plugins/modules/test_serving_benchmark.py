# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""serving_benchmark as Ansible runs it, with a client of our own in a real virtual environment."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
import yaml

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "module_utils"))

from endpoint import Endpoint, Reply  # noqa: E402
from test_probe_cases import run_module  # noqa: E402

from ansible_collections.blackwell.dsv4.plugins.modules import serving_benchmark  # noqa: E402

KEY = "dsv4-Zq81-planted-key"
RUN = {"workload": "short", "input_tokens": 64, "output_tokens": 4, "streams": 2, "requests": 3, "repeat": 1, "seed": 7}
CLIENT = """
import json, time
def run_config(text):
    asked = json.loads(text)
    if asked["model"] == "/slow":
        time.sleep(60)
    if asked["headers"] != ["Authorization: Bearer %s"]:
        raise RuntimeError("no key: %%s" %% asked["headers"])
    count = asked["num_prompts"]
    return json.dumps({
        "server_info": {"api_key": "%s"}, "duration": 0.5, "completed": count, "total_output_tokens": 4 * count, "request_throughput": 5.0,
        "total_output_tokens_retokenized": 4 * count, "output_throughput": 20.0, "median_ttft_ms": 98.9, "p99_ttft_ms": 159.2,
        "median_itl_ms": 4.6, "p99_itl_ms": 12.2, "median_tpot_ms": 5.7, "input_lens": [70] * count, "output_lens": [4] * count,
        "errors": [""] * count, "itls": [[0.004] * 3] * count})
""" % (KEY, KEY)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    path = tmp_path_factory.mktemp("client") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    site = next((path / "lib").glob("python3*")) / "site-packages"
    folder = site / "sglang" / "srt" / "rust_extensions"
    folder.mkdir(parents=True)
    (site / "sglang" / "__init__.py").write_text("raise SystemExit('sglang was imported')", encoding="utf-8")
    (folder / "_bench.py").write_text(CLIENT, encoding="utf-8")
    (site / "sglang-9.9.dist-info").mkdir()
    (site / "sglang-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9\n", encoding="utf-8")
    return path


@pytest.fixture
def call(environment, tmp_path):
    (tmp_path / "key").write_text(KEY + "\n", encoding="utf-8")

    def run(**more):
        return run_module("serving_benchmark", {
            "base_url": "http://127.0.0.1:1", "model": "deepseek-v4-flash", "tokenizer": "/m", "client": str(environment), "run": RUN,
            "workloads": [{"name": "short", "input_tokens": 64, "output_tokens": 4, "streams": [2]}],
            "api_key_file": str(tmp_path / "key"), "run_timeout": 20, **more})

    return run


def test_the_documentation_is_whole():
    parts = [yaml.safe_load(getattr(serving_benchmark, name)) for name in ("DOCUMENTATION", "EXAMPLES", "RETURN")]
    assert all(parts) and all("sample" in value or "contains" in value for value in parts[2].values())


def test_one_run_gives_figures_and_no_key(call):
    with Endpoint(lambda r: Reply(body={"version": "0.5.23+rehearsal", "api_key": KEY})) as engine:
        result = call(engine_url=engine.url)
    assert (result["changed"], result["client"], result["engine_version"]) == (False, "9.9", "0.5.23+rehearsal")
    assert result["runs"][0]["status"] == "ok" and result["runs"][0]["figures"]["ttft_ms"] == 98.9 and result["load"] >= 0
    assert KEY not in json.dumps(result)


def test_without_the_key_the_run_fails_and_not_the_task(call):
    result = call(api_key_file=None)
    assert result["runs"][0]["status"] == "failed" and "no key" in result["runs"][0]["reason"] and not result.get("failed")


@pytest.mark.parametrize("reply, status", [(Reply(body={"version": "0.5.23"}), "timeout"), (Reply(503, {}), "failed")])
def test_a_timeout_is_a_failure_when_the_engine_is_gone(call, reply, status):
    with Endpoint(lambda r: reply) as engine:
        run = call(engine_url=engine.url, tokenizer="/slow", run_timeout=1)["runs"][0]
    assert run["status"] == status and run["reason"].startswith("not finished within 1 s")
    assert ("no longer answers" in run["reason"]) == (status == "failed")


def test_a_key_file_that_is_not_there_is_told(call):
    assert "api_key_file cannot be read" in call(api_key_file="/nonexistent")["msg"]
