# SPDX-License-Identifier: Apache-2.0
"""selftest and select as an operator runs them, over a copy of the package with a GPU that is pretended and one operation
more, whose kernels take the times that the test feeds."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

FILES = {
    "dsv4_sm120/gpu.py": """
        class NoGpu(RuntimeError): pass
        def visible(): return [{"name": "Pretended", "uuid": "GPU-0", "capability": "12.0"}]
        def driver(): return "580.95.05"
    """,
    "dsv4_sm120/timing.py": """
        import itertools, os, random
        class Flush: pass
        class Graph:
            def __init__(self, work): self.work = work
            def replay(self): self.work()
        def capture(work): return Graph(work)
        def times(graphs, flush, repeats):
            rng = random.Random(1)
            return {name: [graph.work() + rng.gauss(0, 0.05) for _ in range(repeats)] for name, graph in graphs.items()}
    """,
    "dsv4_sm120/contestants.py": "absent = {'deepgemm': 'ModuleNotFoundError: deep_gemm'}\n",
    "torch/__init__.py": """
        from . import cuda
        __version__ = "2.14.1"
    """,
    "torch/cuda.py": """
        broken = False
        def synchronize():
            if broken: raise RuntimeError("an illegal memory access was encountered")
        def empty_cache(): pass
        def get_device_capability(device): return (12, 0)
    """,
    "dsv4_sm120/made/__init__.py": "",
    "dsv4_sm120/made/hook.py": """
        from ..operation import Operation
        OPERATIONS = [Operation("made", (), ()), Operation("other", (), ())]
    """,
    "dsv4_sm120/mended/__init__.py": "",
    "dsv4_sm120/mended/hook.py": """
        from ..operation import Operation
        OPERATIONS = [Operation("mended", (), ())]
    """,
    "dsv4_sm120/made/contest.py": """
        import json, os, signal, time
        from ..contests import Bout, Cell, Contest
        FEED = json.loads(os.environ.get("FEED", "{}"))
        def act(what):
            if what == "crash": os.kill(os.getpid(), signal.SIGSEGV)
            if str(what).startswith("hang"):
                for note in str(what).split()[1:]: open(note, "w").write(str(os.getpid()))
                time.sleep(600)
            if what == "raise": raise RuntimeError("refused")
            if what == "exit": raise SystemExit(0)
            if what == "break":
                import torch
                torch.cuda.broken = True
                raise RuntimeError("an illegal memory access was encountered")
            return what
        def checks(operation):
            def found():
                yield "first", lambda: None
                yield "second", lambda: act(FEED.get("check " + operation))
                yield "third", lambda: None
            return found
        def cells(deployment): return [Cell("all", rows, n) for rows in deployment.rows for n in (4096, None)]
        def bout(operation):
            def made(cell, deployment):
                print("a library says something", flush=True)
                feed = FEED.get(f"{operation} {cell.rows}", {})
                base = {"ours": 6.0, "engine": 10.0, "peer": 5.0} | feed
                works = {name: lambda what=what: act(what) for name, what in base.items()}
                return Bout(works, lambda name, result: "off by 1" if result == -1 else None)
            return made
        CONTESTS = [Contest(name, checks(name), cells, bout(name), {"sm_120a": ("engine",)}) for name in ("made", "other")]
    """,
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT / "src/dsv4_sm120", folder / "dsv4_sm120", ignore=shutil.ignore_patterns("__pycache__", "lib"))
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder


@pytest.fixture
def deployment(tmp_path):
    path = tmp_path / "deployment.json"
    instance = {"heads": 16, "max_batch": 4, "rows_per_request": 1, "kernels": ["made", "other"]}
    path.write_text(json.dumps({"schema": 1, "context_length": 8192, "instances": {"decode": instance}}))
    return path


def run(tree, *arguments, feed=None):
    done = subprocess.run(
        [sys.executable, "-B", "-m", "dsv4_sm120.cli", *map(str, arguments)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tree), "FEED": json.dumps(feed or {})},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def prove(tree, feed=None, *arguments):
    code, out, _err = run(tree, "selftest", "--json", "--operations", "made,other", *arguments, feed=feed)
    return code, json.loads(out)["operations"]


def select(tree, deployment, feed=None, *arguments):
    out = deployment.with_name("selection.json")
    code, _out, err = run(tree, "select", "--topology", deployment, "--out", out, "--key", "k", *arguments, feed=feed)
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []
    return code, json.loads(out.read_text()), err


def test_every_check_passes(tree):
    code, found = prove(tree)
    assert code == 0 and {name: (one["status"], one["checks"]) for name, one in found.items()} == {
        "made": ("pass", 3),
        "other": ("pass", 3),
    }


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("off by 1", "second: off by 1"),
        ("raise", "second: RuntimeError: refused"),
        ("crash", "second: signal SIGSEGV"),
        ("hang", "second: took longer than 2 s"),
        # nothing more is asked of a context that is broken
        ("break", "second: RuntimeError: an illegal memory access was encountered"),
        # an orderly end in the middle is no success
        ("exit", "second: 1 of an unknown number of checks ran"),
    ],
)
def test_a_broken_kernel_is_refused_and_takes_no_other_down(tree, what, reason):
    code, found = prove(tree, {"check made": what}, "--time-limit", "2")
    assert code == 1 and found["made"]["status"] == "fail" and found["made"]["reason"].startswith(reason)
    assert len(found["made"]["faults"]) == 1
    assert found["other"]["status"] == "pass"


def test_the_table_names_every_fault(tree):
    code, out, err = run(tree, "selftest", "--operations", "made", feed={"check made": "off by 1"})
    assert code == 1 and "made       fail" in out and "second: off by 1" in out and "selftest made: fail" in err


def test_the_faster_one_is_chosen(tree, deployment):
    code, record, err = select(tree, deployment, {"made 4": {"ours": 12.0}, "other 1": {"ours": 10.05}, "other 4": {"ours": 11}})
    assert code == 0 and record["state"] == "complete" and record["key"] == "k"
    made, other = record["operations"]["made"], record["operations"]["other"]
    assert made["choice"] == "ours" and made["rows"] == {"all": [[1, 1]]} and made["selftest"] == "pass"
    assert other["choice"] == "stock" and other["rows"] == {}
    cells = record["details"]["cells"]["other"]
    assert [cell["winner"] for cell in cells] == ["tie", "tie", "stock", "stock"]
    facts = {"gpu": "Pretended", "driver": "580.95.05", "torch": "2.14.1", "engine": "unknown"}
    assert facts.items() <= record["measured_on"].items() and record["details"]["absent"]["deepgemm"]
    assert "made 1/4 all, 1 rows, 4k tokens: ours 6.0, engine 10.0, peer 5.0 us: ours by" in err
    assert "a library says something" in err


def test_a_slowed_kernel_flips_and_the_rest_stays(tree, deployment):
    _code, record, _err = select(tree, deployment)
    _code, slowed, _err = select(tree, deployment, {"made 1": {"ours": 60.0}, "made 4": {"ours": 60.0}})
    assert record["operations"]["made"]["choice"] == "ours" and slowed["operations"]["made"]["choice"] == "stock"
    assert record["operations"]["other"] == slowed["operations"]["other"]


def test_noise_alone_changes_nothing_but_the_details(tree, deployment):
    first, second = (select(tree, deployment, {"made 1": {"ours": ours}})[1] for ours in (6.0, 6.3))
    assert first.pop("details") != second.pop("details") and first == second


def test_a_wrong_kernel_is_not_timed(tree, deployment):
    code, record, err = select(tree, deployment, {"check made": "off by 1"})
    assert code == 0 and record["operations"]["made"] == {
        "choice": "stock",
        "selftest": "fail",
        "rows": {},
        "reason": "its self-test failed: second: off by 1",
    }
    assert record["operations"]["other"]["choice"] == "ours" and "made 1/4" not in err


@pytest.mark.parametrize(("what", "reason"), [("crash", "signal SIGSEGV"), ("raise", "RuntimeError: refused"), (-1, "off by 1")])
def test_without_the_engines_own_there_is_no_win(tree, deployment, what, reason):
    code, record, _err = select(tree, deployment, {"made 1": {"engine": what}, "made 4": {"engine": what}})
    assert code == 0 and record["operations"]["made"]["choice"] == "stock"
    assert reason in record["operations"]["made"]["reason"]
    assert record["operations"]["other"]["choice"] == "ours"


def test_a_peer_that_crashes_is_left_out_and_the_cells_are_measured(tree, deployment):
    code, record, _err = select(tree, deployment, {"made 4": {"peer": "crash"}})
    assert code == 0 and record["operations"]["made"]["rows"] == {"all": [[1, 4]]}
    cells = record["details"]["cells"]["made"]
    assert len(cells) == 4 and "SIGSEGV" in cells[2]["wrong"]["peer"] and "peer" not in cells[3]["median_us"]


def test_ours_that_crashes_while_it_is_timed_never_serves(tree, deployment):
    code, record, _err = select(tree, deployment, {"made 4": {"ours": "crash"}})
    made = record["operations"]["made"]
    assert code == 0 and made["choice"] == "stock" and made["selftest"] == "fail" and "while it was timed" in made["reason"]


def test_when_the_time_runs_out_the_record_is_valid_and_says_so(tree, deployment):
    code, record, _err = select(tree, deployment, {"other 4": {"ours": "hang"}}, "--time-limit", "4")
    assert code == 4 and record["state"] == "partial"
    assert record["operations"]["made"]["choice"] == "ours"
    other = record["operations"]["other"]
    assert other["rows"] == {"all": [[1, 1]]} and "1 not decided: there was no time to measure it" in other["reason"]
    code, _out, err = run(tree, "show", deployment.with_name("selection.json"))
    assert code == 0, err


def test_a_limit_that_cuts_the_selftest_blames_no_kernel(tree, deployment):
    code, record, _err = select(tree, deployment, {"check made": "hang"}, "--time-limit", "2")
    assert code == 4 and record["state"] == "partial"
    assert {entry["selftest"] for entry in record["operations"].values()} == {"none"}
    assert {entry["reason"] for entry in record["operations"].values()} == {"no time left"}


def test_an_earlier_selftest_is_taken_for_the_same_build_gpu_and_driver_only(tree, deployment):
    kept = deployment.with_name("selftest.json")
    code, out, _err = run(tree, "selftest", "--out", kept, "--operations", "made", feed={"check made": "off by 1"})
    assert code == 1 and "off by 1" in out
    code, record, err = select(tree, deployment, None, "--selftest", kept)
    # made is not proved again, other is
    assert record["operations"]["made"]["selftest"] == "fail" and record["operations"]["other"]["selftest"] == "pass"
    assert "selftest other: pass" in err and "selftest made" not in err
    document = json.loads(kept.read_text())
    for name in ("source_hash", "driver", "uuid", "capability"):
        kept.write_text(json.dumps(document | {name: "another"}))
        code, _record, err = select(tree, deployment, None, "--selftest", kept)
        assert code == 1 and f"the self-test was of {name} another" in err
    for text in ("", "[]", "{}", '{"schema": 1, "operations": {"made": {"state": 1}}}'):
        kept.write_text(text)
        assert select(tree, deployment, None, "--selftest", kept)[0] == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("command", ["selftest", "select"])
def test_an_end_from_outside_leaves_nobody_on_the_gpu(tree, deployment, tmp_path, command, number):
    """What `timeout` does, a lost connection, Ctrl-C: the child that hangs goes as well, and the record stays a valid one."""
    note, out = tmp_path / "pid", deployment.with_name("selection.json")
    words = {"selftest": ["--operations", "made"], "select": ["--topology", deployment, "--out", out]}[command]
    feed = {"check made": f"hang {note}"} if command == "selftest" else {"made 1": {"ours": f"hang {note}"}}
    running = subprocess.Popen(
        [sys.executable, "-B", "-m", "dsv4_sm120.cli", command, *map(str, words)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tree), "FEED": json.dumps(feed)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until = time.monotonic() + 60
    while not note.exists() or not note.read_text():
        assert time.monotonic() < until and running.poll() is None
        time.sleep(0.05)
    running.send_signal(number)
    _out, err = running.communicate(timeout=30)
    assert running.returncode == 128 + number and "Traceback" not in err
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)
    if command == "select":
        assert json.loads(out.read_text())["state"] == "partial"


def test_a_dry_run_touches_nothing(tree):
    code, out, err = run(tree, "selftest", "--dry-run", "--operations", "made", feed={"check made": "crash"})
    assert (code, out, err) == (0, "would prove made on Pretended (GPU-0)\n", "")


def test_operations_of_another_build_are_named(tree, deployment):
    document = json.loads(deployment.read_text())
    document["instances"]["decode"]["kernels"] = ["made", "absent", "mended"]
    deployment.write_text(json.dumps(document))
    _code, record, _err = select(tree, deployment)
    assert record["operations"]["absent"]["reason"] == "this build does not have it"
    # there is nothing to time about what only mends something
    assert record["operations"]["mended"]["choice"] == "ours" and "rows" not in record["operations"]["mended"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"schema": 2}', '{"schema": 1, "context_length": 8192, "instances": {"d": {"kernels": ["made"]}}}',
     '{"schema": 1, "context_length": 12, "instances": {}}'],
)  # fmt: skip
def test_a_deployment_that_cannot_be_read_is_a_clear_line(tree, tmp_path, text):
    path = tmp_path / "deployment.json"
    path.write_text(text)
    code, _out, err = run(tree, "select", "--topology", path, "--out", tmp_path / "out.json")
    assert code == 1 and err.startswith("dsv4-sm120: ") and "Traceback" not in err and not (tmp_path / "out.json").exists()


def test_show_prints_choices_cells_and_who_was_absent(tree, deployment):
    select(tree, deployment, {"made 4": {"ours": 12.0}, "other 4": {"engine": "raise"}})
    code, out, _err = run(tree, "show", deployment.with_name("selection.json"))
    assert code == 0
    assert "build unbuilt, complete, on Pretended, driver 580.95.05" in out
    assert "made       ours    pass       1         faster than the engine's own in 1 of 2 shapes" in out
    cells = [line for line in out.splitlines() if line.startswith("all, 4 rows, mixed tokens")]
    assert [cell.split("  ")[-1].strip() for cell in cells] == ["stock", "engine: RuntimeError: refused"]
    assert [cell.split("  ")[1].split()[0] for cell in cells] == ["12.0", "6.0"] and "failed" in cells[1]
    assert "failed: engine: RuntimeError: refused" in out.splitlines()
    assert "absent: deepgemm: ModuleNotFoundError" in out


def test_a_machine_without_a_gpu_says_so():
    command = [sys.executable, "-B", "-m", "dsv4_sm120.cli"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, "selftest"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 3 and done.stderr.startswith("dsv4-sm120: no CUDA GPU: ") and not done.stdout


def test_a_library_that_is_not_the_drivers_is_no_gpu(tmp_path):
    """A stand-in answers some calls; whatever it lacks, nothing is proved on it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("no C compiler")
    (tmp_path / "cuda.c").write_text("int cuInit(unsigned flags) { return 0; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "cuda.c", "-o", "libcuda.so.1"], cwd=tmp_path, check=True)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "src"), "LD_LIBRARY_PATH": str(tmp_path)}
    command = [sys.executable, "-B", "-m", "dsv4_sm120.cli", "selftest"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 3 and "no CUDA GPU: libcuda.so.1 is not the driver's: it has no cuDeviceGetCount" in done.stderr


def test_the_command_line_explains_itself():
    for words in ([], ["selftest"], ["select"], ["show"]):
        done = subprocess.run(
            [sys.executable, "-B", "-m", "dsv4_sm120.cli", *words, "-h"],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert "exit status" in done.stdout or words == ["show"]
        assert all(len(line.split("  ")) > 1 for line in done.stdout.splitlines() if line.startswith("  --"))
