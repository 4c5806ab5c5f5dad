# SPDX-License-Identifier: GPL-3.0-or-later
"""The kernels on a host where no GPU can run them: built, asked for, not proved, and stock serves with a warning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

REPORTS = Path(__file__).resolve().parents[3] / "reports/rehearsal"
KERNELS = "/opt/dsv4/kernels"


@pytest.fixture(scope="module")
def manifest(host):
    return json.loads(host.file("/opt/dsv4/current/manifest.json").content_string)


def test_the_kernels_were_compiled_for_the_target(host, manifest):
    build = json.loads(host.file("%s/%s/site/dsv4_sm120/lib/build.json" % (KERNELS, manifest["inputs"]["kernels"]["build"])).content_string)
    assert build["archs"] == ["sm_120a"] and {"topk", "indexer", "sparse_mla"} <= set(build["libraries"])


def test_the_self_test_says_that_there_is_no_gpu(host, manifest):
    site = "%s/%s/site" % (KERNELS, manifest["inputs"]["kernels"]["build"])
    done = host.run("env PYTHONPATH=%s /opt/dsv4/current/engine/bin/python -B -m dsv4_sm120.cli selftest", site)
    assert done.rc == 3 and "no CUDA GPU" in done.stderr and done.stdout == ""


def test_the_engines_own_kernels_serve(host, manifest, topology):
    kernels = manifest["inputs"]["kernels"]
    assert kernels["policy"] == "measured" and kernels["applied"] == []
    assert set(kernels["stock"]) == set(topology["instances"]["decode"]["kernels"])
    assert all("no CUDA GPU" in reason for reason in kernels["stock"].values())
    environment = host.check_output("systemctl show --property=Environment --value sglang-dsv4-decode")
    assert "DSV4_SM120" not in environment and "SGLANG_PLUGINS" not in environment


def test_verification_and_findings_say_so(host, topology):
    newest = max(REPORTS.glob("*/verification.json"), key=lambda path: path.stat().st_mtime)
    check = next(one for one in json.loads(newest.read_text())["checks"] if one["id"] == "kernels.decode")
    assert check["status"] == "pass" and "no CUDA GPU" in check["notes"][0]
    assert all(kernel in check["notes"][0] for kernel in topology["instances"]["decode"]["kernels"])
    entries = host.file("/var/lib/dsv4/FINDINGS.md").content_string.split("### Open items")[1:]
    # the rollback's entry too, whose play builds nothing
    assert entries and all("Kernels on stock, decode: the engine's own topk, indexer" in entry and "no CUDA GPU" in entry for entry in entries)
