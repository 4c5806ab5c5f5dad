# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Is the host what the plan says? Units, processes, GPUs, memory, listeners and the engines' own words.

Right answers prove little about who gave them: a single server on the public port answers as well as the pair.
Everything is read through a ``Host``; a test, or a machine without systemd, hands in another one.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import struct
import threading
import time

from ansible_collections.blackwell.dsv4.plugins.module_utils import verdict as V
from ansible_collections.blackwell.dsv4.plugins.module_utils.chat_client import Client
from ansible_collections.blackwell.dsv4.plugins.module_utils.probes import Check

PROPERTIES = ("LoadState", "ActiveState", "SubState", "UnitFileState", "Result", "MainPID", "NRestarts", "ControlGroup",
              "InvocationID", "ActiveEnterTimestampMonotonic", "NUMAPolicy", "NUMAMask", "Environment")

#: Counters of an engine that its requests move and its health checks do not.
COUNTERS = ("num_requests_total", "prompt_tokens_total", "generation_tokens_total")

#: Verification steps of finished requests: each checks a chain of drafted tokens and yields one token more than it accepts.
VERIFY_STEPS = "spec_verify_calls_total"
#: Drafted tokens that judge a draft of which none was accepted.
DRAFTED_TO_JUDGE = 1000
#: What the guard of the operation nextn_moe logs.
DRAFT_NAN = re.compile(r"dsv4_sm120: nextn_moe: (?:NaN in|the draft computes NaN).*")

#: Memory of an idle GPU: the driver's own share, no context.
IDLE_MIB = 1024

WILDCARD = ("0.0.0.0", "::", "*", "[::]")
#: Planned listeners that must be there; others (rendezvous, transfer) come and go.
REQUIRED_LISTENERS = ("http", "bootstrap", "router metrics")


class Host:
    """Reads one real host. No method raises for what it finds: None or an empty list means unreadable."""

    def __init__(self, system=None, gpu_facts=None, api_key=None, timeout=30.0, proc="/proc", cgroup="/sys/fs/cgroup", sleep=time.sleep,
                 monotonic=time.monotonic):
        self.system = system
        self._gpu_facts = gpu_facts
        self.api_key = api_key
        self.timeout = timeout
        self.proc = proc
        self.cgroup = cgroup
        self.sleep = sleep
        self.monotonic = monotonic

    # -- systemd

    def units(self, names):
        """{unit: {property: value}}, or None where there is no systemd."""
        systemctl = self.system.which("systemctl") if self.system else None
        if not systemctl or not os.path.isdir("/run/systemd/system"):
            return None
        found = {}
        for name in names:
            answer = self.system.run([systemctl, "show", "--property=" + ",".join(PROPERTIES), name + ".service"])
            if answer.code != 0:
                return None
            found[name] = dict(line.split("=", 1) for line in answer.out.splitlines() if "=" in line)
        return found

    def start_log(self, unit, properties):
        """What the unit's running invocation logged until shortly after it was ready: a server that is up for
        weeks has said much since. Empty when the journal no longer reaches back so far."""
        journalctl = self.system.which("journalctl") if self.system else None
        invocation = (properties or {}).get("InvocationID")
        if not journalctl or not invocation:
            return None
        argv = [journalctl, "--no-pager", "--output=cat", "_SYSTEMD_INVOCATION_ID=" + invocation]
        ready = int((properties or {}).get("ActiveEnterTimestampMonotonic") or 0) / 1e6
        if ready:
            argv.append("--until=@%d" % (time.time() - (self.monotonic() - ready) + 60))
        answer = self.system.run(argv)
        return answer.out.splitlines() if answer.code == 0 else None

    # -- processes

    def pids(self, unit, properties):
        """Every process of the unit's cgroup, groups below it included."""
        group = (properties or {}).get("ControlGroup")
        if not group:
            return []
        found = []
        for folder, dummy, names in os.walk(self.cgroup + group):
            if "cgroup.procs" in names:
                found.extend(int(line) for line in (self.read(os.path.join(folder, "cgroup.procs")) or "").split())
        return sorted(set(found))

    @staticmethod
    def read(path):
        try:
            with open(path, encoding="utf-8", errors="replace") as handle:
                return handle.read()
        except OSError:
            return None

    def title(self, pid):
        """The process title as ps shows it, its name where it has none."""
        text = (self.read("%s/%d/cmdline" % (self.proc, pid)) or "").replace("\0", " ").strip()
        return text or (self.read("%s/%d/comm" % (self.proc, pid)) or "").strip()

    def numa_maps(self, pid):
        return self.read("%s/%d/numa_maps" % (self.proc, pid))

    # -- network

    def listeners(self):
        """[{address, port, inode}] of all listening TCP sockets, or None."""
        found = None
        for name, parse in (("tcp", _ipv4), ("tcp6", _ipv6)):
            text = self.read("%s/net/%s" % (self.proc, name))
            if text is None:
                continue
            found = found or []
            for line in text.splitlines()[1:]:
                fields = line.split()
                if len(fields) > 9 and fields[3] == "0A":
                    address, port = fields[1].split(":")
                    found.append({"address": parse(address), "port": int(port, 16), "inode": fields[9]})
        return found

    def sockets(self, pid):
        """Inodes of the sockets that a process holds."""
        folder = "%s/%d/fd" % (self.proc, pid)
        inodes = set()
        try:
            names = os.listdir(folder)
        except OSError:
            return inodes
        for name in names:
            try:
                target = os.readlink(os.path.join(folder, name))
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
        return inodes

    def get(self, url, path):
        return Client(url, self.api_key, self.timeout).get(path)

    # -- GPUs

    def gpus(self):
        """What gpu_info gathers: gpus with processes, xids, source; None when nothing could be asked."""
        return self._gpu_facts() if self._gpu_facts else None


def _ipv4(text):
    return socket.inet_ntop(socket.AF_INET, struct.pack("<L", int(text, 16)))


def _ipv6(text):
    packed = b"".join(struct.pack("<L", int(text[at:at + 8], 16)) for at in range(0, 32, 8))
    address = socket.inet_ntop(socket.AF_INET6, packed)
    return address[7:] if address.startswith("::ffff:") else address


def parse_counters(text):
    """{counter: sum over its labels} of SGLang's Prometheus text."""
    found = {}
    for line in text.splitlines():
        match = re.match(r"sglang[:_](\w+?)(?:\{.*\})?\s+([0-9.eE+-]+|NaN)\s*$", line)
        if match and match.group(1) in COUNTERS + (VERIFY_STEPS,):
            found[match.group(1)] = found.get(match.group(1), 0.0) + float(match.group(2))
    return found


class Topology:
    """One comparison of a host with a plan."""

    def __init__(self, plan, mode, host, settle_seconds=120, min_kv_tokens=524288, warn_kv_tokens=2000000,
                 kernel_warning=""):
        self.plan = plan
        self.mode = mode
        self.host = host
        self.settle = float(settle_seconds)
        self.min_kv = int(min_kv_tokens)
        self.warn_kv = int(warn_kv_tokens)
        self.kernel_warning = kernel_warning
        self.instances = plan["instances"]
        self.active = list(plan["modes"][mode]["active"])
        self.inactive = list(plan["modes"][mode]["inactive"])
        self.engines = [name for name in self.active if self.instances[name]["mode"] != "router"]
        self.names = self.active + self.inactive
        self.redact = V.Redactor([host.api_key] if host.api_key else [])
        self.checks = []
        self._infos = {}
        self._gpu = False
        self._pids = {}
        self._health = {}

    # ------------------------------------------------------------ the two phases

    def snapshot(self):
        """What the probes must not change, and what they must."""
        return {"units": self._units(), "counters": dict((name, self.counters(name)) for name in self.engines)}

    def check(self, before=None, requests=0):
        """All checks in stable order. ``requests``: answers that the probes generated in between."""
        before = before or {}
        self.units = self._units()
        self._ask_health()
        self._check_mode()
        for name in self.names:
            self._timed(self._check_unit, name)
        for name in self.engines:
            self._timed(self._check_process, name)
            self._timed(self._check_health, name)
        if self.mode == "pd":
            self._timed(self._check_workers)
        for name in self.engines:
            self._timed(self._check_counters, name, before.get("counters") or {}, int(requests or 0))
            if self._drafts(name):
                self._timed(self._check_speculation, name, (before.get("counters") or {}).get(name) or {})
            self._timed(self._check_server, name)
            self._timed(self._check_kv, name)
            self._timed(self._check_kernels, name)
            self._timed(self._check_gpus, name)
            self._timed(self._check_gpu_memory, name)
            self._timed(self._check_numa, name)
        self._timed(self._check_idle)
        self._timed(self._check_listeners)
        self._timed(self._check_xid)
        self._timed(self._check_stable, before.get("units") or {})
        return self.checks

    def ids(self):
        """The checks that ``check`` reports, without looking at anything."""
        found = ["mode"] + ["unit.%s" % name for name in self.names]
        for name in self.engines:
            found += ["process.%s" % name, "health.%s" % name]
        if self.mode == "pd":
            found.append("router.workers")
        for name in self.engines:
            found += ["%s.%s" % (what, name) for what in ("counters", "speculation", "server", "kv", "kernels", "gpus", "gpu_memory", "numa")
                      if what != "speculation" or self._drafts(name)]
        return found + ["gpus.idle", "listeners", "xid", "stable"]

    def skipped(self, reason, evidence):
        return [Check(identity, V.SKIPPED, reason, evidence) for identity in self.ids()]

    def _timed(self, call, *arguments):
        begun = self.host.monotonic()
        call(*arguments)
        self.checks[-1]["seconds"] = round(self.host.monotonic() - begun, 3)

    def _add(self, identity, status, reason, evidence="", hint="", **more):
        self.checks.append(Check(identity, status, reason, V.clip(self.redact(evidence)), hint, **more))

    def _pass(self, identity, evidence="", **more):
        self._add(identity, V.PASS, "ok", evidence, **more)

    def _fail(self, identity, reason, evidence, hint):
        self._add(identity, V.FAIL, reason, evidence, hint)

    def _loading(self, name):
        """True while the unit is starting and has not failed: what it does not show yet speaks against nobody."""
        state = self._state(name)
        return state.get("ActiveState") == "activating" and state.get("SubState") != "auto-restart"

    def _still_loading(self, identity, name):
        if not self._loading(name):
            return False
        self._add(identity, V.SKIPPED, "waiting", "%s is loading" % name)
        return True

    def _unreadable(self, identity, name, reason, evidence, hint):
        if self._loading(name):
            self._add(identity, V.INCONCLUSIVE, "waiting", "%s is loading (%s)" % (name, evidence), "journalctl -fu %s" % self.unit(name))
        else:
            self._fail(identity, reason, evidence, hint)

    # -------------------------------------------------------------------- readers

    def unit(self, name):
        return self.instances[name]["unit"]

    def _units(self):
        found = self.host.units([self.unit(name) for name in self.names])
        if found is None:
            return None
        return dict((name, found.get(self.unit(name), {})) for name in self.names)

    def _state(self, name):
        return (self.units or {}).get(name) or {}

    def _members(self, name):
        if name not in self._pids:
            self._pids[name] = self.host.pids(self.unit(name), self._state(name))
        return self._pids[name]

    def counters(self, name):
        got = self.host.get(self.instances[name]["url"], "/metrics")
        if got.status != 200:
            return {"error": got.error_text or "HTTP %s" % got.status}
        return parse_counters(got.body.decode("utf-8", "replace"))

    def _info(self, name):
        """/server_info of an engine as (dict, None) or (None, why not)."""
        if name not in self._infos:
            got = self.host.get(self.instances[name]["url"], "/server_info")
            document = got.json() if got.status == 200 else None
            if isinstance(document, dict):
                self._infos[name] = (document, None)
            else:
                self._infos[name] = (None, got.error_text or "HTTP %s" % got.status)
        return self._infos[name]

    def _gpu_facts(self):
        if self._gpu is False:
            self._gpu = self.host.gpus()
        return self._gpu

    def _planned_gpus(self, name):
        """(GPU facts of the plan's GPUs, names of those not found), or (None, reason)."""
        facts = self._gpu_facts()
        if not facts or facts.get("source") not in ("nvml", "nvidia-smi"):
            return None, "neither NVML nor nvidia-smi answered"
        instance = self.instances[name]
        by_uuid = dict((g["uuid"], g) for g in facts["gpus"])
        by_index = dict((g["index"], g) for g in facts["gpus"])
        wanted = instance.get("gpu_uuids") or instance.get("gpus") or []
        pool = by_uuid if instance.get("gpu_uuids") else by_index
        return [pool[key] for key in wanted if key in pool], [str(key) for key in wanted if key not in pool]

    # --------------------------------------------------------------------- checks

    def _check_mode(self):
        endpoint = self.plan["endpoint"]["url"]
        if self.mode == "single":
            left = [self.unit(n) for n in self.inactive if self._state(n).get("ActiveState") in ("active", "activating", "reloading")]
            if left:
                self._fail("mode", "pair_still_active", "%s beside the single server" % ", ".join(left),
                           "systemctl status %s; rollback.yml stops them" % " ".join(left))
            else:
                self._pass("mode", "the single server is what should serve")
            return
        signs = []
        for name in self.inactive:
            if self._state(name).get("ActiveState") in ("active", "activating", "reloading"):
                signs.append("%s is %s" % (self.unit(name), self._state(name)["ActiveState"]))
        got = self.host.get(endpoint, "/server_info")
        document = got.json() if got.status == 200 else None
        if isinstance(document, dict) and "disaggregation_mode" in document:
            if document["disaggregation_mode"] in (None, "null"):
                signs.append("a server without disaggregation answers at %s" % endpoint)
            else:
                signs.append("a %s half answers at %s itself" % (document["disaggregation_mode"], endpoint))
        workers = self.host.get(endpoint, "/workers")
        document = workers.json() if workers.status == 200 else None
        if isinstance(document, dict) and isinstance(document.get("workers"), list):
            regular = [str(w.get("url")) for w in document["workers"] if isinstance(w, dict) and w.get("worker_type") == "regular"]
            if regular:
                signs.append("the router serves from %s as a plain worker" % ", ".join(regular))
        if signs:
            self._fail("mode", "pd_collapsed", "; ".join(signs),
                       "the pair is planned: systemctl status %s; site.yml brings it back, -e verification_mode=single if the fallback is meant"
                       % " ".join(self.unit(n) for n in self.names))
        else:
            self._pass("mode", "a router stands at %s and the fallback is off" % endpoint)

    def _check_unit(self, name):
        identity, unit = "unit.%s" % name, self.unit(name)
        if self.units is None:
            self._add(identity, V.SKIPPED, "no_systemd", "systemd does not run here")
            return
        state = self._state(name)
        active, sub, enabled = state.get("ActiveState", "unknown"), state.get("SubState", ""), state.get("UnitFileState", "")
        seen = "%s (%s), %s, restarts %s, pid %s" % (active, sub, enabled or "no unit file", state.get("NRestarts", "?"), state.get("MainPID", "?"))
        look = "systemctl status %s; journalctl -u %s" % (unit, unit)
        if state.get("LoadState") != "loaded":
            self._fail(identity, "unit_missing", "LoadState %s" % (state.get("LoadState") or "unknown"), "site.yml installs %s" % unit)
        elif active == "failed":
            self._fail(identity, "unit_failed", "%s, result %s" % (seen, state.get("Result")), look + "; systemctl reset-failed %s" % unit)
        elif name in self.active:
            if active == "activating" and sub == "auto-restart":
                self._fail(identity, "unit_restarting", "%s, result %s" % (seen, state.get("Result")), look)
            elif self._loading(name):
                self._add(identity, V.INCONCLUSIVE, "waiting", seen, "still loading: journalctl -fu %s" % unit)
            elif active != "active":
                self._fail(identity, "unit_not_active", seen, look)
            elif enabled != "enabled":
                self._fail(identity, "unit_not_enabled", seen, "after a reboot it would not serve: systemctl enable %s" % unit)
            else:
                self._pass(identity, seen)
        elif active in ("active", "activating", "reloading", "deactivating"):
            self._fail(identity, "unit_active", seen, "it must be stopped in mode %s: systemctl status %s" % (self.mode, unit))
        elif enabled not in ("disabled", "static", "indirect"):
            self._fail(identity, "unit_enabled", seen, "it would start at boot: systemctl disable %s" % unit)
        else:
            left = self._members(name)
            if left:
                self._fail(identity, "processes_left", "%s, and %d processes live on: %s" % (seen, len(left), left[:8]), look)
            else:
                self._pass(identity, seen)

    def _schedulers(self, name):
        return [pid for pid in self._members(name) if re.match(r"sglang::scheduler", self.host.title(pid))]

    def _check_process(self, name):
        """A launcher whose schedulers died answers /health and /v1/models for ever."""
        identity, unit = "process.%s" % name, self.unit(name)
        members = self._members(name)
        if not members:
            if self.units is not None and self._state(name).get("ActiveState") == "active":
                self._fail(identity, "no_processes", "the unit is active and its cgroup is empty or cannot be read", "systemctl status %s" % unit)
            else:
                self._add(identity, V.SKIPPED, "not_running", "no process of %s" % unit)
            return
        schedulers = self._schedulers(name)
        wanted = int(self.instances[name].get("tp_size") or 1)
        gpus, dummy = self._planned_gpus(name)
        held = "" if gpus is None else ", GPUs at %s MiB" % "/".join(str(g.get("memory_used_mib")) for g in gpus)
        if self._loading(name):
            self._add(identity, V.INCONCLUSIVE, "waiting", "%d of %d schedulers so far" % (len(schedulers), wanted), "journalctl -fu %s" % unit)
        elif not schedulers:
            self._fail(identity, "zombie_server", "unit active, %d processes, no scheduler among them%s" % (len(members), held),
                       "the engine behind the HTTP server is dead: journalctl -u %s (NCCL, abort, Scheduler hit an exception); restart %s" % (unit, unit))
        elif len(schedulers) < wanted:
            self._fail(identity, "schedulers_missing", "%d of %d schedulers live%s" % (len(schedulers), wanted, held), "journalctl -u %s" % unit)
        else:
            self._pass(identity, "%d schedulers, %d processes" % (len(schedulers), len(members)))

    def _ask_health(self):
        """All engines at once: each takes a second at least, since it generates a token for the answer."""
        def ask(name):
            self._health[name] = self.host.get(self.instances[name]["url"], "/health")

        threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in self.engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _check_health(self, name):
        identity, unit = "health.%s" % name, self.unit(name)
        got = self._health[name]
        if got.status == 200:
            self._pass(identity, "HTTP 200 in %.2f s" % got.seconds)
        else:
            self._unreadable(identity, name, "unhealthy", "%s/health: %s" % (self.instances[name]["url"], got.error_text or "HTTP %s" % got.status),
                             "journalctl -u %s" % unit)

    def _check_workers(self):
        """The router must know exactly the planned workers."""
        router = self.unit("router") if "router" in self.instances else "the router"
        hint = "GET /workers on the router; journalctl -u %s" % router
        got = self.host.get(self.plan["endpoint"]["url"], "/workers")
        document = got.json() if got.status == 200 else None
        if not isinstance(document, dict) or not isinstance(document.get("workers"), list):
            self._unreadable("router.workers", "router", "router_workers_unreadable", "/workers: %s" % (got.error_text or "HTTP %s" % got.status), hint)
            return
        planned = dict((_url(self.instances[n]["url"]), self.instances[n]["mode"]) for n in self.engines)
        known = {}
        for worker in document["workers"]:
            if isinstance(worker, dict):
                kind = worker.get("worker_type") or worker.get("type") or (worker.get("metadata") or {}).get("disaggregation_mode")
                known[_url(str(worker.get("url")))] = (str(kind).lower(), worker.get("is_healthy", worker.get("healthy", True)))
        missing = ["%s (%s)" % (url, kind) for url, kind in planned.items() if url not in known]
        extra = [url for url in known if url not in planned]
        wrong = ["%s is %s, planned %s" % (url, known[url][0], kind) for url, kind in planned.items() if url in known and kind not in known[url][0]]
        sick = [url for url in planned if url in known and not known[url][1]]
        seen = ", ".join("%s %s" % (kind, url) for url, (kind, dummy) in sorted(known.items())) or "no worker"
        loading = [n for n in self.engines if self._loading(n)]
        if (missing or sick) and loading:
            self._add("router.workers", V.INCONCLUSIVE, "waiting", "%s still loading; known: %s" % (" and ".join(loading), seen), hint)
        elif missing:
            self._fail("router.workers", "router_worker_missing", "missing %s; known: %s" % (", ".join(missing), seen), hint)
        elif extra:
            self._fail("router.workers", "router_worker_extra", "not planned: %s" % ", ".join(extra),
                       "somebody added a worker, which receives prompts: restart %s, close /workers with a key" % router)
        elif wrong:
            self._fail("router.workers", "router_worker_kind", "; ".join(wrong), hint)
        elif sick:
            self._fail("router.workers", "router_worker_unhealthy", ", ".join(sick), hint)
        else:
            self._pass("router.workers", seen)

    def _check_counters(self, name, before, requests):
        identity, unit = "counters.%s" % name, self.unit(name)
        if not requests:
            self._add(identity, V.SKIPPED, "no_probes", "no probe was answered in between")
            return
        old = before.get(name)
        if not old or "error" in old:
            self._add(identity, V.SKIPPED, "no_snapshot", "no counters from before the probes" + (": %s" % old["error"] if old else ""))
            return
        new = self.counters(name)
        if "error" in new or not new:
            self._unreadable(identity, name, "counters_unreadable", "/metrics: %s" % new.get("error", "no counter of SGLang in it"),
                             "--enable-metrics on %s" % unit)
            return
        moved = dict((key, new[key] - old.get(key, 0.0)) for key in new)
        seen = ", ".join("%s +%d" % (key, moved[key]) for key in COUNTERS if key in moved) + " for %d answers" % requests
        if any(value < 0 for value in moved.values()):
            self._fail(identity, "counters_went_back", seen, "it restarted in between: journalctl -u %s" % unit)
        elif moved.get("num_requests_total", requests) < requests or not any(moved.values()):
            self._fail(identity, "counters_not_moved", seen,
                       "the answers came from elsewhere: who listens on %s? systemctl status %s" % (self.plan["endpoint"]["url"], unit))
        else:
            self._pass(identity, seen)

    def _drafts(self, name):
        """Whether an engine verifies drafts: prefill only fills the draft's cache."""
        instance = self.instances[name]
        return bool((instance.get("expect") or {}).get("speculative_algorithm")) and instance["mode"] != "prefill"

    def _check_speculation(self, name, old):
        """A draft of which nothing is ever accepted makes no wrong answer; only the engine's counters show it."""
        identity, unit = "speculation.%s" % name, self.unit(name)
        if self._still_loading(identity, name):
            return
        hint = ("serve without it: dsv4_topology.speculation: none; or look for the cause: journalctl -u %s -g nextn_moe, and "
                "--speculative-moe-runner-backend of the unit in files/moe_methods.json" % unit)
        nan = [line for line in self.host.start_log(unit, self._state(name)) or [] if DRAFT_NAN.search(line)]
        if nan:
            self._fail(identity, "draft_nan", DRAFT_NAN.search(nan[-1]).group(0), hint)
            return
        new = self.counters(name)
        if "error" in new or "generation_tokens_total" not in new:
            self._unreadable(identity, name, "counters_unreadable", "/metrics: %s" % new.get("error", "no counter of SGLang in it"),
                             "--enable-metrics on %s" % unit)
            return
        info, reason = self._info(name)
        chain = ((info or {}).get("speculative_num_draft_tokens") or 0) - 1
        if chain < 1:
            self._unreadable(identity, name, "server_info_unreadable", "/server_info: %s" % (reason or "no speculative_num_draft_tokens"), hint)
            return
        spans = [("since the start", new)]
        if old and "error" not in old:
            spans.insert(0, ("since the probes began", dict((key, new[key] - old.get(key, 0.0)) for key in new)))
        for span, moved in spans:
            # One token of a request comes from prefill, one from each step, the others from the draft.
            steps = int(moved.get(VERIFY_STEPS, 0))
            accepted = int(moved["generation_tokens_total"] - steps - moved.get("num_requests_total", 0))
            seen = "%d of %d drafted tokens accepted %s" % (max(accepted, 0), steps * chain, span)
            if steps * chain >= DRAFTED_TO_JUDGE:
                break
        if accepted > 0 and steps:
            self._pass(identity, seen)
        elif steps * chain >= DRAFTED_TO_JUDGE:
            self._fail(identity, "nothing_accepted", seen, hint)
        elif not steps and new["generation_tokens_total"] >= DRAFTED_TO_JUDGE:
            self._fail(identity, "nothing_drafted", "%d tokens generated without a step that verifies drafts" % new["generation_tokens_total"],
                       "--speculative-algorithm on %s; systemctl cat %s" % (unit, unit))
        else:
            self._add(identity, V.SKIPPED, "too_few_drafts", "%s; %d are judged" % (seen, DRAFTED_TO_JUDGE))

    def _check_server(self, name):
        """What the engine says of itself against the plan."""
        identity, unit = "server.%s" % name, self.unit(name)
        info, reason = self._info(name)
        if info is None:
            self._unreadable(identity, name, "server_info_unreadable", "/server_info: %s" % reason, "journalctl -u %s" % unit)
            return
        expect = dict(self.instances[name].get("expect") or {})
        for flag, key in (("--attention-backend", "attention_backend"), ("--moe-runner-backend", "moe_runner_backend")):
            argv = self.instances[name].get("argv") or []
            if flag in argv[:-1]:
                expect.setdefault(key, argv[argv.index(flag) + 1])
        wrong, absent = [], []
        for key in sorted(expect):
            if key not in info:
                absent.append(key)
            elif not _equal(expect[key], info[key]):
                wrong.append("%s: want %s, is %s" % (key, _show(expect[key]), _show(info[key])))
        if wrong:
            flags = ", ".join("--" + text.split(":")[0].split(" ")[0].replace("_", "-") for text in wrong)
            self._fail(identity, "server_differs", "; ".join(wrong), "%s on %s; look at systemctl cat %s" % (flags, unit, unit))
            return
        shown = ("context_length", "tp_size", "disaggregation_mode", "attention_backend", "moe_runner_backend", "speculative_algorithm", "version")
        seen = ["%s %s" % (key, _show(info[key])) for key in shown if key in info]
        self._pass(identity, "%d settings as planned; %s" % (len(expect) - len(absent), ", ".join(seen)),
                   notes=["not reported by the engine: %s" % ", ".join(absent)] if absent else [])

    def _check_kv(self, name):
        identity = "kv.%s" % name
        info, reason = self._info(name)
        tokens = (info or {}).get("max_total_num_tokens")
        if tokens is None and info:
            states = info.get("internal_states")
            first = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
            tokens = (first.get("memory_usage") or {}).get("token_capacity")
        if not isinstance(tokens, int):
            self._unreadable(identity, name, "kv_unreadable", reason or "no max_total_num_tokens in /server_info",
                             "journalctl -u %s (max_total_num_tokens)" % self.unit(name))
        elif tokens < self.min_kv:
            self._fail(identity, "kv_too_small", "%d tokens, at least %d are wanted" % (tokens, self.min_kv),
                       "--mem-fraction-static on %s; other users of its GPUs" % self.unit(name))
        else:
            small = tokens < self.warn_kv and int(self.instances[name].get("tp_size") or 0) == 4
            self._pass(identity, "%d tokens" % tokens, notes=["below the %d that TP4 should reach" % self.warn_kv] if small else [])

    def _check_kernels(self, name):
        """What each scheduler's plugin says it applied, against the release's record: operations and build."""
        identity, unit, instance = "kernels.%s" % name, self.unit(name), self.instances[name]
        if self._still_loading(identity, name):
            return
        planned = sorted(instance.get("kernels") or [])
        # The unit names those of the plan that measurement on this host let through.
        chosen = environment_of(self._state(name)).get("DSV4_SM120_KERNELS", "") if "Environment" in self._state(name) else ",".join(planned)
        wanted = sorted(k for k in chosen.split(",") if k and k != "none")
        if set(wanted) - set(planned):
            self._fail(identity, "kernels_unplanned", "the unit asks for %s, planned: %s" % (", ".join(wanted), ", ".join(planned) or "none"),
                       "DSV4_SM120_KERNELS in systemctl show -p Environment %s" % unit)
            return
        notes = [one["line"] for one in self.plan.get("stock_kernels") or [] if one["instance"] == name]
        if set(planned) - set(wanted):
            notes.append("on stock, since the unit does not ask for ours: %s" % ", ".join(sorted(set(planned) - set(wanted))))
        if self.kernel_warning and (planned or notes):
            notes.append(self.kernel_warning)
        lines = self.host.start_log(unit, self._state(name))
        applied = applied_kernels(lines or [])
        if not wanted:
            if applied and applied["kernels"]:
                self._fail(identity, "kernels_unplanned", "applied: %s" % ", ".join(applied["kernels"]), "DSV4_SM120_KERNELS on %s" % unit)
            else:
                self._pass(identity, "stock, as planned" if not planned else "stock", notes=notes)
            return
        if lines is None:
            self._add(identity, V.SKIPPED, "journal_unreadable", "the journal of %s cannot be read" % unit)
        elif not lines:
            self._add(identity, V.SKIPPED, "journal_rotated", "the journal no longer holds the start of %s" % unit)
        elif applied is None:
            self._fail(identity, "kernels_unproved", "planned %s, and the log says nothing of dsv4_sm120" % ", ".join(wanted),
                       "SGLANG_PLUGINS and PYTHONPATH of %s; journalctl -u %s -g dsv4_sm120" % (unit, unit))
        elif applied["kernels"] != wanted:
            missing, extra = sorted(set(wanted) - set(applied["kernels"])), sorted(set(applied["kernels"]) - set(wanted))
            differs = ["not applied: %s" % ", ".join(missing)] * bool(missing) + ["applied unasked: %s" % ", ".join(extra)] * bool(extra)
            self._fail(identity, "kernels_differ", "planned %s, applied %s; %s; %s" % (
                ", ".join(wanted), ", ".join(applied["kernels"]) or "none", "; ".join(differs), applied["line"]),
                "journalctl -u %s -g dsv4_sm120; dsv4-sm120 show on the release's selection.json" % unit)
        elif instance.get("kernel_build") and applied["build"] != instance["kernel_build"]:
            self._fail(identity, "kernels_of_another_build", "the record is of build %s, the scheduler runs %s; %s" % (
                instance["kernel_build"], applied["build"] or "an unnamed one", applied["line"]), "PYTHONPATH of %s; site.yml again" % unit)
        else:
            self._pass(identity, applied["line"], notes=notes)

    def _check_gpus(self, name):
        """The processes on the planned GPUs are the unit's, and the unit's are on no other."""
        identity, unit = "gpus.%s" % name, self.unit(name)
        if self._still_loading(identity, name):
            return
        planned, missing = self._planned_gpus(name)
        if planned is None:
            self._add(identity, V.SKIPPED, "gpus_unreadable", missing)
            return
        if missing:
            self._fail(identity, "gpu_missing", "the driver does not show %s" % ", ".join(missing), "nvidia-smi -L; the kernel log (NVRM, Xid)")
            return
        members = set(self._members(name))
        uuids = set(g["uuid"] for g in planned)
        empty, strangers, astray = [], [], []
        for gpu in self._gpu_facts()["gpus"]:
            holders = [p["pid"] for p in gpu.get("processes") or []]
            mine = [pid for pid in holders if pid in members]
            if gpu["uuid"] in uuids:
                if not mine:
                    empty.append(gpu)
                strangers += ["pid %d (%s) on GPU %s" % (p["pid"], p.get("unit") or p.get("name") or "?", gpu["index"])
                              for p in gpu.get("processes") or [] if p["pid"] not in members]
            elif mine:
                astray.append(gpu)
        label = ", ".join(str(g["index"]) for g in planned)
        if not members:
            self._add(identity, V.SKIPPED, "not_running", "no process of %s" % unit)
        elif astray:
            self._fail(identity, "gpus_unplanned", "its processes are on GPU %s, planned: %s" % (", ".join(str(g["index"]) for g in astray), label),
                       "CUDA_VISIBLE_DEVICES of %s: systemctl show -p Environment %s" % (unit, unit))
        elif empty:
            self._fail(identity, "gpus_not_held", "no process of it on GPU %s, planned: %s" % (", ".join(str(g["index"]) for g in empty), label),
                       "CUDA_VISIBLE_DEVICES of %s; journalctl -u %s" % (unit, unit))
        elif strangers:
            self._fail(identity, "foreign_process", "; ".join(strangers), "another user of the unit's GPUs: ps -o pid,user,cgroup,args -p PID")
        else:
            self._pass(identity, "holds GPU %s and no other" % label)

    def _check_gpu_memory(self, name):
        identity = "gpu_memory.%s" % name
        if self._still_loading(identity, name):
            return
        planned, missing = self._planned_gpus(name)
        used = [g.get("memory_used_mib") for g in planned or []]
        if not used or any(not isinstance(value, (int, float)) for value in used):
            self._add(identity, V.SKIPPED, "gpus_unreadable", missing if planned is None else "memory is not reported")
            return
        seen = "%s MiB" % ", ".join("%d" % value for value in used)
        if max(used) - min(used) > 0.1 * max(used):
            self._fail(identity, "gpu_memory_uneven", seen,
                       "a rank sits on the wrong GPU, or another process holds memory: nvidia-smi; journalctl -u %s" % self.unit(name))
        else:
            self._pass(identity, seen)

    def _check_numa(self, name):
        identity, unit = "numa.%s" % name, self.unit(name)
        if self._still_loading(identity, name):
            return
        node = self.instances[name].get("numa_node", -1)
        if not isinstance(node, int) or node < 0:
            self._pass(identity, "no binding planned")
            return
        pids = self._schedulers(name) or self._members(name)
        pages, bound, read = {}, 0, 0
        for pid in pids:
            text = self.host.numa_maps(pid)
            if text is None:
                continue
            read += 1
            bound += numa_of(text, pages)[0] == node
        if not read:
            self._add(identity, V.SKIPPED, "numa_unreadable" if pids else "not_running", "numa_maps of %d processes cannot be read" % len(pids))
            return
        total = sum(pages.values())
        share = pages.get(node, 0) / float(total) if total else 1.0
        policy = "%s %s" % (self._state(name).get("NUMAPolicy", "?"), self._state(name).get("NUMAMask", ""))
        seen = "%.1f %% of the memory on node %d, %d of %d processes bound to it, unit policy %s" % (share * 100, node, bound, read, policy.strip())
        if share < 0.95:
            self._fail(identity, "numa_memory_elsewhere", seen, "NUMAPolicy and NUMAMask of %s; numastat -p MAINPID" % unit)
        elif bound < read:
            self._fail(identity, "numa_not_bound", seen, "NUMAPolicy=bind, NUMAMask=%d in %s; --numa-node" % (node, unit))
        else:
            self._pass(identity, seen)

    def _check_idle(self):
        """GPUs of no running unit hold nothing."""
        facts = self._gpu_facts()
        if not facts or facts.get("source") not in ("nvml", "nvidia-smi"):
            self._add("gpus.idle", V.SKIPPED, "gpus_unreadable", "neither NVML nor nvidia-smi answered")
            return
        busy = set()
        planned = set()
        for name in self.instances:
            gpus, dummy = self._planned_gpus(name)
            planned.update(g["uuid"] for g in gpus or [])
            if name in self.engines:
                busy.update(g["uuid"] for g in gpus or [])
        idle = [g for g in facts["gpus"] if g["uuid"] in planned - busy]
        dirty = ["GPU %s: %s MiB, pids %s" % (g["index"], g.get("memory_used_mib"), [p["pid"] for p in g.get("processes") or []])
                 for g in idle if (g.get("memory_used_mib") or 0) > IDLE_MIB or g.get("processes")]
        if dirty:
            self._fail("gpus.idle", "gpu_not_idle", "; ".join(dirty), "something outlived its unit: nvidia-smi; ps -o pid,ppid,cgroup,args -p PID")
        else:
            self._pass("gpus.idle", "%d GPUs of stopped units are clean" % len(idle) if idle else "every GPU belongs to a running unit")

    def _check_listeners(self):
        everything = self.host.listeners()
        if everything is None:
            self._add("listeners", V.SKIPPED, "listeners_unreadable", "/proc/net/tcp cannot be read")
            return
        faults, notes, loose, seen = [], [], 0, {}
        known = False
        for name in self.active:
            members = self._members(name)
            known = known or bool(members)
            inodes = set()
            for pid in members:
                inodes |= self.host.sockets(pid)
            planned = self.instances[name].get("listeners") or []
            mine = [s for s in everything if s["inode"] in inodes]
            for one in mine:
                rule = next((r for r in planned if _in_range(one["port"], r)), None)
                place = "%s:%d" % (one["address"], one["port"])
                loopback = one["address"].startswith("127.") or one["address"] == "::1"
                if rule is None:
                    if loopback:
                        loose += 1
                    else:
                        faults.append(("unplanned_listener", "%s listens on %s" % (name, place)))
                elif one["address"] in WILDCARD and rule["address"] not in WILDCARD and not rule.get("wildcard_ok"):
                    faults.append(("listener_wrong_address", "%s: %s on %s, planned %s" % (name, rule["what"], place, rule["address"])))
                elif rule["address"] not in WILDCARD and one["address"] not in WILDCARD and one["address"] != rule["address"] and not loopback:
                    faults.append(("listener_wrong_address", "%s: %s on %s, planned %s" % (name, rule["what"], place, rule["address"])))
                else:
                    seen.setdefault("%s %s" % (name, rule["what"]), set()).add(one["port"])
            for rule in planned:
                if rule["what"] in REQUIRED_LISTENERS and members and not self._loading(name) and not any(_in_range(s["port"], rule) for s in mine):
                    taken = any(_in_range(s["port"], rule) for s in everything)
                    faults.append(("port_of_a_stranger" if taken else "listener_missing", "%s: nobody of its processes has port %s (%s)%s" % (
                        name, rule["port"], rule["what"], ", another process has it" if taken else "")))
        if not known:
            self._add("listeners", V.SKIPPED, "not_running", "no process of the planned units is known")
            return
        if faults:
            self._fail("listeners", faults[0][0], "; ".join(text for dummy, text in faults), "ss -ltnp; the addresses in systemctl cat of the unit")
            return
        if loose:
            notes.append("%d more listeners on loopback, the engines' own" % loose)
        places = ["%s %s" % (what, next(iter(ports)) if len(ports) == 1 else "%d-%d" % (min(ports), max(ports))) for what, ports in seen.items()]
        self._pass("listeners", ", ".join(places), notes=notes)

    def _check_xid(self):
        facts = self._gpu_facts()
        reason = (facts or {}).get("unknown", {}).get("xids") if facts else "no GPU facts"
        if reason:
            self._add("xid", V.SKIPPED, "kernel_log_unreadable", str(reason))
            return
        xids = facts.get("xids") or []
        if xids:
            seen = ["Xid %s on %s, %s times%s" % (x["xid"], x["bus_id"], x.get("count", 1), ": %s" % x["text"] if x.get("text") else "") for x in xids]
            self._fail("xid", "xid_seen", "; ".join(seen), "journalctl -k -b -g Xid; %s" % (xids[0].get("remedy") or "NVIDIA's list of Xids"))
        else:
            self._pass("xid", "none in the kernel log since boot")

    def _check_stable(self, before):
        """Same process and restart count as before the probes, over a settle time counted from the start."""
        if self.units is None:
            self._add("stable", V.SKIPPED, "no_systemd", "systemd does not run here")
            return
        up = {}
        for name in self.active:
            entered = int(self._state(name).get("ActiveEnterTimestampMonotonic") or 0) / 1e6
            if self._state(name).get("ActiveState") == "active" and entered:
                up[name] = self.host.monotonic() - entered
        if len(up) < len(self.active):
            self._add("stable", V.SKIPPED, "not_running", "%s is not active" % ", ".join(n for n in self.active if n not in up))
            return
        left = self.settle - min(up.values())
        waited = left > 0
        while left > 0:
            pause = min(left, 5.0)
            self.host.sleep(pause)
            left -= pause
            if self._moved(self.units, self._units()):
                break
        now = self._units()
        moved = self._moved(before, now) or self._moved(self.units, now)
        if moved:
            name = moved[0].split(":")[0]
            self._fail("stable", "restarted_during_verification", "; ".join(moved),
                       "journalctl -u %s (Scheduler hit an exception, illegal memory access)" % self.unit(name))
        else:
            ages = ["%s %s" % (n, _duration(max(up[n], self.settle if waited else 0))) for n in self.active]
            self._pass("stable", "up for %s, %s" % (", ".join(ages), "nothing restarted" if before else "no snapshot from before the probes"))

    def _moved(self, old, new):
        found = []
        for name in self.active:
            one, two = (old or {}).get(name), (new or {}).get(name)
            if not one or not two:
                continue
            for key, word in (("MainPID", "main pid"), ("NRestarts", "restarts"), ("InvocationID", "invocation")):
                if one.get(key) != two.get(key) and not any(f.startswith(name + ":") for f in found):
                    found.append("%s: %s %s -> %s" % (name, word, one.get(key), two.get(key)))
            if one.get("ActiveState") == "active" and two.get("ActiveState") != "active" and not any(f.startswith(name + ":") for f in found):
                found.append("%s: active -> %s" % (name, two.get("ActiveState")))
        return found


def environment_of(state):
    """The variables of a unit, as systemctl shows them."""
    try:
        words = shlex.split(state.get("Environment") or "")
    except ValueError:
        return {}
    return dict(word.split("=", 1) for word in words if "=" in word)


def numa_of(text, pages):
    """The node that most mappings are bound to (None without a binding); anonymous pages are added to ``pages``."""
    bindings = {}
    plain = 0
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 2:
            continue
        match = re.match(r"bind(?:=\w+)?:(\d+)$", fields[1])
        if match:
            bindings[int(match.group(1))] = bindings.get(int(match.group(1)), 0) + 1
        else:
            plain += 1
        if any(f.startswith("anon=") for f in fields):
            for field in fields[2:]:
                found = re.match(r"N(\d+)=(\d+)$", field)
                if found:
                    pages[int(found.group(1))] = pages.get(int(found.group(1)), 0) + int(found.group(2))
    if not bindings:
        return None, plain
    node = max(bindings, key=bindings.get)
    return (node if bindings[node] >= plain else None), plain


def applied_kernels(lines):
    """What the plugin said it applied, None when it said nothing: {kernels, build, line}. Each scheduler says it for itself; when
    they disagree the one with the fewest kernels counts, or the one of a build of its own."""
    said = []
    for line in lines:
        match = re.search(r"dsv4_sm120\b.*?\bapplied[:=]?\s*\[?([\w, ]*)\]?", line)
        if match:
            names = sorted(set(n for n in re.split(r"[,\s]+", match.group(1)) if n and n not in ("none", "nothing")))
            build = re.search(r"\bbuild (\w+)", match.group(0))
            said.append({"kernels": names, "build": build.group(1) if build else "", "line": line[match.start():].strip()})
    builds = [one["build"] for one in said]
    return min(said, key=lambda one: (len(one["kernels"]), builds.count(one["build"]))) if said else None


def _url(text):
    return text.rstrip("/").replace("localhost", "127.0.0.1")


def _in_range(port, rule):
    first = rule["port"]
    if isinstance(first, str) and "-" in first:
        low, high = first.split("-")
        return int(low) <= port <= int(high)
    return int(first) <= port <= int(rule.get("port_end") or first)


def _equal(want, have):
    if want in (None, "null", "") or have in (None, "null", ""):
        return (want in (None, "null", "")) == (have in (None, "null", ""))
    if isinstance(want, bool) or isinstance(have, bool):
        return str(want).lower() == str(have).lower()
    try:
        return abs(float(want) - float(have)) < 1e-9
    except (TypeError, ValueError):
        return str(want) == str(have)


def _show(value):
    return "none" if value in (None, "null", "") else str(value)


def _duration(seconds):
    if seconds < 120:
        return "%.0f s" % seconds
    if seconds < 7200:
        return "%.0f min" % (seconds / 60)
    return "%.1f h" % (seconds / 3600)
