# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Starts the engine and the router on a machine with one or two GPUs, with the collection's own command lines.

    python3 tests/gpu/servers.py show  NAME...      the command line and environment, and how they differ from the product's
    python3 tests/gpu/servers.py start NAME...      each detached, log in $DSV4_GPU_DIR/logs/NAME.log
    python3 tests/gpu/servers.py wait  NAME... [--seconds N]
    python3 tests/gpu/servers.py stop  NAME... [--kill]
    python3 tests/gpu/servers.py list
    python3 tests/gpu/servers.py exec  NAME PROGRAM...   another program with that server's environment

The topology is inventory/blackwell8's, rendered by the collection's own filter, with the changes that SERVERS lists. What
must be added around it on a machine where the engine is not installed (library paths) comes from $DSV4_GPU_DIR/environment,
which unpack.sh writes; with a normal installation there is no such file.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import pathlib
import secrets
import shlex
import signal
import subprocess
import sys
import time
import urllib.request

import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / ".collections"))
from ansible_collections.blackwell.dsv4.plugins.module_utils.serving_plan import serving_plan  # noqa: E402

DIR = pathlib.Path(os.environ.get("DSV4_GPU_DIR", "/tmp/dsv4-gpu"))
ENGINE = os.environ.get("DSV4_GPU_ENGINE", sys.prefix)
ROLE = ROOT / "roles/sglang_dsv4/files"
PAIR = ("prefill", "decode", "router")
# How many GPUs there are. With one, prefill and decode share it: the plan names two, and the processes see the first.
GPUS = int(os.environ.get("DSV4_GPU_COUNT", "2"))
CUDA_HOME = os.environ.get("CUDA_HOME", "/usr/local/cuda")
KERNELS = os.environ.get("DSV4_GPU_KERNELS", str(DIR / "kernels"))

# What the engine sets by itself on sm_120 (sglang/srt/arg_groups/model_hook.py); here it is said from outside.
ON_SM120 = {"SGLANG_OPT_USE_TOPK_V2": "0", "SGLANG_OPT_USE_TILELANG_INDEXER": "1", "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1"}
# Neither FlashInfer nor a sm_120 kernel runs here: if ours declines a call, the engine's Triton kernel must take it.
OURS = {**ON_SM120, "SGLANG_SM120_FLASHMLA_BACKEND": "triton"}
ARMS = {
    # name: (environment, test mode, kernels of ours; None: those that the topology gives to decode)
    "hopper": ({}, "weights", []),
    "stock": (ON_SM120, "weights", []),
    "torch": ({**ON_SM120, "SGLANG_OPT_USE_TILELANG_INDEXER": "0"}, "weights,indexer", []),
    "ours": (OURS, "weights,attention", None),
    "guard": ({}, "weights", ["nextn_moe"]),
    "nan": ({}, "weights,nan", ["nextn_moe"]),
}
# A GPU that is not Blackwell: the engine's own choice, FlashInfer's MXFP8 x MXFP4, exists for sm_120 in another form.
# Several cold servers beside each other compile for minutes inside one forward.
ONE_GPU_ARGS = ["--load-format", "dummy", "--moe-runner-backend", "marlin", "--watchdog-timeout", "1200"]
# The engine finds its compiled kernels again only under a path without links (folders()).
ONE_GPU_ENVIRONMENT = {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0", "SGLANG_JIT_CACHE_DIR": str(DIR.resolve() / "cache/all/jit")}


@dataclasses.dataclass
class Server:
    """One server: what of the topology it is, and what differs."""

    instance: str = "single"
    # tiny: 6 layers, everything else as in the real model. deep: all 43 layers, 8 experts in place of 256.
    model: str = "tiny"
    arm: str = "hopper"
    gpu: int = 0
    port: int = 30001
    context: int = 524288
    batches: tuple[int, ...] = (1, 8, 32)
    tokens: int = 1_000_000
    fraction: float = 0.95
    speculation: str = "none"
    backend: str = os.environ.get("DSV4_GPU_BACKEND", "mooncake_tcp")
    extra: tuple[str, ...] = ()
    environment: dict = dataclasses.field(default_factory=dict)


def speed(arm: str, context: int, port: int) -> Server:
    """A server for the decode speed of one request, on the GPU that DSV4_GPU_ON names."""
    return Server(model="deep", arm=arm, gpu=int(os.environ.get("DSV4_GPU_ON", "0")), port=port, context=context, batches=(1,), tokens=131072, fraction=0.95)


SERVERS = {
    "hopper": Server(arm="hopper"),
    "stock": Server(arm="stock", port=30011),
    "ours": Server(arm="ours", port=30021),
    "mtp": Server(arm="guard", port=30031, speculation="mtp", batches=(1, 8)),
    "mtp-nan": Server(arm="nan", gpu=1, port=30041, speculation="mtp", batches=(1, 8)),
    "prefill": Server(instance="prefill", gpu=0, port=30000),
    "decode": Server(instance="decode", arm="ours", gpu=1, port=30002),
    "router": Server(instance="router", port=30001),
}
for _at, _arm in enumerate(("torch", "stock", "ours")):
    for _step, _context in enumerate((8192, 65536, 524288)):
        SERVERS[f"{_arm}-{_context // 1024}k"] = speed(_arm, _context, 30100 + 100 * _at + 10 * _step)


def topology(server: Server) -> dict:
    """The product's topology with what this machine and this server change."""
    text = (ROOT / "inventory/blackwell8/group_vars/all/topology.yml").read_text()
    found = yaml.safe_load(text)["dsv4_topology"]
    listed = found["instances"]["decode"]["kernels"]
    found.update(context_length=server.context, speculation=server.speculation, transfer_backend=server.backend,
                 gpu_count=max(2, GPUS))
    for name, instance in found["instances"].items():
        if instance["mode"] == "router":
            continue
        # Prefill and decode are one pair, so that the plan of each names the other as it is.
        own = server if name == server.instance else SERVERS.get(name, server)
        environment, mode, kernels = ARMS[own.arm]
        kernels = listed if kernels is None else kernels
        instance["gpus"] = [own.gpu]
        instance["numa_node"] = -1
        instance["mem_fraction_static"] = own.fraction
        instance["cuda_graph_max_bs_decode"] = max(own.batches)
        instance["kernels"] = kernels
        instance["extra_args"] = [*ONE_GPU_ARGS, "--cuda-graph-bs-decode", *map(str, own.batches), "--max-total-tokens", str(own.tokens),
                                  *own.extra]
        plugins = (["dsv4_sm120"] if kernels else []) + ["dsv4_gpu_test"]
        instance["environment"] = {**ONE_GPU_ENVIRONMENT, **environment, "DSV4_GPU_TEST": mode, "SGLANG_PLUGINS": ",".join(plugins),
                                   "DSV4_SM120_STRICT": "1", **own.environment}
        if name == server.instance and server.instance == "single":
            instance["port"] = server.port
            instance["nccl_port"] = server.port + 5
    if server.instance == "single":
        found["instances"]["router"]["port"] = server.port
    return found


def plan(server: Server) -> dict:
    """The filter's plan; ends the program when the filter refuses the topology."""
    made = serving_plan(topology(server), engine=ENGINE, router=ENGINE, model_path=str(DIR / server.model), kernel_path=KERNELS,
                        cuda_home=CUDA_HOME, cache_root=str(DIR / "cache"), api_key=server.instance in PAIR,
                        router_launcher=str(ROLE / "libexec/router_launcher.py"), site_path=str(ROLE / "site"))
    errors = [item["line"] for item in made["findings"] if item["severity"] == "error"]
    if errors:
        sys.exit("\n".join(errors))
    return made


def command(name: str) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of one server."""
    server = SERVERS[name]
    instance = plan(server)["instances"][server.instance]
    environment = dict(os.environ)
    around = DIR / "environment"
    outer = dict(line.split("=", 1) for line in around.read_text().splitlines() if "=" in line) if around.exists() else {}
    environment.update(outer)
    environment.update(instance["environment"])
    if GPUS == 1 and server.instance != "router":
        environment["CUDA_VISIBLE_DEVICES"] = "0"
    # The test's own plugin finds out by dsv4_sm120 which process it is in, so that is on the path in every arm.
    paths = [instance["environment"].get("PYTHONPATH", ""), str(ROOT / "tests/gpu/path"), KERNELS, outer.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = ":".join(path for path in paths if path)
    # systemd would hand these over below /run/credentials.
    environment["CREDENTIALS_DIRECTORY"] = str(DIR / "credentials")
    argv = list(instance["argv"])
    if "--config" in argv:
        argv[argv.index("--config") + 1] = str(DIR / "credentials/worker.yaml")
    return argv, environment


def pid_file(name: str) -> pathlib.Path:
    return DIR / "run" / f"{name}.pid"


def key() -> str:
    """The pair's API key."""
    return (DIR / "credentials/router-api-key").read_text().strip()


def folders(name: str) -> None:
    """Makes the folders that a server writes to, and the pair's key in the two forms that the units get it in."""
    for folder in ("logs", "run", "cache/all", "credentials"):
        (DIR / folder).mkdir(parents=True, exist_ok=True)
    if not (DIR / "credentials/router-api-key").exists():
        word = secrets.token_hex(16)
        (DIR / "credentials/router-api-key").write_text(word + "\n")
        (DIR / "credentials/worker.yaml").write_text(f"api-key: {word}\n")
    link = DIR / "cache" / SERVERS[name].instance
    if not link.is_symlink():
        link.symlink_to("all")  # one set of compiled kernels for every server of this machine


def start(name: str) -> None:
    """Starts one server in a session of its own, unless it runs. A process outside that session waits for it and notes its exit status."""
    if alive(name):
        return
    argv, environment = command(name)
    folders(name)
    pid_file(name).unlink(missing_ok=True)
    watcher = os.fork()
    if watcher:
        while not pid_file(name).exists() and os.waitpid(watcher, os.WNOHANG) == (0, 0):
            time.sleep(0.01)
        return
    os.setsid()
    log = os.open(DIR / "logs" / f"{name}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for number in (0, 1, 2):
        os.dup2(log, number)
    try:
        os.write(log, f"==start== {time.strftime('%H:%M:%S')} {shlex.join(argv)}\n".encode())
        process = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, cwd=DIR)
        pid_file(name).write_text(f"{process.pid}\n")
        status = process.wait()
    except OSError as error:
        status = error
    os.write(log, f"==exit== {time.strftime('%H:%M:%S')} status {status}\n".encode())
    os._exit(0)


def url(name: str) -> str:
    """Where a server answers."""
    server = SERVERS[name]
    return plan(server)["instances"][server.instance]["url"]


def alive(name: str) -> bool:
    """Says whether the server's first process lives."""
    try:
        pid = int(pid_file(name).read_text())
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, ValueError):
        return False


def ready(name: str) -> bool:
    """Says whether the server answers and its log has the engine's ready line."""
    if SERVERS[name].instance != "router" and b"ready to roll" not in (DIR / "logs" / f"{name}.log").read_bytes().rpartition(b"==start==")[2]:
        return False
    try:
        path = "/readiness" if SERVERS[name].instance == "router" else "/health"
        with urllib.request.urlopen(url(name) + path, timeout=30) as answer:
            return answer.status == 200
    except OSError:
        return False


def wait(names: list[str], seconds: float) -> list[str]:
    """Waits for servers; returns those that are not ready."""
    end = time.monotonic() + seconds
    left = list(names)
    while left and time.monotonic() < end:
        for name in list(left):
            if ready(name):
                print(f"{name}: ready after {time.time() - pid_file(name).stat().st_mtime:.0f} s", flush=True)
                left.remove(name)
            elif not alive(name):
                print(f"{name}: died", flush=True)
                return left
        time.sleep(1)
    return left


def stop(name: str, kill: bool) -> None:
    """Ends a server's whole session."""
    try:
        group = int(pid_file(name).read_text())
    except (OSError, ValueError):
        return
    for number in ([signal.SIGKILL] if kill else [signal.SIGTERM, signal.SIGKILL]):
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            break
        if number == signal.SIGTERM:
            end = time.monotonic() + 20
            while alive(name) and time.monotonic() < end:
                time.sleep(0.5)
    pid_file(name).unlink(missing_ok=True)


def show(name: str) -> None:
    """Prints one server's command and how it differs from what the product renders for the same instance."""
    server = SERVERS[name]
    text = yaml.safe_load((ROOT / "inventory/blackwell8/group_vars/all/topology.yml").read_text())["dsv4_topology"]
    product = serving_plan(copy.deepcopy(text), engine=ENGINE, router=ENGINE, model_path=str(DIR / server.model), kernel_path=KERNELS,
                           cuda_home=CUDA_HOME, cache_root=str(DIR / "cache"))["instances"][server.instance]
    here = plan(server)["instances"][server.instance]
    print(f"{name}: {shlex.join(here['argv'])}")
    for label, one, two in (("-", product, here), ("+", here, product)):
        pairs = [f"{k}={v}" for k, v in one["environment"].items() if two["environment"].get(k) != v]
        print(label, "environment:", " ".join(pairs) or "nothing")
    print("product:", shlex.join(product["argv"]))


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("show", "start", "wait", "stop", "list", "exec"))
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    if given.action == "list":
        print(json.dumps({name: dataclasses.asdict(server) for name, server in SERVERS.items()}, indent=1))
    elif given.action == "exec":
        folders(given.names[0])
        os.execvpe(given.names[1], given.names[1:], command(given.names[0])[1])
    elif given.action == "wait":
        left = wait(given.names, given.seconds)
        if left:
            print("not ready: " + ", ".join(left))
            return 1
    else:
        for name in given.names:
            {"show": show, "start": start, "stop": lambda one: stop(one, given.kill)}[given.action](name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
