# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The unit files of sglang_dsv4, rendered for the shipped inventories, and the cases that they answer."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import jinja2
import pytest
import yaml

from ansible_collections.blackwell.dsv4.plugins.filter.systemd_word import systemd_word
from ansible_collections.blackwell.dsv4.plugins.module_utils import journal_classifier, serving_state
from ansible_collections.blackwell.dsv4.plugins.module_utils import serving_plan as sp
from ansible_collections.blackwell.dsv4.plugins.modules import serving_units

ROOT = Path(__file__).resolve().parents[3]
ROLE = ROOT / "roles" / "sglang_dsv4"
LIBEXEC = ROLE / "files" / "libexec"
GPU_UNITS = ("prefill", "decode", "single")


def program(name):
    """A helper program of the units, imported."""
    sys.path.insert(0, str(LIBEXEC)) if str(LIBEXEC) not in sys.path else None
    for part, path in (("journal_classifier", "journal_classifier"), ("serving_state", "serving_state")):
        sys.modules.setdefault(part, {"journal_classifier": journal_classifier, "serving_state": serving_state}[path])
    specification = importlib.util.spec_from_file_location("libexec_%s" % name, LIBEXEC / ("%s.py" % name))
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def gpus(nodes=(0, 0, 0, 0, 1, 1, 1, 1)):
    return [{"index": index, "uuid": "GPU-00000000-0000-4000-8000-%012d" % index, "numa_node": node}
            for index, node in enumerate(nodes)]


def topology(**instances):
    text = (ROOT / "inventory/blackwell8/group_vars/all/topology.yml").read_text(encoding="utf-8")
    wanted = yaml.safe_load(text)["dsv4_topology"]
    for name, changes in instances.items():
        wanted["instances"][name].update(changes)
    return wanted


def plan(wanted=None, **options):
    options.setdefault("gpus", gpus())
    options.setdefault("cache_key", "0123456789ab")
    options.setdefault("router_launcher", "@RELEASE@/libexec/router_launcher.py")
    return sp.serving_plan(wanted or topology(), engine="@RELEASE@/engine", router="@RELEASE@/router",
                           model_path="@RELEASE@/model", **options)


def unit(name, result=None, **options):
    """{directive: [values]} of a rendered unit, and its text."""
    result = result or plan(**options)
    instance = result["instances"][name]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ROLE / "templates"), trim_blocks=True, keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined)
    environment.filters["blackwell.dsv4.systemd_word"] = systemd_word
    environment.filters["bool"] = bool
    environment.filters["regex_replace"] = lambda text, pattern, new: re.sub(pattern, new, text, count=1)
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text(encoding="utf-8"))
    variables = yaml.safe_load((ROLE / "vars/main.yml").read_text(encoding="utf-8"))
    defaults.update(sglang_dsv4_user="dsv4", sglang_dsv4_group="dsv4", __sglang_dsv4_key_files=["/k/api-key", "/k/worker.yaml"],
                    sglang_dsv4_nvml_path="/opt/dsv4/tools/lib/python3*/site-packages")
    text = environment.get_template(
        "router.service.j2" if instance["mode"] == "router" else "worker.service.j2").render(
        defaults, plan=result, instance=instance, __sglang_dsv4_words=variables["__sglang_dsv4_words"],
        __sglang_dsv4_ports=[item["port"] for item in instance["listeners"] if item["what"] != "kv transfer"],
        __sglang_dsv4_workers=["sglang-dsv4-prefill", "sglang-dsv4-decode"],
        __sglang_dsv4_cache_directory=instance["environment"]["HOME"].replace("/var/cache/", ""))
    directives = {}
    for line in re.sub(r" \\\n\s*", " ", text).splitlines():
        if "=" in line and not line.startswith("#"):
            key, unused, value = line.partition("=")
            directives.setdefault(key, []).append(value)
    return directives, text


def environment_of(directives):
    return dict(value.strip('"').partition("=")[::2] for value in directives["Environment"])


def errors(result):
    return [finding for finding in result["findings"] if finding["severity"] == "error"]


@pytest.mark.parametrize("name", ["prefill", "decode", "single", "router"])
@pytest.mark.parametrize("api_key", [False, True], ids=["open", "key"])
def test_units_are_what_systemd_reads(name, api_key, tmp_path):
    directives, text = unit(name, api_key=api_key)
    assert directives["Type"] == ["exec"] and directives["Restart"] == ["always"]
    assert directives["WorkingDirectory"] == ["@RELEASE@/run"]
    assert not re.search(r"\{\{|\}\}|\{%|None|True|False", text)
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd-analyze here")
    path = tmp_path / ("%s.service" % name)
    real = text.replace("@RELEASE@", str(tmp_path))
    for binary in ("engine/bin/python", "router/bin/python"):
        place = tmp_path / binary
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("#!/bin/sh\n")
        place.chmod(0o755)
    path.write_text(real)
    result = subprocess.run(["systemd-analyze", "verify", "--man=no", str(path)], stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, check=False)
    ours = [line for line in result.stdout.splitlines() if str(path) in line and "LogFilterPatterns" not in line]
    assert ours == []


def test_words_reach_the_program_as_they_are():
    wanted = topology(decode={"environment": {"ODD": 'a "b" 50% $HOME \\'}, "extra_args": ["--x", '{"a": "$b 5%"}']})
    directives, unused = unit("decode", plan(wanted))
    assert '"ODD=a \\"b\\" 50%% $HOME \\\\"' in directives["Environment"]
    assert directives["ExecStart"][0].endswith('--x "{\\"a\\": \\"$$b 5%%\\"}"')
    with pytest.raises(Exception, match="line break"):
        systemd_word("a\nb")


def test_only_workers_are_cut_off_from_the_network():
    for name in ("prefill", "decode"):
        directives, unused = unit(name)
        assert directives["IPAddressDeny"] == ["any"] and directives["IPAddressAllow"] == ["localhost"]
    for name in ("router", "single"):
        assert "IPAddressDeny" not in unit(name)[0]


def test_no_key_is_ever_an_argument_or_an_environment():
    for name in ("prefill", "decode", "single", "router"):
        directives, text = unit(name, api_key=True)
        assert "--api-key" not in text
        assert directives["LoadCredential"][0].startswith(("worker.yaml:", "router-api-key:"))
    router, unused = unit("router", api_key=True, api_key_file="/k/of-the-plan")
    assert router["LoadCredential"] == ["router-api-key:/k/of-the-plan"]
    workers, unused = unit("decode", api_key=True)
    assert workers["LoadCredential"] == ["worker.yaml:/k/worker.yaml"]
    assert workers["LogFilterPatterns"] == ["~api[_-]key"]
    assert "--config /run/credentials/sglang-dsv4-decode.service/worker.yaml" in workers["ExecStart"][0]
    assert "--config" not in unit("decode", api_key=True, worker_keys=False)[1]


def test_the_engines_log_has_no_key(tmp_path):
    code = ("import logging, sys; logging.basicConfig(stream=sys.stdout, format='%(message)s', level=20)\n"
            "log = logging.getLogger('sglang')\n"
            "arguments = {'port': 1, 'api_key': 's3cret', 'admin_api_key': \"s3c'ret\", 'x': 2}\n"
            "log.info('server_args=%s', arguments); log.info(f'server_args={arguments}')\n"
            "log.info({'launch_command': 'python -m x --admin-api-key s3cret --api-key=s3cret --port 1'})\n"
            "log.info('ServerArgs(api_key=\\'s3cret\\', port=1)'); log.info('plain %d', 5); log.info('%d %d', 1)\n")
    result = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROLE / "files/site")}, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=True)
    assert "s3c" not in result.stdout and "s3c" not in result.stderr
    assert result.stdout.splitlines()[0] == (
        "server_args={'port': 1, 'api_key': '(left out)', 'admin_api_key': '(left out)', 'x': 2}")
    assert "plain 5" in result.stdout
    with_key = environment_of(unit("decode", api_key=True, site_path="@RELEASE@/site", kernel_path="@RELEASE@/kernels")[0])
    assert with_key["PYTHONPATH"] == "@RELEASE@/site:@RELEASE@/kernels"


def test_the_router_outlives_its_workers():
    directives, unused = unit("router")
    assert "sglang-dsv4-prefill.service" in directives["After"][0]
    assert "sglang-dsv4-prefill.service" in directives["Wants"][0]
    assert not {"Requires", "BindsTo", "PartOf", "Requisite"} & set(directives)
    assert "ExecStartPost" not in directives


# --- cases -----------------------------------------------------------------------------------------------


def case_fab_06():
    result = plan(p2p="disabled")
    for name in GPU_UNITS:
        environment = result["instances"][name]["environment"]
        assert environment["NCCL_P2P_DISABLE"] == "1"
        assert environment["SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"] == "0"
        assert "--disable-custom-all-reduce" in result["instances"][name]["argv"]
    by_hand = plan(topology(decode={"environment": {"NCCL_P2P_DISABLE": "1"}}))
    assert "P2P disabled for NCCL but custom all-reduce still on" in errors(by_hand)[0]["what"]
    answer = journal_classifier.classify(
        ["Load weight end.", "Capture cuda graph begin", "start operation timed out"], result="timeout")
    assert answer["class"] == "start_timeout" and "CUDA graph capture" in answer["what"]


def case_fab_07():
    for facts in (gpus(), []):
        for name in GPU_UNITS:
            environment = environment_of(unit(name, gpus=facts)[0])
            assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    decode = environment_of(unit("decode")[0])
    assert decode["CUDA_VISIBLE_DEVICES"] == ",".join(gpu["uuid"] for gpu in gpus()[4:])


def case_fab_11():
    # Noted while the unit loads, read when it failed: by then nothing of it is in the GPUs any more.
    readiness, stop_post = program("readiness"), program("stop_post")
    samples = iter([[0, 0, 0, 0], [93817, 15, 15, 15], [400, 10, 10, 10]])
    clock = [0.0]
    with tempfile.TemporaryDirectory() as folder:
        memory = readiness.Memory(lambda: next(samples), folder, 5.0, lambda: clock[0])
        for unused in range(3):
            memory.look()
            memory.look()
            clock[0] += 5.0
        lines = ["Load weight begin.", "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 94.97 GiB"]
        environment = {"SERVICE_RESULT": "exit-code", "CACHE_DIRECTORY": folder}
        assert stop_post.main(["--unit", "u", "--folder", folder], environment, lambda *unused: lines, lambda argv: None) == 0
        written = json.loads(Path(folder, "u.json").read_text())
        assert written["class"] == "load_not_spread" and "93.8 GiB / 15 MiB x3" in written["what"]
        assert not Path(folder, ".start-memory.json").exists()
        assert stop_post.memory_at_start(environment) == []
    assert "--gpus GPU-" in unit("decode")[0]["ExecStartPost"][0]


def case_fab_12():
    for name in GPU_UNITS:
        directives, text = unit(name)
        assert "AllowedMemoryNodes" not in directives and "AllowedCPUs" not in directives
        assert all(value.startswith("~") and "set_mempolicy" not in value and "@resources" not in value
                   for value in directives["SystemCallFilter"])
    decode, unused = unit("decode")
    assert (decode["NUMAPolicy"], decode["NUMAMask"], decode["CPUAffinity"]) == (["bind"], ["1"], ["numa"])
    single, text = unit("single")
    assert not {"NUMAPolicy", "NUMAMask", "CPUAffinity"} & set(single) and "--numa-node" not in text
    assert environment_of(single)["SGLANG_AUTO_NUMA_BIND"] == "0"
    crossed = plan(topology(decode={"numa_node": 0}))
    assert errors(crossed)[0]["id"] == "numa.mismatch" and "node 1" in errors(crossed)[0]["what"]
    answer = journal_classifier.classify(["setting membind: Invalid argument", "exit code 1"])
    assert answer["what"] == "NUMA binding refused by cpuset/seccomp"


def case_krn_02():
    wanted = topology(prefill={"extra_args": ["--moe-runner-backend", "deep_gemm_mega_moe"]})
    found = errors(plan(wanted, compute_capability="12.0"))
    assert "option needs compute capability 10.x; host is 12.0" in found[0]["what"]
    assert not errors(plan(wanted, compute_capability="10.0"))
    fp4 = topology(decode={"extra_args": ["--enable-deepseek-v4-fp4-indexer"]})
    assert errors(plan(fp4))[0]["id"] == "extra.capability"
    table = json.loads((ROOT / "files/sglang_flags.json").read_text(encoding="utf-8"))["flags"]
    unknown = plan(topology(decode={"extra_args": ["--brand-new-option", "7"]}), flag_table=table)
    assert not errors(unknown)
    assert [finding["id"] for finding in unknown["findings"]] == ["extra.unknown"]


def case_pd_01():
    twice = plan(topology(decode={"bootstrap_port": 8998}))
    assert errors(twice)[0]["what"] == "bootstrap port 8998 used by prefill and decode"
    unset = topology()
    del unset["instances"]["prefill"]["bootstrap_port"]
    assert errors(plan(unset))[0]["variable"] == "dsv4_topology.instances.prefill.bootstrap_port"
    # A stranger on the port is named with pid and unit; our own unit is none.
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        holders = serving_state.port_holders([{"port": port, "what": "bootstrap", "instance": "prefill"}])
        assert len(holders) == 1 and holders[0]["own"] is False
        sentence = serving_state.stranger_sentence(holders[0])
        assert "pid %d" % holders[0]["pid"] in sentence and "unit" in sentence and str(port) in sentence
        own = serving_state.port_holders([{"port": port}], [holders[0]["unit"].replace(".service", "")])
        assert own[0]["own"] is holders[0]["unit"].endswith(".service")


def case_pd_02():
    for name in GPU_UNITS:
        port = int(re.search(r"--nccl-port (\d+)", unit(name)[1]).group(1))
        assert port < 32768
    found = errors(plan(topology(decode={"nccl_port": 35061})))
    assert found[0]["what"] == "35061 lies in 32768-60999"


def case_pd_04():
    found = errors(plan(start_timeout=1800, router_startup_timeout=300))
    assert found[0]["variable"] == "sglang_dsv4_router_startup_timeout" and "1800" in found[0]["what"]
    argv = plan(start_timeout=1800)["instances"]["router"]["argv"]
    assert int(argv[argv.index("--worker-startup-timeout-secs") + 1]) >= 1800
    # While workers load the router is not started at all, and its restarts are no failure of theirs.
    assert "After" in unit("router")[0]


def case_pd_05():
    for name in GPU_UNITS:
        environment = environment_of(unit(name)[0])
        assert environment["SGLANG_HOST_IP"] == "127.0.0.1"
        # Ranks that meet at another address than loopback never meet below IPAddressDeny.
        assert (environment["GLOO_SOCKET_IFNAME"], environment["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    # A socket that accepts and never answers ends the look after its own limit.
    readiness = program("readiness")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        accepted = []
        threading.Thread(target=lambda: accepted.append(listener.accept()), daemon=True).start()
        ready, seen = readiness.look("http://127.0.0.1:%d/health" % listener.getsockname()[1], 0.3)
        assert not ready and "timed out" in seen


def case_pd_16():
    eight = errors(plan(topology(decode={"environment": {"CUDA_VISIBLE_DEVICES": "4,5,6,7"},
                                         "extra_args": ["--tp", "8"]})))
    assert {finding["id"] for finding in eight} == {"extra.owned", "environment.gpus"}
    assert any("--tp 8" in finding["what"] and "4, 5, 6, 7" in finding["what"] for finding in eight)
    base = errors(plan(topology(decode={"extra_args": ["--base-gpu-id", "4", "--tp-size=4"]})))
    assert len(base) == 2 and "--base-gpu-id 4" in base[0]["what"]
    for name in GPU_UNITS:
        instance = plan()["instances"][name]
        visible = instance["environment"]["CUDA_VISIBLE_DEVICES"].split(",")
        assert len(visible) == int(instance["argv"][instance["argv"].index("--tp-size") + 1])
        assert "--base-gpu-id" not in instance["argv"]


def case_svc_01():
    for name in GPU_UNITS:
        directives, unused = unit(name, start_timeout=1800)
        assert directives["TimeoutStartSec"] == ["1800"]
        assert "--limit 1790" in directives["ExecStartPost"][0]
    assert errors(plan(start_timeout=90))[0]["variable"] == "sglang_dsv4_start_timeout"
    # The play waits longer than systemd does, so that systemd's verdict is the one that is heard.
    expression = yaml.safe_load((ROLE / "vars/main.yml").read_text(encoding="utf-8"))["__sglang_dsv4_wait"]
    wait = jinja2.Template(expression).render(sglang_dsv4_start_timeout="1800", sglang_dsv4_gpu_wait=60)
    assert int(wait) > 1800 + 60
    waits = [task["blackwell.dsv4.serving_wait"]["timeout"] for task in cutover_tasks() if "blackwell.dsv4.serving_wait" in task]
    assert len(waits) == 2 and all("__sglang_dsv4_wait" in text for text in waits)


def cutover_tasks():
    """The cutover's tasks, its block opened."""
    for task in yaml.safe_load((ROLE / "tasks/cutover.yml").read_text(encoding="utf-8")):
        yield from task.get("block", [task])


def case_svc_02():
    for name in GPU_UNITS:
        directives, unused = unit(name)
        assert directives["KillMode"] == ["mixed"] and int(directives["TimeoutStopSec"][0]) > 90
        assert directives["ExecStartPre"][1].startswith("+/usr/bin/python3 -B @RELEASE@/libexec/prestart.py")
    prestart = program("prestart")
    wanted = [gpu["uuid"] for gpu in gpus()[4:]]
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        lines = prestart.users_of(wanted, {wanted[0]: [child.pid]}, "sglang-dsv4-decode")
        assert len(lines) == 1
        assert "pid %d" % child.pid in lines[0] and wanted[0] in lines[0] and "cgroup" in lines[0]
        assert prestart.users_of(wanted, {gpus()[0]["uuid"]: [child.pid]}, "sglang-dsv4-decode") == []
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def case_svc_04():
    for name in GPU_UNITS:
        directives, unused = unit(name)
        interval, burst = int(directives["StartLimitIntervalSec"][0]), int(directives["StartLimitBurst"][0])
        each = int(directives["TimeoutStartSec"][0]) + int(directives["RestartSec"][0])
        assert interval > burst * each and interval > 2745
    facts = {"failed": False, "sub_state": "start", "active_state": "activating", "restarts": 1}
    assert serving_state.verdict(facts, 0, 0) == "failed"
    assert serving_state.verdict(dict(facts, restarts=0), 0, 0) == "waiting"


def case_svc_05():
    units = {name: {"present": True, "enabled": False, "need_reload": False, "failed": failed, "active_state": state}
             for name, failed, state in (("a", True, "failed"), ("b", False, "inactive"), ("c", False, "active"))}
    units["gone"] = {"present": False, "enabled": False, "need_reload": False, "failed": False,
                     "active_state": "inactive"}
    given = {"stopped": ["gone"], "disabled": [], "enabled": [], "started": ["a", "b", "c"], "reload": False}
    calls = [arguments for arguments, unused in serving_units.steps_for(given, units)]
    assert calls == [["reset-failed", "a.service"], ["reset-failed", "b.service"],
                     ["start", "--no-block", "a.service", "b.service"]]
    words = [said for unused, said in serving_units.steps_for(given, units) if said]
    assert words[0] == "reset-failed a" and words[-1] == "start a b"


def case_svc_06():
    prestart = program("prestart")

    class Driver:
        looks = 0

        def read(self):
            self.looks += 1
            return ({"GPU-a": []}, "") if self.looks > 3 else ({}, "Driver Not Loaded")

    time = [0.0]

    def sleep(seconds):
        time[0] += seconds

    driver = Driver()
    argv = ["--unit", "x", "--gpus", "GPU-a", "--wait", "60"]
    assert prestart.main(argv, driver, sleep, lambda: time[0]) == 0
    assert driver.looks == 4 and time[0] == 3.0
    never = Driver()
    never.read = lambda: ({}, "Driver Not Loaded")
    time[0] = 0.0
    assert prestart.main(argv, never, sleep, lambda: time[0]) == 1
    assert 60 <= time[0] <= 62
    assert "--node /dev/nvidia-uvm" in unit("decode")[0]["ExecStartPre"][1]


def case_svc_08():
    for name in GPU_UNITS:
        directives, unused = unit(name)
        assert directives["LimitMEMLOCK"] == ["infinity"] and directives["LimitNOFILE"] == ["1048576"]


def case_svc_10():
    homes = {}
    for name in GPU_UNITS:
        directives, unused = unit(name)
        environment = environment_of(directives)
        homes[name] = environment["HOME"]
        assert directives["CacheDirectory"] == ["dsv4/%s/0123456789ab" % name]
        for key in sp.cache_environment(""):
            assert environment[key].startswith("/var/cache/dsv4/%s/" % name), key
    assert len(set(homes.values())) == 3
    other = environment_of(unit("decode", cache_key="ba9876543210")[0])
    assert other["HOME"] != homes["decode"]


CASES = {name[5:].upper().replace("_", "-"): function for name, function in sorted(globals().items())
         if name.startswith("case_")}


@pytest.mark.parametrize("case", [pytest.param(function, id=name) for name, function in CASES.items()])
def test_case(case):
    case()


# --- the packet filter, in a network of its own ----------------------------------------------------------


def packet_filter(result):
    """The text of the nftables table for a plan."""
    closed = sorted({item["range"] for item in result["listeners"] if item["port"] != result["endpoint"]["port"]})
    template = (ROLE / "templates/transfer.nft.j2").read_text(encoding="utf-8")
    return jinja2.Environment(trim_blocks=True).from_string(template).render(__sglang_dsv4_closed_ranges=closed)


def test_the_packet_filter_names_every_port_but_the_public_one():
    text = packet_filter(plan())
    ports = re.search(r"dport \{ (.*?) \}", text).group(1).split(", ")
    assert set(ports) == {"15000-15999", "16000-16999", "29000", "29510", "29520", "29530", "30000", "30002", "8998"}
    for name in GPU_UNITS:
        before = unit(name)[0]["ExecStartPre"]
        assert before[0] == "+/usr/sbin/nft -f @RELEASE@/nft/transfer.nft" and "prestart.py" in before[1]


IN_A_NETWORK = r"""
set -e
nft -f "$1"; nft -f "$1"
ip link set lo up
ip link add outside type veth peer name inside
ip addr add 192.0.2.1/24 dev inside; ip link set inside up
unshare -n sleep 30 & other=$!
for n in 1 2 3 4 5 6 7 8 9 10; do [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ] && break; sleep 0.1; done
ip link set outside netns $other
nsenter -t $other -n ip addr add 192.0.2.2/24 dev outside
nsenter -t $other -n ip link set outside up
"$2" -c 'import socket, sys, time
for port in (15500, 16500, 30001, 40000):
    s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(("0.0.0.0", port)); s.listen(); globals()["s%d" % port] = s
time.sleep(20)' & server=$!
sleep 1
look='import socket, sys
for port in (15500, 16500, 30001, 40000):
    try:
        socket.create_connection((sys.argv[1], port), 1).close(); print(port, "open")
    except OSError: print(port, "closed")'
echo loopback; "$2" -c "$look" 127.0.0.1
echo outside; nsenter -t $other -n "$2" -c "$look" 192.0.2.1
kill $server $other
"""


@pytest.mark.skipif(os.geteuid() != 0 or not all(map(shutil.which, ("nft", "ip", "unshare", "nsenter"))),
                    reason="needs root, nft and iproute2")
def test_the_packet_filter_by_its_effect(tmp_path):
    table = tmp_path / "transfer.nft"
    table.write_text(packet_filter(plan()))
    result = subprocess.run(["unshare", "-n", "sh", "-c", IN_A_NETWORK, "sh", str(table), sys.executable],
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=60)
    lines = result.stdout.split("loopback\n")[-1].splitlines()
    assert lines[:4] == ["15500 open", "16500 open", "30001 open", "40000 open"], result.stdout
    assert lines[4:9] == ["outside", "15500 closed", "16500 closed", "30001 open", "40000 open"], result.stdout


# --- the units' helper programs --------------------------------------------------------------------------


def test_readiness_waits_and_gives_up():
    readiness = program("readiness")
    clock, answers, said = [0.0], iter([(False, "HTTP 503")] * 70 + [(True, "HTTP 200")]), []

    def sleep(seconds):
        clock[0] += seconds

    arguments = dict(interval=1.0, timeout=5, say=said.append, clock=lambda: clock[0], sleep=sleep)
    assert readiness.wait("u", 100, once=lambda url, timeout: next(answers), **arguments) == 0
    assert any("waiting" in line and "503" in line for line in said) and said[-1].startswith("ready after 70 s")
    clock[0] = 0.0
    assert readiness.wait("u", 100, once=lambda url, timeout: (False, "refused"), **arguments) == 1
    assert said[-1] == "not ready after 100 s: u (refused)"
    # systemd does not end ExecStartPost when the server ends: it has to notice.
    clock[0] = 0.0
    assert readiness.wait("u", 100, once=lambda url, timeout: (False, "refused"), ended=lambda: clock[0] > 2, **arguments) == 1
    assert said[-1] == "the server ended after 3 s"
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    while not readiness.gone(child.pid):
        pass
    child.wait()
    assert readiness.gone(child.pid) and not readiness.gone(os.getpid()) and not readiness.gone(0)


@pytest.mark.parametrize("lines,result,stops", [
    (["no kernel image is available for execution on the device"], "exit-code", True),
    (["address already in use"], "exit-code", False),
    (["Load weight begin"], "timeout", False),
    (["whatever"], "success", False),
])
def test_stop_post_ends_the_restarts_of_a_permanent_failure(tmp_path, lines, result, stops):
    stop_post = program("stop_post")
    calls = []
    code = stop_post.main(["--unit", "u", "--folder", str(tmp_path / "f")], {"SERVICE_RESULT": result},
                          lambda *unused: lines, calls.append)
    assert code == 0
    assert calls == ([["systemctl", "stop", "--no-block", "u.service"]] if stops else [])
    written = tmp_path / "f" / "u.json"
    assert written.exists() is (result != "success")
    if written.exists():
        assert json.loads(written.read_text())["tail"] == lines


def test_the_readme_knows_every_class_and_whether_it_is_tried_again():
    rows = re.findall(r"(?m)^\| (`.*`) \| [^|]* \| (yes|no) \|$", (ROLE / "README.md").read_text(encoding="utf-8"))
    said = {name: again for names, again in rows for name in re.findall(r"`(\w+)`", names)}
    assert said.pop("unknown") == "yes"
    assert said == {name: "no" if permanent else "yes" for name, permanent, *unused in journal_classifier.RULES}


@pytest.mark.parametrize("kind,module", [("sglang-router", "sglang_router.launch_router"), ("smg", "smg.launch_router")])
def test_launcher_puts_the_key_into_the_arguments_only(tmp_path, kind, module):
    launcher = program("router_launcher")
    (tmp_path / "router-api-key").write_text("s3cret\n")
    seen = {}

    class Package:
        @staticmethod
        def parse_router_args(words):
            seen["words"] = words
            return type("Arguments", (), {"api_key": None})()

        @staticmethod
        def launch_router(arguments):
            seen["key"] = arguments.api_key

    def load(name):
        assert name == module
        return Package

    environment = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    assert launcher.main([kind, "--port", "1"], environment, load) == 0
    assert seen == {"words": ["--port", "1"], "key": "s3cret"}
    assert "s3cret" not in " ".join(environment.values())
    assert launcher.main([kind, "--port", "1"], {}, load) == 0 and seen["key"] is None
    assert launcher.main([kind, "--api-key", "x"], environment, load) == 2
    assert launcher.main(["nginx"], environment, load) == 2


def test_addresses_of_proc_net():
    decode = serving_state.decode_address
    assert decode("0100007F") == "127.0.0.1" and decode("00000000") == "0.0.0.0"
    assert decode("0" * 32) == "::" and decode("00000000000000000000000001000000") == "::1"
    assert decode("0000000000000000FFFF00000100007F") == "127.0.0.1"


def test_journal_lines_are_fit_to_show():
    assert serving_state.tidy("x server_args={'api_key': 's3cret'}") == "x server_args=(left out)"
    assert serving_state.tidy("\x1b[31mred\x1b[0m") == "red"
    assert len(serving_state.tidy("y" * 5000)) < 520


def test_the_journal_of_a_failed_change_is_shown_without_its_routine():
    tasks = yaml.safe_load((ROLE / "tasks/return.yml").read_text(encoding="utf-8"))
    read = next(task for block in tasks for task in block.get("block", []) if "__sglang_dsv4_remarkable" in task.get("vars", {}))
    remarkable = re.compile(read["vars"]["__sglang_dsv4_remarkable"])
    routine = (
        'host python[29]: INFO:     127.0.0.1 - "POST /v1/chat/completions HTTP/1.1" 200',
        'host python[30]: 2026-01-01 00:00:00  INFO http_request{method=GET uri=/workers}: smg::request: started processing request',
        'host python[30]: 2026-01-01 00:00:00  WARN http_request{status_code=400}: smg::response: request failed with client error',
        "host python[29]: [2026-01-01 00:00:00] server_args=ServerArgs(model_path='/opt')",
    )
    told = (
        "host python[29]: torch.OutOfMemoryError: CUDA out of memory.",
        "host python[30]: 2026-01-01 00:00:00 ERROR http_request{}: smg::routers: Decode server returned error status",
        "host systemd[1]: sglang-dsv4-decode.service: Main process exited, code=exited, status=1/FAILURE",
    )
    assert not [line for line in routine if remarkable.search(line)] and all(remarkable.search(line) for line in told)
