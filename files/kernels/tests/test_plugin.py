# SPDX-License-Identifier: Apache-2.0
"""The plugin against the unmodified engine's wheel: fingerprints, the real hook registry, the real target modules."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap

import pytest

from dsv4_sm120 import fingerprints, plugin

ROOT = pathlib.Path(__file__).resolve().parent.parent
engine = pytest.mark.engine
TOPK = "sglang.kernels.ops.attention.dsv4.topk.topk_transform_paged"
PARAMETERS = "scores, seq_lens, page_tables, out_page_indices, page_size, out_raw_indices=None"


def test_every_site_has_a_fingerprint():
    known = plugin.known_targets()
    for item in plugin.operations().values():
        for site in item.sites:
            assert site.target in known


def test_importing_the_plugin_imports_neither_torch_nor_the_engine():
    script = "import sys, dsv4_sm120.plugin as p; p.operations(); assert not {'torch', 'sglang'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})


@pytest.fixture
def fake_engine(tmp_path):
    """A tree with an engine's names: one target, a module that from-imports it, and a registry of the same rules."""
    files = {
        "sglang/__init__.py": "",
        "sglang/version.py": '__version__ = "0.5.23"\n',
        "sglang/kernels/ops/attention/dsv4/topk.py": f"def topk_transform_paged({PARAMETERS}):\n    return 'stock'\n",
        "sglang/user.py": "from sglang.kernels.ops.attention.dsv4.topk import topk_transform_paged\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_fingerprints_notice_what_moves(fake_engine):
    known = {TOPK: fingerprints.fingerprint(fake_engine, TOPK)}
    assert fingerprints.problem(fake_engine, TOPK, known) is None
    path = fake_engine / "sglang/kernels/ops/attention/dsv4/topk.py"
    text = path.read_text()
    path.write_text(text.replace("'stock'", "'other'"))
    assert "source changed" in fingerprints.problem(fake_engine, TOPK, known)
    path.write_text(text.replace("page_size", "block_size"))
    assert "parameters changed" in fingerprints.problem(fake_engine, TOPK, known)
    path.write_text("topk_transform_paged = None\n")
    assert "has no topk_transform_paged" in fingerprints.problem(fake_engine, TOPK, known)
    path.unlink()
    assert fingerprints.problem(fake_engine, TOPK, known)
    assert "no fingerprint" in fingerprints.problem(fake_engine, TOPK, {})


@engine
def test_fingerprints_are_those_of_the_wheel():
    root = plugin.engine_root()
    faults = [fingerprints.problem(root, target, plugin.known_targets()) for target in plugin.known_targets()]
    assert faults == [None] * len(faults)


@pytest.fixture
def with_registry(fake_engine):
    """The tree above with the wheel's own hook registry in it."""
    registry = plugin.engine_root() / "sglang/srt/plugins/hook_registry.py"
    target = fake_engine / "sglang/srt/plugins/hook_registry.py"
    target.parent.mkdir(parents=True)
    shutil.copy(registry, target)
    return fake_engine


PRELUDE = """
import json, logging, pathlib, sys, types
logging.basicConfig(level=logging.INFO, format='%(name)s %(message)s')
from dsv4_sm120 import _lib, fingerprints, operation, plugin
from dsv4_sm120.topk import hook
plugin.discover = lambda: {pathlib.Path(hook.__file__).parent: (hook.OPERATIONS[0],)}
plugin.known_targets = lambda: {hook.TARGET: fingerprints.fingerprint(plugin.engine_root(), hook.TARGET)}
_lib.load = lambda name: None
from dsv4_sm120 import topk
topk.refusal = lambda *a: 'a stand-in'
"""


def run(tree, script, **environment):
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script)],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{ROOT / 'src'}:{tree}",
            **{f"DSV4_SM120_{name.upper()}": value for name, value in environment.items()},
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


IN_SCHEDULER = """
def run_scheduler_process():
    plugin.register()
run_scheduler_process()
from sglang import user
print(user.topk_transform_paged(types.SimpleNamespace(shape=(1, 8)), 2, 3, 4, 5))
"""


@engine
def test_the_hook_lands_in_a_scheduler_and_says_so(with_registry):
    code, text = run(with_registry, IN_SCHEDULER, kernels="topk")
    assert code == 0 and text.count(" applied: topk; left out: nothing; chosen by DSV4_SM120_KERNELS") == 1
    assert "Applied 1 hook(s) to sglang.kernels.ops.attention.dsv4.topk.topk_transform_paged" in text


@engine
def test_the_line_is_there_before_logging_is_set_up(with_registry):
    """The engine loads plugins first and configures its loggers after."""
    script = "logging.root.handlers.clear()\nlogging.root.setLevel(logging.WARNING)\n" + IN_SCHEDULER
    code, text = run(with_registry, script, kernels="topk")
    assert code == 0 and text.count(" applied: topk; left out: nothing;") == 1


@engine
def test_from_imports_made_before_are_patched_too(with_registry):
    script = "from sglang import user\n" + IN_SCHEDULER + "assert hasattr(user.topk_transform_paged, '__wrapped__')\n"
    assert run(with_registry, script, kernels="topk")[0] == 0


@engine
def test_other_processes_import_no_target(with_registry):
    script = """
    plugin.register()
    assert 'sglang.kernels.ops.attention.dsv4.topk' not in sys.modules
    """
    assert run(with_registry, script, kernels="topk", strict="1") == (0, "")


@engine
def test_registering_twice_is_harmless(with_registry):
    script = (
        "def run_scheduler_process():\n    plugin.register()\n    plugin.register()\n" + IN_SCHEDULER.split("\n", 3)[3]
    )
    code, text = run(with_registry, script, kernels="topk", strict="1")
    assert code == 0 and text.count("applied: topk;") == 2 and text.count("Applied 1 hook(s)") == 1


@engine
def test_no_selection_applies_nothing(with_registry):
    code, text = run(with_registry, IN_SCHEDULER)
    assert code == 0 and "applied: nothing" in text and "stock" in text


@engine
@pytest.mark.parametrize("strict", ["0", "1"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "open(plugin.engine_root() / 'sglang/version.py', 'w').write('__version__ = \"0.5.24\"\\n')",
            "this is 0.5.24",
        ),
        ("plugin.known_targets = lambda: {}", "no fingerprint was ever taken"),
        ("plugin.known_targets = lambda: {hook.TARGET: {'source': 'x'}}", "source changed"),
        (
            "def missing(name): raise _lib.KernelError('_dsv4_topk.so does not load')\n_lib.load = missing",
            "does not load",
        ),
        ("import sglang.srt.plugins.hook_registry as r\nr.HookRegistry._patched.add(hook.TARGET)", "did not land"),
        (
            "import sglang.srt.plugins.hook_registry as r\n"
            "def refuse(cls, target, hooks): raise ValueError\nr.HookRegistry._apply_target = classmethod(refuse)",
            "did not land",
        ),
    ],
)
def test_what_cannot_be_applied_is_left_out_or_ends_the_process(with_registry, change, message, strict):
    code, text = run(with_registry, change + "\n" + IN_SCHEDULER, kernels="topk", strict=strict)
    assert message in text and "topk is left out" in text
    if strict == "1":
        assert code == 1 and "applied:" not in text
    else:
        assert code == 0 and "applied: nothing; left out: topk" in text and "stock" in text


@engine
def test_a_bad_record_is_a_clear_line(with_registry, tmp_path):
    code, text = run(with_registry, IN_SCHEDULER, selection=str(tmp_path / "none.json"), strict="1")
    assert code == 1 and "selection record" in text
    code, text = run(with_registry, IN_SCHEDULER, selection=str(tmp_path / "none.json"))
    assert code == 0 and "selection record" in text and "stock" in text
    assert "applied: nothing; left out: nothing; chosen by nothing that could be read" in text


@engine
def test_the_record_decides(with_registry, tmp_path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"schema": 1, "source_hash": "unbuilt", "operations": {"topk": {"choice": "ours"}}}))
    code, text = run(with_registry, IN_SCHEDULER, selection=str(path), strict="1", lib=str(tmp_path))
    assert code == 0 and f"applied: topk; left out: nothing; chosen by {path}" in text


REAL = """
import importlib.abc, importlib.machinery, logging, sys, types
logging.basicConfig(level=logging.INFO, format='%(name)s %(message)s')

class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    # the engine imports torchvision; the one on the index does not fit a CPU torch
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] == 'torchvision':
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: type(name, (), {})
        return module
    def exec_module(self, module): pass

import sglang  # before the stand-in: transformers asks whether torchvision is there
sys.meta_path.insert(0, Absent())
from dsv4_sm120 import _lib, plugin
_lib.load = lambda name: None
def run_scheduler_process():
    plugin.register()
run_scheduler_process()
import importlib
from dsv4_sm120 import operation
for name in sys.argv[1:]:
    assert operation.enabled(name), name
    for site in plugin.operations()[name].sites:
        if site.needs is None or importlib.util.find_spec(site.needs):
            assert plugin.landed(site.target, site.hook), site.target
import sglang.kernels.ops.attention.dsv4 as package
import sglang.srt.layers.attention.dsv4.indexer as indexer
assert hasattr(package.topk_transform_paged, '__wrapped__')
# the backend's own name, from-imported at its module's head
assert indexer.topk_transform_paged is package.topk_transform_paged
assert indexer.topk_transform_paged.__globals__['__name__'] == 'sglang.srt.plugins.hook_registry'
# the names that forward_c4_indexer looks up when it runs
code = indexer.C4IndexerBackendMixin.forward_c4_indexer.__wrapped__.__code__
inner = [c for c in code.co_consts if hasattr(c, 'co_names')]
looked_up = set(code.co_names).union(*(c.co_names for c in inner))
assert {'topk_transform_paged', 'fp8_paged_mqa_logits_torch_sm120', 'tilelang_fp8_paged_mqa_logits'} <= looked_up
print('landed')
"""


@engine
def test_hooks_land_on_the_functions_that_the_backend_calls():
    """Imports the real modules (about a minute); needs the engine's Python packages, not a GPU."""
    for module in ("torch", "triton", "transformers", "orjson"):
        pytest.importorskip(module, reason=f"the engine's modules need {module}")
    done = subprocess.run(
        [sys.executable, "-c", REAL, "topk", "indexer", "indexer_topk", "nextn_moe"],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}:{plugin.engine_root()}",
            "DSV4_SM120_KERNELS": "topk,indexer,indexer_topk,nextn_moe",
            "DSV4_SM120_STRICT": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0 and "landed" in done.stdout, done.stdout + done.stderr
