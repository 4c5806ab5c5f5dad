# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run the real ServerArgs of SGLang 0.5.23, full resolution on a pretended sm_120, over rendered command lines.

    python check_engine_args.py --inventory inventory/blackwell8   what the filter renders, for every transfer backend and speculation
    python check_engine_args.py --units DIR                        units below DIR, as playbooks/render.yml writes them
    python check_engine_args.py --json FILE                        [{"name": ..., "argv": [...], "environment": {...}}, ...]

Needs the packages of requirements.txt beside this file (check.sh makes them). A command line passes when the parser takes it
without an abbreviation and without a deprecated flag, the resolution ends, what it resolved is what the command line meant, and the
rehearsal engine resolves the same.
Command lines that the engine must refuse run with them: a check that lets those pass has lost its teeth.
"""
from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import traceback
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLATFORM = {
    "is_cuda": True, "is_sm120": True, "is_blackwell": True, "has_flashinfer": True, "device_sm": 120, "device_capability": (12, 0),
    "is_hip": False, "is_npu": False, "is_xpu": False, "is_musa": False, "is_mps": False, "is_sm90": False, "is_sm100": False,
    "is_sm100_or_sm110": False, "is_sm110": False, "is_hopper_with_cuda_12_3": False,
}
SHOWN = ("disaggregation_mode", "tp_size", "context_length", "mem_fraction_static", "chunked_prefill_size", "attention_backend", "moe_runner_backend",
         "speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens", "speculative_moe_runner_backend",
         "disaggregation_transfer_backend", "reasoning_parser", "tool_call_parser", "page_size", "kv_cache_dtype", "quantization", "load_balance_method",
         "max_running_requests", "disable_radix_cache", "decode_attention_backend", "prefill_attention_backend", "dsv4_attn_backend", "host", "port",
         "served_model_name", "enable_metrics", "swa_full_tokens_ratio", "disable_custom_all_reduce", "numa_node", "base_gpu_id", "nccl_port")
WANTED = {"attention_backend": "dsv4", "page_size": 256, "kv_cache_dtype": "fp8_e4m3"}
ANSI = re.compile(r"\x1b\[[0-9;]*m")
BASE = ["--model-path", "/model", "--tp-size", "4", "--mem-fraction-static", "0.85", "--chunked-prefill-size", "4096"]
# The engine refuses these (name, what is added to BASE).
REFUSED = [
    ("unknown flag", ["--enable-flashinfer-mxfp4-moe"]),
    ("abbreviation", ["--context-len", "524288"]),
    ("renamed flag", ["--cuda-graph-max-bs", "64"]),
    ("parser name", ["--tool-call-parser", "deepseek-v4"]),
    ("NEXTN", ["--speculative-algorithm", "NEXTN"]),
    ("EAGLE without topk", ["--speculative-algorithm", "EAGLE"]),
    ("EAGLE without steps", ["--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", "1"]),
    ("fake transfer on prefill", ["--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "fake"]),
    ("context beyond the model", ["--context-length", "2Mi"]),
    ("deprecated flag", ["--enable-dp-attention"]),
]


# ---- command lines


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def from_inventory(folder: Path) -> list[dict]:
    """What the filter makes of an inventory, its transfer backend and speculation replaced by each other possible value."""
    import yaml

    variables = {}
    for path in sorted((folder / "group_vars" / "all").glob("*.yml")):
        variables.update(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    logic = load(ROOT / "plugins" / "module_utils" / "serving_plan.py")
    nodes = {gpu: instance["numa_node"] for instance in variables["dsv4_topology"]["instances"].values()
             if instance.get("numa_node", -1) >= 0 for gpu in instance["gpus"]}
    gpus = [{"index": index, "uuid": "GPU-00000000-0000-4000-8000-00000000000%d" % index, "numa_node": nodes.get(index, 0)} for index in range(8)]
    lines = []
    for backend in ("mooncake_tcp", "nixl"):
        for speculation in ("none", "mtp", "dspark"):
            topology = {**variables["dsv4_topology"], "transfer_backend": backend, "speculation": speculation}
            for known in ([], gpus) if speculation == "none" else ([],):
                plan = logic.serving_plan(topology, engine="/engine", router="/router", model_path="/model", gpus=known)
                errors = [item for item in plan["findings"] if item["severity"] == "error"]
                if errors:
                    raise SystemExit("%s with %s and %s: %s" % (folder, backend, speculation, errors))
                for name, instance in plan["instances"].items():
                    if instance["mode"] == "router":
                        continue
                    lines.append({"name": "%s %s %s %s%s" % (folder.name, name, backend, speculation, " by UUID" if known else ""),
                                  "argv": instance["argv"], "environment": instance["environment"]})
    return lines


def from_units(folder: Path) -> list[dict]:
    lines = []
    for path in sorted(folder.rglob("*.service")):
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        settings = [line.partition("=")[::2] for line in text.splitlines() if "=" in line and not line.startswith(("#", ";"))]
        for key, value in settings:
            if key == "ExecStart" and "sglang.launch_server" in value:
                words = [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(value)]
                pairs = [word.replace("%%", "%").partition("=") for name, setting in settings if name == "Environment" for word in shlex.split(setting)]
                lines.append({"name": str(path.relative_to(folder)), "argv": words, "environment": {name: value for name, _equals, value in pairs}})
    return lines


def arguments_of(argv: list[str]) -> list[str]:
    """What follows `-m sglang.launch_server`."""
    return argv[argv.index("sglang.launch_server") + 1:] if "sglang.launch_server" in argv else list(argv)


# ---- the real parser


def model_folder(folder: Path, speculation: str) -> Path:
    """config.json of a DeepSeek-V4 checkpoint; nothing else is read here."""
    maker = load(ROOT / "molecule" / "rehearsal_host" / "checkpoint" / "make_checkpoint.py")
    folder.mkdir()
    config = maker.configuration(maker.parser().parse_args([str(folder), "--speculation", speculation]))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


class Hollow(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """torchvision of the index does not go with a CPU build of torch, and nothing here calls it: modules that hold anything."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: type(name, (), {})
        return module

    def exec_module(self, module):
        pass


def prepare() -> None:
    """Import once; each command line is then resolved in a fork."""
    import sglang  # first: transformers has then noticed that there is no torchvision

    sys.meta_path.insert(0, Hollow())

    if sglang.__version__ != "0.5.23":
        raise SystemExit("check-engine-args: sglang is %s, not 0.5.23" % sglang.__version__)
    from sglang.srt.runtime_context import _PLATFORM

    _PLATFORM._install(**PLATFORM)
    import sglang.srt.server_args


def resolve(line: dict, model: Path) -> dict:
    """Parse and resolve one command line; runs in a process of its own."""
    before = set(sys.modules)
    for name in [name for name in os.environ if name.startswith(("SGLANG_", "MC_", "CUDA_VISIBLE"))]:
        del os.environ[name]
    os.environ.update({name: str(value) for name, value in line.get("environment", {}).items()
                       if name not in ("CUDA_VISIBLE_DEVICES", "PYTHONPATH", "HOME") and not name.startswith("SGLANG_PLUGIN")})
    words = arguments_of(line["argv"])
    if "--config" in words:  # the file with the keys is on the host only
        place = words.index("--config")
        del words[place:place + 2]
    if "--model-path" in words:
        words[words.index("--model-path") + 1] = str(model)
    if "--chat-template" in words:
        words[words.index("--chat-template") + 1] = str(ROOT / "files" / "chat_templates" / Path(words[words.index("--chat-template") + 1]).name)
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    heard = io.StringIO()
    with contextlib.redirect_stderr(heard), contextlib.redirect_stdout(heard):
        strict = argparse.ArgumentParser(prog="sglang serve", allow_abbrev=False)
        ServerArgs.add_cli_args(strict)
        try:
            strict.parse_args(words)
        except SystemExit:
            return {"ok": False, "why": heard.getvalue().strip().splitlines()[-1]}
        if "deprecated" in heard.getvalue():
            return {"ok": False, "why": next(text for text in heard.getvalue().splitlines() if "deprecated" in text)}
        try:
            args = prepare_server_args([*words, "--device", "cuda"])
            args.resolve_once()
            found = args.resolved_dict()
        except SystemExit:
            return {"ok": False, "why": heard.getvalue().strip().splitlines()[-1]}
        except Exception as error:  # noqa: BLE001 - whatever the engine raises is the result
            place = traceback.extract_tb(error.__traceback__)[-1]
            return {"ok": False, "why": "%s: %s (%s:%d)" % (type(error).__name__, str(error).strip() or "-", Path(place.filename).name, place.lineno)}
    differs = {name: found.get(name) for name, value in WANTED.items() if found.get(name) != value}
    if found.get("moe_runner_backend") in ("triton", "cutlass", "flashinfer_cutlass"):
        differs["moe_runner_backend"] = found["moe_runner_backend"]
    if differs:
        return {"ok": False, "why": "resolves to %s" % differs}
    return {"ok": True, "resolved": {name: found.get(name) for name in SHOWN}, "modules": sorted(set(sys.modules) - before)}


def rehearsal(line: dict, model: Path, real: dict) -> dict:
    """{name: [real, rehearsal]} where the rehearsal engine resolves something else. Runs without sglang on the path."""
    code = (
        "import json, sys; from sglang.rehearsal import flags, resolve; "
        "print(json.dumps(resolve.resolve(flags.parse(json.loads(sys.argv[1]))), default=str))"
    )
    words = [str(model) if word == "/model" else word for word in arguments_of(line["argv"])]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "molecule" / "rehearsal_host" / "engine" / "src")}
    argv = [sys.executable, "-c", code, json.dumps(words)]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode:
        return {"exit": [0, done.stderr.strip().splitlines()[-1]]}
    found = json.loads(done.stdout)
    return {name: [value, found.get(name)] for name, value in real.items() if found.get(name) != value}


def in_fork(line: dict, model: Path) -> dict:
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        try:
            answer = resolve(line, model)
        except BaseException as error:  # noqa: BLE001
            answer = {"ok": False, "why": "%s: %s" % (type(error).__name__, error)}
        with os.fdopen(write, "w", encoding="utf-8") as pipe:
            json.dump(answer, pipe, default=str)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else {"ok": False, "why": "the process died"}


def main() -> int:
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--inventory", type=Path, action="append", default=[], help="folder of an inventory: every command line of its plan")
    cli.add_argument("--units", type=Path, action="append", default=[], help="folder with unit files, as render.yml writes them")
    cli.add_argument("--json", type=Path, action="append", default=[], help="file with a list of command lines")
    cli.add_argument("--show", action="store_true", help="print the resolved values too")
    options = cli.parse_args()
    lines = [line for folder in options.inventory for line in from_inventory(folder)]
    lines += [line for folder in options.units for line in from_units(folder)]
    lines += [line for path in options.json for line in json.loads(path.read_text(encoding="utf-8"))]
    if not lines:
        print("check-engine-args: no command line found", file=sys.stderr)
        return 2
    prepare()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        models = {name: model_folder(Path(folder) / name, name) for name in ("mtp", "dspark")}
        model = models["mtp"]
        control = in_fork({"name": "control", "argv": BASE}, model)
        if not control["ok"]:
            print("check-engine-args: the plain command line is refused: %s" % control["why"], file=sys.stderr)
            return 1
        for name in control["modules"]:  # what a resolution imports, once for all forks
            with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
                importlib.import_module(name)
        for line in lines:
            answer = in_fork(line, models["dspark" if "DSPARK" in line["argv"] else "mtp"])
            if answer["ok"]:
                other = rehearsal(line, models["dspark" if "DSPARK" in line["argv"] else "mtp"], answer["resolved"])
                if other:
                    answer.update(ok=False, why="the rehearsal engine differs, [real, rehearsal]: %s" % other)
            failed += not answer["ok"]
            print("%-6s %s%s" % ("ok" if answer["ok"] else "FAILED", line["name"], "" if answer["ok"] else ": " + answer["why"]))
            if options.show and answer["ok"]:
                print("       " + json.dumps(answer["resolved"]))
        for name, words in REFUSED:
            answer = in_fork({"name": name, "argv": BASE + words}, model)
            failed += answer["ok"]
            print("%-6s refused: %s (%s)" % ("FAILED" if answer["ok"] else "ok", name, answer.get("why", "it was accepted")))
    print("%d passed, %d failed" % (len(lines) + len(REFUSED) - failed, failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
