# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The GPUs of the rehearsal host, as the stand-in NVML describes them.

/etc/rehearsal/gpus.json says which GPUs exist. Files in
/run/rehearsal/gpu-processes say who holds memory on them; this engine adds one
for each of its scheduler processes. Without the description nothing is checked.
"""
from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

# Figures of the sizing, in MiB of one instance; they are assumptions chosen so that the reported KV capacity has the
# order of the real one (about 2.58M tokens at TP4, fraction 0.85), not measurements.
WEIGHTS_MIB = 163840
RUNTIME_MIB = 2048
KV_BYTES_PER_TOKEN = 16336
FALLBACK_GPU_MIB = 97887


class DeviceError(RuntimeError):
    """What CUDA would say; str() is the text for the log."""


@dataclass(frozen=True)
class Gpu:
    uuid: str
    memory_mib: int
    base_mib: int
    fault: str


def description_path() -> Path:
    return Path(os.environ.get("REHEARSAL_GPUS", "/etc/rehearsal/gpus.json"))


def processes_path() -> Path:
    return Path(os.environ.get("REHEARSAL_GPU_PROCESSES", "/run/rehearsal/gpu-processes"))


def described() -> list[Gpu] | None:
    """The GPUs in the driver's order, or None when this machine has no description."""
    try:
        tree = json.loads(description_path().read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    defaults = tree.get("defaults", {})
    gpus = []
    for own in tree["gpus"]:
        fault = own.get("fault", "")
        if fault == "missing":
            continue
        item = {**defaults, **own}
        gpus.append(Gpu(item["uuid"], int(item.get("memory_total_mib", FALLBACK_GPU_MIB)), int(item.get("memory_used_mib", 4)), fault))
    return gpus


def visible(gpus: list[Gpu], text: str | None) -> list[Gpu]:
    """CUDA's reading of CUDA_VISIBLE_DEVICES: indices or UUIDs (a unique beginning will do); the first bad entry ends the list."""
    if text is None:
        return list(gpus)
    chosen: list[Gpu] = []
    for word in text.split(","):
        word = word.strip()
        if word.isdigit():
            found = gpus[int(word):int(word) + 1]
        else:
            found = [gpu for gpu in gpus if word.startswith("GPU-") and gpu.uuid.startswith(word)]
        if len(found) != 1 or found[0] in chosen:
            break
        chosen.append(found[0])
    return chosen


def place(args: dict, environment: dict | None = None, one_gpu: bool = False) -> list[Gpu]:
    """The GPU of each rank, or DeviceError. An empty list on a machine without a description."""
    environment = os.environ if environment is None else environment
    ranks = args["tp_size"] * args["pp_size"]
    ids = [args["base_gpu_id"] + rank * args["gpu_id_step"] for rank in range(ranks)]
    nodes = args["numa_node"]
    if nodes is not None and len(nodes) <= max(ids):
        raise IndexError("list index out of range: --numa-node has %d entries, rank %d asks for that of GPU %d"
                         % (len(nodes), ids.index(max(ids)), max(ids)))
    gpus = described()
    if gpus is None:
        return []
    seen = visible(gpus, environment.get("CUDA_VISIBLE_DEVICES"))
    if not seen:
        raise DeviceError("RuntimeError: No CUDA GPUs are available (CUDA_VISIBLE_DEVICES=%s, the driver lists %d)"
                          % (environment.get("CUDA_VISIBLE_DEVICES"), len(gpus)))
    chosen = []
    for rank, index in enumerate(ids):
        if index >= len(seen):
            raise DeviceError(
                "torch.AcceleratorError: CUDA error: invalid device ordinal (rank %d asks for gpu_id %d, %d visible: "
                "CUDA_VISIBLE_DEVICES=%s)" % (rank, index, len(seen), environment.get("CUDA_VISIBLE_DEVICES")))
        gpu = seen[0] if one_gpu else seen[index]
        if gpu.fault:
            raise DeviceError("torch.AcceleratorError: CUDA error: %s on %s (gpu_id %d)"
                              % ({"lost": "device is lost"}.get(gpu.fault, "unknown error: " + gpu.fault), gpu.uuid, index))
        chosen.append(gpu)
    return chosen


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def held_by_others() -> dict[str, int]:
    """{uuid: MiB} that registered live processes hold."""
    held: dict[str, int] = {}
    for path in processes_path().glob("*.json"):
        try:
            entry = json.loads(path.read_text(encoding="utf-8"))
            if alive(int(entry["pid"])):
                for uuid in entry["gpus"]:
                    held[uuid] = held.get(uuid, 0) + int(entry["used_mib_per_gpu"])
        except (OSError, ValueError, KeyError):
            continue
    return held


def check_memory(gpus: list[Gpu], fraction: float) -> None:
    held = held_by_others()
    for rank, gpu in enumerate(gpus):
        others = held.get(gpu.uuid, 0)
        free = gpu.memory_mib - gpu.base_mib - others
        wanted = int(gpu.memory_mib * fraction)
        if wanted > free:
            raise DeviceError(
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate %.2f GiB. GPU %d has a total capacity of "
                "%.2f GiB of which %.2f GiB is free. Including non-PyTorch memory, this process has %.2f GiB memory in use."
                % ((wanted - free) / 1024 + 0.01, rank, gpu.memory_mib / 1024, max(0, free) / 1024, 2.18))


def kv_tokens(args: dict, gpus: list[Gpu]) -> int:
    """Tokens of the KV pool, rounded down to pages."""
    total = min([gpu.memory_mib for gpu in gpus], default=FALLBACK_GPU_MIB)
    per_token = KV_BYTES_PER_TOKEN * (44 / 43 if args["speculative_algorithm"] else 1)
    free = total * args["mem_fraction_static"] - WEIGHTS_MIB / (args["tp_size"] * args["pp_size"]) - RUNTIME_MIB
    tokens = int(free * 2**20 / per_token)
    if args["max_total_tokens"] is not None:
        tokens = min(tokens, args["max_total_tokens"])
    if tokens <= 0:
        raise DeviceError("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. "
                          "self.server_args.mem_fraction_static=%s" % args["mem_fraction_static"])
    return tokens // args["page_size"] * args["page_size"]


def register(pid: int, gpu: Gpu, fraction: float, name: str) -> Path | None:
    """Tell the stand-in NVML that a process holds memory. None when the run directory cannot be written."""
    folder = processes_path()
    path = folder / ("%d.json" % pid)
    entry = {"pid": pid, "gpus": [gpu.uuid], "used_mib_per_gpu": int(gpu.memory_mib * fraction), "name": name}
    try:
        temporary = folder / (".%d.tmp" % pid)
        temporary.write_text(json.dumps(entry) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError:
        return None
    return path
