# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Start, ready, stop.

The order is SGLang's: processes first, then the weights with nothing listening
but the bootstrap server, then HTTP, the warm-up and the ready line, which is
printed even when the warm-up failed. SIGTERM lets running requests finish.
"""
from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import traceback
import warnings
from importlib.metadata import entry_points

from sglang.rehearsal import devices, flags, resolve
from sglang.rehearsal.faults import Settings
from sglang.rehearsal.ranks import Ranks

log = logging.getLogger("sglang")
PLUGIN_GROUP = "sglang.srt.plugins"

# What the journal shows before a start ends, for the fault start_error.
START_ERRORS = {
    "oom": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1024.00 MiB. GPU 0 has a total capacity of 95.07 GiB of which "
           "298.69 MiB is free. Including non-PyTorch memory, this process has 94.77 GiB memory in use.",
    "other_process": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1024.00 MiB. GPU 0 has a total capacity of 95.07 GiB of "
                     "which 298.69 MiB is free. Including non-PyTorch memory, this process has 11.02 GiB memory in use.",
    "no_kernel": "RuntimeError: RMSNorm failed with error code no kernel image is available for execution on the device",
    "unsupported_arch": "RuntimeError: Assertion error (csrc/apis/hyperconnection.hpp): Unsupported architecture",
    "shared_memory": "ptxas error   : Entry function 'sm120_paged_mqa_logits_metadata' uses too much shared data (0xc980 bytes, 0xc000 max)",
    "numa": "set_mempolicy: Operation not permitted",
    "corrupt_shard": "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
    "traceback": "RuntimeError: rehearsal fault",
}


def main(argv: list[str]) -> int:
    warnings.warn("'python -m sglang.launch_server' is still supported, but 'sglang serve' is the recommended entrypoint.", UserWarning, stacklevel=2)
    raw = flags.parse(argv)
    logging.basicConfig(level=raw.log_level.upper(), format="[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S", stream=sys.stderr, force=True)
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)  # routers knock with an HTTP/2 preface
    name_plugins()
    args = resolve.resolve(raw)
    args["launch_command"] = "python -m sglang.launch_server " + raw.launch_command
    settings = Settings(args["disaggregation_mode"])
    # Keys included: SGLang logs them too, and whoever hides them has to be tried.
    log.info("server_args=%s", {name: value for name, value in args.items() if name not in ("model_config", "launch_command")})

    ranks = Ranks(orphans=bool(settings.faults.get("orphans")))
    failed = []

    def child_failed(_number, _frame) -> None:
        """A scheduler reported a failure: end as SGLang does, with everything that belongs to it."""
        failed.append(True)
        log.error("Received sigquit from a child process. It usually means the child failed.")
        ranks.stop()
        os.kill(os.getpid(), signal.SIGKILL)

    signal.signal(signal.SIGQUIT, child_failed)
    try:
        start_error = settings.faults.get("start_error")
        if start_error is not None:
            raise devices.DeviceError(START_ERRORS[start_error])
        gpus = devices.place(args, one_gpu=bool(settings.faults.get("gpu_zero")))
        devices.check_memory(gpus, args["mem_fraction_static"])
        kv_tokens = devices.kv_tokens(args, gpus)
        ranks.start(args, gpus)
    except (devices.DeviceError, IndexError) as error:
        log.error("[TP0] Scheduler hit an exception: Traceback (most recent call last):\n%s", error)
        log.error("Received sigquit from a child process. It usually means the child failed.")
        return 1
    try:
        return asyncio.run(serve(args, settings, ranks, kv_tokens))
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        ranks.stop()


def name_plugins() -> None:
    wanted = os.environ.get("SGLANG_PLUGINS")
    chosen = None if wanted is None else [name.strip() for name in wanted.split(",") if name.strip()]
    for entry in entry_points(group=PLUGIN_GROUP):
        state = "found" if chosen is None or entry.name in chosen else "not in SGLANG_PLUGINS"
        log.info("rehearsal: plugin %s = %s (%s; this engine runs no kernels and applies no plugin)", entry.name, entry.value, state)
    for name in chosen or []:
        if name not in [entry.name for entry in entry_points(group=PLUGIN_GROUP)]:
            log.warning("rehearsal: SGLANG_PLUGINS names %s, which is not installed", name)


async def serve(args: dict, settings: Settings, ranks: Ranks, kv_tokens: int) -> int:
    from aiohttp import web

    from sglang.rehearsal.encoding import Encoder
    from sglang.rehearsal.engine import Engine
    from sglang.rehearsal.server import Server, warm_up

    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    encoder = Encoder(args["tokenizer_path"], args["reasoning_parser"], args["tool_call_parser"])
    engine = Engine(args, settings, encoder, ranks, kv_tokens)
    if engine.half is not None:
        await engine.half.start()
    watch = loop.create_task(watch_children(engine))
    runner = web.AppRunner(Server(engine).app(), access_log=None, handler_cancellation=True)
    try:
        loading = loop.create_task(load(engine))
        stopping = loop.create_task(stop.wait())
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            loading.cancel()
            return 0
        loading.result()
        await runner.setup()
        try:
            await web.TCPSite(runner, args["host"], args["port"], backlog=2048).start()
        except OSError as error:
            print("ERROR:    [Errno %s] error while attempting to bind on address ('%s', %s): %s"
                  % (error.errno, args["host"], args["port"], os.strerror(error.errno or 0).lower()), file=sys.stderr, flush=True)
            return 1
        log.info("Uvicorn running on http://%s:%s (Press CTRL+C to quit)", args["host"], args["port"])
        warming = loop.create_task(get_ready(engine, warm_up))
        await stop.wait()
        warming.cancel()
        await drain(engine)
        return 0
    finally:
        watch.cancel()
        await runner.cleanup()
        if engine.half is not None:
            await engine.half.stop()


async def load(engine) -> None:
    """The weights, with the log of a load."""
    args, settings = engine.args, engine.settings
    log.info("[TP0] Init torch distributed begin.")
    log.info("[TP0] Load weight begin. avail mem=%.2f GB", devices.FALLBACK_GPU_MIB / 1024)
    if settings.faults.get("start_hang"):
        await asyncio.sleep(10**9)
    shards = 8
    for shard in range(1, shards + 1):
        await asyncio.sleep(settings.load_seconds / shards)
        print("Loading safetensors checkpoint shards: %3d%% Completed | %d/%d" % (100 * shard // shards, shard, shards), file=sys.stderr, flush=True)
    log.info("[TP0] Load weight end. type=DeepseekV4ForCausalLM, dtype=torch.bfloat16")
    log.info("[TP0] KV Cache is allocated. #tokens: %d", engine.kv_tokens)
    log.info("[TP0] max_total_num_tokens=%d, chunked_prefill_size=%d, max_prefill_tokens=%s, max_running_requests=%d, context_len=%d, "
             "available_gpu_mem=%.2f GB", engine.kv_tokens, args["chunked_prefill_size"], args["max_prefill_tokens"],
             args["max_running_requests"], args["context_length"], devices.FALLBACK_GPU_MIB * (1 - args["mem_fraction_static"]) / 1024)
    if engine.mode == "prefill":
        engine.half.ranks_ready = True


async def get_ready(engine, warm_up) -> None:
    args, faults = engine.args, engine.faults
    if faults.get("never_ready"):
        await asyncio.sleep(10**9)
    if not args["skip_server_warmup"]:
        if engine.mode != "null":
            log.info("Start of pd disaggregation warmup ...")
        await asyncio.sleep(engine.settings.warmup_seconds)
        await warm_up(engine)
        if faults.get("warmup_failed"):
            log.info("Disaggregation warmup failed (mode=%s), status codes: %s", engine.mode, [500])
        elif engine.mode != "null":
            log.info("Disaggregation warmup requests completed for all %s DP ranks", args["dp_size"])
            log.info("End of disaggregation warmup")
    engine.status = "UnHealthy" if faults.get("warmup_failed") else "Up"
    log.info("The server is fired up and ready to roll!")
    if faults.get("exit_after") is not None:
        await asyncio.sleep(float(faults.get("exit_after")))
        engine.crash("RuntimeError: rehearsal fault exit_after")
    if faults.get("zombie"):
        engine.zombie = True
        engine.ranks.kill_schedulers()


async def watch_children(engine) -> None:
    """SGLang's watchdog: a child that died takes the server with it (the fault `zombie` switches that off)."""
    while True:
        await asyncio.sleep(1)
        child = engine.ranks.dead()
        if child is not None and not engine.zombie:
            log.error("Subprocess %s (pid=%d) crashed. Triggering SIGQUIT for cleanup...", child.name, child.pid)
            os.kill(os.getpid(), signal.SIGQUIT)


async def drain(engine) -> None:
    engine.stopping = True
    log.warning("SIGTERM received. Draining requests and shutting down...")
    await asyncio.sleep(engine.settings.drain_delay_seconds)
    while engine.running or engine.waiting:
        log.info("Gracefully exiting... Remaining number of requests %d.", len(engine.running) + engine.waiting)
        await asyncio.sleep(0.25)
    log.info("Gracefully exiting... Remaining number of requests 0.")
