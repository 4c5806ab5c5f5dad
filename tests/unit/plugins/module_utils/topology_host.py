# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A host without a host: everything that ``topology.Host`` reads, held in dictionaries that a test may spoil."""

from __future__ import annotations

import json
import pathlib

import yaml

from ansible_collections.blackwell.dsv4.plugins.module_utils import chat_client, serving_plan, topology

ROOT = pathlib.Path(__file__).resolve().parents[4]


def the_plan(**changes):
    """The plan of inventory/blackwell8 with GPU facts, as the playbook makes it; other values of the topology replace its own."""
    source = yaml.safe_load((ROOT / "inventory/blackwell8/group_vars/all/topology.yml").read_text(encoding="utf-8"))["dsv4_topology"]
    gpus = [{"index": n, "uuid": "GPU-00000000-0000-4000-8000-%012d" % n, "bus_id": "0000:%02x:00.0" % n, "numa_node": n // 4,
             "compute_capability": "12.0", "memory_total_mib": 97887} for n in range(8)]
    methods = json.loads((ROOT / "files/moe_methods.json").read_text(encoding="utf-8"))
    return serving_plan.serving_plan({**source, **changes}, moe_methods=methods, engine="/opt/dsv4/engine", router="/opt/dsv4/router",
                                     model_path="/opt/dsv4/model", gpus=gpus, kernel_path="/opt/dsv4/kernels")


PLAN = the_plan()


class FakeHost(topology.Host):
    """Runs ``plan`` in ``mode`` until a test spoils it."""

    def __init__(self, plan, mode):
        super().__init__(sleep=self.pass_time, monotonic=lambda: self.clock)
        self.plan = plan
        self.mode = mode
        self.started = 1000.0
        self.clock = 10000.0
        self.events = []
        self.systemd = True
        self.state = {}
        self.titles = {}
        self.members = {}
        self.held = {}
        self.logs = {}
        self.counters = {}
        self.infos = {}
        self.health = {}
        self.workers = []
        self.pages = {}
        self.listening = []
        self.inodes = {}
        self.xids = []
        self.xid_reason = None
        self.source = "nvml"
        self.used = dict((n, 4) for n in range(8))
        self.endpoint_info = None
        number = 500
        for name, instance in plan["instances"].items():
            on = name in plan["modes"][mode]["active"]
            self.state[name] = {
                "LoadState": "loaded", "ActiveState": "active" if on else "inactive", "SubState": "running" if on else "dead",
                "UnitFileState": "enabled" if on else "disabled", "Result": "success", "MainPID": "0", "NRestarts": "0",
                "ControlGroup": "/system.slice/%s.service" % instance["unit"] if on else "", "InvocationID": "i-%s-0" % name if on else "",
                "ActiveEnterTimestampMonotonic": str(int(self.started * 1e6)) if on else "0", "NUMAPolicy": "bind", "NUMAMask": str(instance["numa_node"]),
                "Environment": " ".join("%s=%s" % item for item in (instance.get("environment") or {}).items()),
            }
            self.members[name] = []
            if not on:
                continue
            number += 100
            self.state[name]["MainPID"] = str(number)
            self.members[name] = [number]
            self.titles[number] = " ".join(instance["argv"])
            if instance["mode"] != "router":
                for rank, gpu in enumerate(instance["gpus"]):
                    pid = number + 1 + rank
                    self.members[name].append(pid)
                    self.titles[pid] = "sglang::scheduler_TP%d" % rank
                    self.held[gpu] = [pid]
                    self.used[gpu] = 81000 + rank
                    node = max(0, instance["numa_node"])
                    self.pages[pid] = "7f0 bind:%d anon=900 dirty=900 N%d=900 kernelpagesize_kB=4\n7f1 bind:%d file=/lib mapped=3 N0=3\n" % (node, node, node)
                self.infos[name] = dict(instance["expect"], max_total_num_tokens=2580000, version="0.5.23", attention_backend="dsv4",
                                        speculative_num_draft_tokens=4)
                self.health[name] = 200
                self.counters[name] = {"num_requests_total": 10.0, "prompt_tokens_total": 100.0, "generation_tokens_total": 50.0}
                kernels = instance.get("kernels") or []
                self.logs[name] = [
                    "[2026-01-01 00:00:00 TP%d] dsv4_sm120 0.1.0 build 3f2a (sm_120a) pid %d applied: %s; left out: nothing; chosen by DSV4_SM120_KERNELS"
                    % (rank, rank, ", ".join(kernels)) for rank in range(4)] if kernels else ["ready"]
                self.workers.append({"url": instance["url"], "worker_type": instance["mode"], "is_healthy": True})
            for rule in instance["listeners"]:
                if rule["what"] in topology.REQUIRED_LISTENERS + ("nccl rendezvous",):
                    self.listen(name, "0.0.0.0" if rule["address"] == "*" else rule["address"], rule["port"])
        if mode == "single":
            self.endpoint_info = self.infos["single"]

    # -- spoiling

    def listen(self, name, address, port):
        inode = str(7000 + len(self.listening))
        self.listening.append({"address": address, "port": port, "inode": inode})
        if name:
            self.inodes.setdefault(self.members[name][0], set()).add(inode)

    def kill_schedulers(self, name):
        self.members[name] = [pid for pid in self.members[name] if not self.titles[pid].startswith("sglang::scheduler")]
        for gpu in self.plan["instances"][name]["gpus"]:
            self.held[gpu], self.used[gpu] = [], 4

    def restart(self, name):
        state = self.state[name]
        state["MainPID"] = str(int(state["MainPID"]) + 50)
        state["NRestarts"] = str(int(state["NRestarts"]) + 1)
        state["InvocationID"] += "r"

    def at(self, seconds, call):
        """Do something ``seconds`` after the units' start."""
        self.events.append([self.started + seconds, call])

    def pass_time(self, seconds):
        self.clock += seconds
        for event in self.events:
            if event[0] is not None and self.clock >= event[0]:
                event[0] = None
                event[1]()

    def serve(self, requests, tokens=20):
        for counter in self.counters.values():
            counter["num_requests_total"] += requests
            counter["prompt_tokens_total"] += requests * tokens
            counter["generation_tokens_total"] += requests

    # -- reading

    def units(self, names):
        if not self.systemd:
            return None
        by_unit = dict((i["unit"], n) for n, i in self.plan["instances"].items())
        return dict((unit, dict(self.state[by_unit[unit]])) for unit in names)

    def start_log(self, unit, properties):
        return next(self.logs.get(n, []) for n, i in self.plan["instances"].items() if i["unit"] == unit)

    def pids(self, unit, properties):
        return list(next(self.members[n] for n, i in self.plan["instances"].items() if i["unit"] == unit))

    def title(self, pid):
        return self.titles.get(pid, "")

    def numa_maps(self, pid):
        return self.pages.get(pid)

    def listeners(self):
        return self.listening

    def sockets(self, pid):
        return self.inodes.get(pid, set())

    def gpus(self):
        if self.source is None:
            return None
        return {
            "source": self.source, "xids": self.xids, "unknown": {"xids": self.xid_reason} if self.xid_reason else {},
            "gpus": [{"index": n, "uuid": "GPU-00000000-0000-4000-8000-%012d" % n, "memory_used_mib": self.used[n],
                      "processes": [{"pid": pid, "used_mib": self.used[n], "name": self.titles.get(pid), "unit": None} for pid in self.held.get(n, [])]}
                     for n in range(8)],
        }

    def get(self, url, path):
        if url == self.plan["endpoint"]["url"] and self.mode == "pd":
            if path == "/workers" and self.workers is not None:
                return self._json({"workers": self.workers, "total": len(self.workers)})
            if path == "/server_info" and self.endpoint_info:
                return self._json(self.endpoint_info)
            return chat_client.Exchange(status=404, body=b"{}")
        name = next((n for n in self.plan["modes"][self.mode]["active"] if self.plan["instances"][n]["url"] == url), None)
        if path == "/health" and self.health.get(name):
            return chat_client.Exchange(status=self.health[name])
        if path == "/metrics" and name in self.counters:
            text = "".join('sglang:%s{model_name="m",tp_rank="0"} %s\n' % item for item in self.counters[name].items())
            return chat_client.Exchange(status=200, body=text.encode())
        if path == "/server_info" and name in self.infos:
            return self._json(self.infos[name])
        return chat_client.Exchange(error="connection_refused", error_text="connection refused", complete=False)

    @staticmethod
    def _json(document):
        return chat_client.Exchange(status=200, body=json.dumps(document).encode())
