# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Before a unit starts: its GPUs are there and empty, its ports are free (ExecStartPre, as root).

Waits, bounded, for GPUs and device nodes: at boot the driver may come later than the unit. Whoever sits on a GPU or a
port is named with pid and unit; nothing is ever killed here.
"""

from __future__ import annotations

import argparse
import glob
import os
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import serving_state  # noqa: E402


def ask(query, form="--format=csv,noheader"):
    """(exit code, output) of nvidia-smi."""
    try:
        result = subprocess.run(["nvidia-smi", query, form], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return result.returncode, result.stdout.decode("utf-8", "replace")


class Nvml:
    """GPUs by UUID and the processes on them, from nvidia-ml-py or else nvidia-smi."""

    def __init__(self, paths):
        for pattern in paths:
            sys.path.extend(sorted(glob.glob(pattern)))
        try:
            import pynvml
        except ImportError:
            pynvml = None
        self.pynvml = pynvml

    def read(self):
        """({uuid: [pids]}, "") or ({}, why nothing could be read)."""
        return self._by_library() if self.pynvml else self._by_command()

    def memory(self, uuids):
        """Memory in use, in MiB, of GPUs in this order; empty when it can't be read."""
        if self.pynvml:
            nvml = self.pynvml
            try:
                nvml.nvmlInit()
                try:
                    return [int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(uuid)).used) >> 20 for uuid in uuids]
                finally:
                    nvml.nvmlShutdown()
            except (nvml.NVMLError, TypeError):
                return []
        code, text = ask("--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits")
        used = dict(line.split(", ")[:2] for line in text.splitlines() if ", " in line)
        return [int(used[uuid]) for uuid in uuids] if code == 0 and all(used.get(uuid, "").isdigit() for uuid in uuids) else []

    def _by_library(self):
        nvml = self.pynvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            return {}, str(error)
        found = {}
        try:
            for index in range(nvml.nvmlDeviceGetCount()):
                try:
                    handle = nvml.nvmlDeviceGetHandleByIndex(index)
                    uuid = nvml.nvmlDeviceGetUUID(handle)
                except nvml.NVMLError:
                    continue
                try:
                    processes = [item.pid for item in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
                except nvml.NVMLError:
                    processes = []
                found[uuid.decode() if isinstance(uuid, bytes) else uuid] = processes
        except nvml.NVMLError as error:
            return found, str(error)
        finally:
            nvml.nvmlShutdown()
        return found, ""

    def _by_command(self):
        code, text = ask("--query-gpu=uuid")
        if code != 0:
            return {}, (text.strip().splitlines() or ["nvidia-smi failed"])[0]
        found = {line.strip(): [] for line in text.splitlines() if line.strip().startswith("GPU-")}
        unused, text = ask("--query-compute-apps=gpu_uuid,pid")
        for line in text.splitlines():
            fields = [field.strip() for field in line.split(",")]
            if len(fields) == 2 and fields[0] in found and fields[1].isdigit():
                found[fields[0]].append(int(fields[1]))
        return found, ""


def missing_sentences(wanted, found, why, nodes):
    """What is not there yet."""
    lines = ["device node %s is missing" % node for node in nodes if not os.path.exists(node)]
    absent = [uuid for uuid in wanted if uuid not in found]
    if absent:
        lines.append("GPU %s not there yet%s" % (", ".join(absent), ": %s" % why if why else ""))
    return lines


def users_of(wanted, found, own_unit):
    """Processes on the unit's GPUs that are not the unit's own: sentences."""
    seats = {}
    for uuid in wanted:
        for pid in found.get(uuid, []):
            seats.setdefault(pid, []).append(uuid)
    lines = []
    for pid, uuids in sorted(seats.items()):
        holder = serving_state.describe_pid(pid)
        if holder["unit"] == "%s.service" % own_unit and os.path.exists("/proc/%d" % pid):
            continue
        lines.append("GPU %s is in use by pid %d (%s, unit %s, cgroup %s)" % (
            ", ".join(uuids), pid, holder["name"], holder["unit"], holder["cgroup"] or "unknown"))
    return lines


def port_sentences(ports, own_unit):
    """Who listens on the unit's ports: sentences."""
    listeners = [{"port": int(port), "what": "port", "instance": own_unit} for port in ports]
    return [serving_state.stranger_sentence(holder) for holder in serving_state.port_holders(listeners)]


def main(argv=None, nvml=None, sleep=time.sleep, clock=time.monotonic):
    """Wait, then look once for users."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--unit", required=True)
    parser.add_argument("--gpus", default="", help="UUIDs, comma between")
    parser.add_argument("--ports", default="", help="TCP ports, comma between")
    parser.add_argument("--node", action="append", default=[], help="device node that must exist")
    parser.add_argument("--nvml-path", action="append", default=[], help="folder (a pattern) with pynvml")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds to wait for GPUs and for them to be empty")
    given = parser.parse_args(argv)
    wanted = [uuid for uuid in given.gpus.split(",") if uuid]
    ports = [port for port in given.ports.split(",") if port]
    reader = nvml or (Nvml(given.nvml_path) if wanted else None)
    end = clock() + given.wait
    while True:
        found, why = reader.read() if wanted else ({}, "")
        complaints = missing_sentences(wanted, found, why, given.node)
        if not complaints:
            complaints = users_of(wanted, found, given.unit) + port_sentences(ports, given.unit)
        if not complaints:
            return 0
        if clock() >= end:
            break
        sleep(1.0)
    for line in complaints:
        print(line, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
