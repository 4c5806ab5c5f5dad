# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What ended a server, read from the last lines of its journal.

The root line counts, not the loudest one: "CUDA graph capture failed" is often a kernel that this card does not
have. Stands alone (the standard library only), because a copy of it runs on the host after each failed start.
"""

from __future__ import annotations

import re

# A failure that is the same at every try: one try is enough.
PERMANENT = True
# One that may pass: the next try may be lucky.
PASSING = False

PHASES = (
    ("argument check", r"usage:|launch_server.*error:|server_args="),
    ("process start", r"Init torch distributed begin|init_distributed|Started .*sglang"),
    ("weight load", r"Load weight begin|Loading safetensors|safetensors checkpoint shards|Loading weights"),
    ("memory pool", r"Memory pool|KV Cache is allocated|max_total_num_tokens"),
    ("kernel compile and autotune", r"autotun|JIT|ninja|nvcc|tilelang|Compiling"),
    ("CUDA graph capture", r"[Cc]apture (cuda|CUDA) graph|init_cuda_graphs|Capturing batches"),
    ("HTTP server", r"Uvicorn running|Application startup complete"),
    ("warm-up", r"disaggregation warmup|warmup"),
    ("ready", r"fired up and ready to roll"),
)

# (class, permanent, pattern, sentence, advice). The first rule that matches any line wins, so root causes stand
# above the messages that they set off.
RULES = (
    ("kernel_unsupported_on_sm120", PERMANENT, r"Unsupported architecture|only supported on (?:sm_?(?:90|100)|SM(?:90|100))",
     "a kernel of the engine does not exist for this card (sm_120)",
     "Restarting gives the same result. Use SGLang 0.5.23 or newer, which carries the sm_120 fall-back, and leave "
     "datacenter-only options out. Go back with rollback.yml meanwhile."),
    ("no_kernel_image", PERMANENT, r"no kernel image is available for execution on the device",
     "a package was built without code for this card (sm_120)",
     "Install the locked wheels (CUDA 13): torch.cuda.get_arch_list() must hold sm_120."),
    ("shared_memory_limit", PERMANENT,
     r"uses too much shared data \((0x[0-9a-fA-F]+) bytes, (0x[0-9a-fA-F]+) max\)|"
     r"out of resource: shared memory, Required: (\d+), Hardware limit: (\d+)",
     "a kernel asks for more shared memory than the card has",
     "Lower cuda_graph_max_bs_decode or chunked_prefill_size of this instance: the kernel is built for that size."),
    ("numa_refused", PERMANENT, r"setting membind: Invalid argument|set_mempolicy: Operation not permitted|"
                                r"sched_setaffinity: Invalid argument|failed at step NUMA_POLICY|"
                                r"Failed to set NUMA memory policy|libnuma: Warning: .* not allowed",
     "NUMA binding refused by cpuset/seccomp",
     "The unit's memory nodes and the GPUs' node differ, or a syscall filter forbids set_mempolicy: compare numa_node "
     "with AllowedMemoryNodes, or use numa_node -1."),
    ("memlock", PERMANENT, r"[Ff]ailed to register memory.*Cannot allocate memory|ibv_reg_mr.*failed|"
                           r"register memory.*ENOMEM",
     "memory could not be locked for the transfer engine",
     "The running process needs LimitMEMLOCK=infinity; a shell's ulimit says nothing about a unit."),
    ("oom_load_or_capture", PERMANENT, r"CUDA out of memory|OutOfMemoryError|cudaErrorMemoryAllocation",
     "a GPU's memory is full", ""),
    ("draft_nan", PERMANENT, r"dsv4_sm120: nextn_moe: the draft computes NaN",
     "the draft of the speculation computes NaN, so the guard ended the server",
     "Answers were right and slow. Set dsv4_topology.speculation to none, or mend what the draft's experts run with: "
     "files/moe_methods.json says which settings are right."),
    ("no_gpu", PASSING, r"no CUDA-capable device is detected|CUDA driver initialization failed|"
                        r"No CUDA GPUs are available|NVML: Driver Not Loaded|Found no NVIDIA driver|"
                        r"GPUs? .*not (?:there|visible|usable) (?:after|yet)",
     "the GPUs were not usable when the server started",
     "The driver or nvidia-uvm was not ready, or a card fell off the bus: nvidia-smi -L."),
    ("gpu_fault", PASSING, r"CUDA error: an illegal memory access|CUDA error: unspecified launch failure|Xid|"
                           r"CUDA error: uncorrectable ECC",
     "a GPU fault ended the server",
     "See the kernel log for Xid; if it comes back, verify peer access and ECC."),
    ("load_not_spread", PERMANENT, r"load not spread over the unit's GPUs",
     "load not spread over the unit's GPUs", "The ranks did not get one GPU each: engine and driver do not match."),
    ("port_in_use", PASSING,
     r"(?:EADDRINUSE|[Aa]ddress already in use|port \d+ is (?:taken|in use|busy))",
     "a port was taken", "Another process holds the port; the journal or ss -ltnp names it."),
    ("bad_arguments", PERMANENT, r"launch_server(?:\.py)?: error:|unrecognized arguments|invalid choice:|"
                                 r"ambiguous option|error: argument --|"
                                 r"AssertionError: Only EAGLE",
     "the engine refused its command line", "make check-engine-args checks command lines against the engine."),
    ("missing_library", PERMANENT, r"ImportError: (lib[^:\s]+): cannot open shared object|"
                                   r"error while loading shared libraries: (lib[^:\s]+)",
     "a shared library is missing", "libibverbs.so.1 and libmlx5.so.1 come with libibverbs1 and ibverbs-providers."),
    ("missing_package", PERMANENT, r"ModuleNotFoundError: No module named '([^']+)'|ImportError:.*deepseek-recipe",
     "a Python package is missing from the environment", "The lock and the environment differ: rebuild the release."),
    ("cache_permission", PERMANENT, r"(?:PermissionError|Permission denied|Errno 13).*(?:cache|triton|inductor|/tmp|"
                                    r"flashinfer|tilelang|tvm)",
     "a cache folder belongs to somebody else",
     "The unit's caches lie in /var/cache/dsv4/<instance>; another value in environment points elsewhere."),
    ("disk_full", PASSING, r"No space left on device", "the disk is full", "Make room; caches lie in /var/cache/dsv4."),
    ("checkpoint", PERMANENT, r"MetadataIncompleteBuffer|SafetensorError|HeaderTooLarge|"
                              r"(?:FileNotFoundError|OSError).*(?:config\.json|\.safetensors|tokenizer)",
     "the checkpoint is incomplete or damaged", "Run the model_staging role again with deep verification."),
    ("peer_timeout", PASSING, r"could not fetch prefill parallel info|KVTransferError|"
                              r"Watchdog caught collective operation timeout|NCCL.*timeout",
     "the other half or a rank did not answer", "See the other unit's journal; test peer access between the GPUs."),
    ("host_oom", PASSING, r"oom-kill|Out of memory: Killed process|A process of this unit has been killed by the OOM",
     "the host ran out of memory", "Look for other users of the host's RAM; the page cache is not one."),
    ("start_timeout", PASSING, r"start operation timed out|start-post operation timed out|Result=timeout|"
                               r"not ready after \d+ s",
     "the start limit passed before the server was ready", ""),
    ("watchdog", PASSING, r"[Ww]atchdog timeout|Scheduler watchdog",
     "a step of the engine took longer than its watchdog allows", "A cold compile can: start again, caches persist."),
)

_OOM = re.compile(
    r"Tried to allocate ([\d.]+) (MiB|GiB).*?GPU (\d+) has a total capacity of ([\d.]+) (MiB|GiB)"
    r"(?: of which ([\d.]+) (MiB|GiB) is free)?"
    r"(?:.*?this process has ([\d.]+) (MiB|GiB) memory in use)?", re.S)
_SIZE = {"MiB": 1.0, "GiB": 1024.0}


def _mib(amount, unit):
    return round(float(amount) * _SIZE[unit], 2) if amount else None


def last_phase(lines):
    """The last phase of a start that the journal shows, by the order of a start."""
    reached = "nothing logged"
    for line in lines:
        for name, pattern in PHASES:
            if re.search(pattern, line):
                reached = name
    return reached


def _details_of_oom(text):
    match = _OOM.search(text)
    if not match:
        return {}, "Lower mem_fraction_static or cuda_graph_max_bs_decode of this instance."
    details = {
        "tried_mib": _mib(match.group(1), match.group(2)),
        "gpu": int(match.group(3)),
        "capacity_mib": _mib(match.group(4), match.group(5)),
        "free_mib": _mib(match.group(6), match.group(7)),
        "this_process_mib": _mib(match.group(8), match.group(9)),
    }
    if None not in (details["free_mib"], details["this_process_mib"]):
        other = details["capacity_mib"] - details["free_mib"] - details["this_process_mib"]
        details["others_mib"] = round(other, 2)
        if other > 2048:
            return details, "another process holds %.1f GiB of GPU %d: nvidia-smi names it; stop it, the fraction is " \
                            "not the cause." % (other / 1024, details["gpu"])
    return details, "Lower mem_fraction_static or cuda_graph_max_bs_decode of this instance."


def memory_spread(used_mib):
    """A sentence when one GPU of a unit holds the load and the others hold nothing, else None."""
    if len(used_mib) < 2:
        return None
    most = max(used_mib)
    rest = sorted(used_mib)[:-1]
    if most < 8192 or max(rest) > 0.05 * most:
        return None
    if len(set(rest)) == 1:
        tail = "%d MiB x%d" % (rest[0], len(rest))
    else:
        tail = ", ".join("%d MiB" % value for value in rest)
    return "load not spread over the unit's GPUs (%.1f GiB / %s)" % (most / 1000, tail)


def classify(lines, used_mib=(), engine_version="", result=""):
    """{class, permanent, what, advice, evidence, details, phase} of a failed start.

    lines: the journal's last lines. used_mib: memory in use per GPU of the unit while it loaded. result: systemd's
    Result of the unit. What no rule knows stays "unknown", with the last lines as evidence.
    """
    lines = [str(line).rstrip("\n") for line in lines]
    text = "\n".join(lines)
    phase = last_phase(lines)
    spread = memory_spread(list(used_mib))
    if spread and re.search(r"CUDA out of memory|OutOfMemoryError", text):
        return _answer("load_not_spread", PERMANENT, spread,
                       "The ranks did not get one GPU each; this is no ordinary shortage of memory.", spread,
                       dict(_details_of_oom(text)[0], used_mib=list(used_mib)), phase)
    for name, permanent, pattern, what, advice in RULES:
        for line in lines:
            match = re.search(pattern, line)
            if not match:
                continue
            details = {}
            if name == "oom_load_or_capture":
                details, advice = _details_of_oom(text)
            elif name == "shared_memory_limit":
                numbers = [int(group, 0) for group in match.groups() if group]
                details = {"required_bytes": numbers[0], "limit_bytes": numbers[1]}
                what = "%s: %d > %d bytes" % (what, numbers[0], numbers[1])
            elif name == "port_in_use":
                details, what = _port(lines, line, what)
            elif name == "kernel_unsupported_on_sm120":
                details = {"engine_version": engine_version or "unknown", "minimum_version": "0.5.23"}
            elif name in ("missing_library", "missing_package"):
                found = [group for group in match.groups() if group]
                details = {"name": found[0]} if found else {}
                what = "%s%s" % (what, ": %s" % found[0] if found else "")
            elif name == "start_timeout":
                what = "%s; it had reached: %s" % (what, phase)
                advice = "Raise sglang_dsv4_start_timeout if that phase was going on; look at the phase if it stood."
            return _answer(name, permanent, what, advice, line.strip(), details, phase)
    if result == "timeout":
        return _answer("start_timeout", PASSING, "the start limit passed; it had reached: %s" % phase,
                       "Raise sglang_dsv4_start_timeout if that phase was going on.", (lines or [""])[-1], {}, phase)
    return _answer("unknown", PASSING, "unknown failure; the last phase was: %s" % phase,
                   "Read the whole journal of the unit.", "\n".join(lines[-5:]), {}, phase)


def _answer(name, permanent, what, advice, evidence, details, phase):
    return {"class": name, "permanent": permanent, "what": what, "advice": advice, "evidence": evidence,
            "details": details, "phase": phase}


def _port(lines, line, what):
    """The number of the port that was taken: on the line itself, or on one of its neighbours."""
    patterns = (r"port:? ?(\d{2,5})", r":(\d{4,5})\b", r"\((?:[^)]*, ?)?(\d{4,5})\)")
    index = lines.index(line)
    for candidate in [line] + lines[max(0, index - 3):index + 4]:
        for pattern in patterns:
            match = re.search(pattern, candidate)
            if match and 0 < int(match.group(1)) < 65536:
                return {"port": int(match.group(1))}, "port %s was taken" % match.group(1)
    return {}, what
