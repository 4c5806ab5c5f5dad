# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role on this machine, through ansible-playbook: what a play shows, changes, refuses and never tells."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import bad_mirror
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
TOKEN = "planted-token-7f3a9c51"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
PLAYBOOK = shutil.which("ansible-playbook", path=os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", ""))

pytestmark = pytest.mark.skipif(PLAYBOOK is None, reason="ansible-playbook is not installed")


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


maker = load("make_checkpoint", "molecule/rehearsal_host/checkpoint/make_checkpoint.py")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    tokenizer = tmp_path_factory.mktemp("tokenizer")
    added = [{"id": n, "content": c} for n, c in ((128821, "<think>"), (128822, "</think>"), (128825, "｜DSML｜"))]
    (tokenizer / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (tokenizer / "tokenizer_config.json").write_text("{}")
    folder = tmp_path_factory.mktemp("source") / "model"
    maker.build(maker.parser().parse_args([str(folder), "--tokenizer", str(tokenizer), "--layers", "4", "--routed-experts", "6"]))
    return folder


class Play:
    """Runs the role against localhost with a home of its own."""

    def __init__(self, folder, source):
        self.folder = folder
        self.root = folder / "dsv4"
        self.model = self.root / "models" / "small@one"
        self.vars = {
            "dsv4_root": str(self.root),
            "dsv4_user": "",
            "dsv4_model": {"name": "small", "revision": "one"},
            "model_staging_reserve": "1M",
            "model_staging_sources": [{"type": "directory", "path": str(source)}],
            "ansible_python_interpreter": sys.executable,
        }

    def run(self, *options, **variables):
        playbook = self.folder / "play.yml"
        (self.folder / "ansible.cfg").write_text("[defaults]\ninject_facts_as_vars = false\n")
        roles = [{"role": "blackwell.dsv4.model_staging"}]
        plays = [{"hosts": "localhost", "connection": "local", "gather_facts": False, "vars": dict(self.vars, **variables), "roles": roles}]
        playbook.write_text(json.dumps(plays))
        environment = dict(
            os.environ, HOME=str(self.folder), ANSIBLE_COLLECTIONS_PATH=str(ROOT / ".collections"), ANSIBLE_LOCALHOST_WARNING="false",
            ANSIBLE_INVENTORY_UNPARSED_WARNING="false", ANSIBLE_NOCOLOR="1", ANSIBLE_CONFIG=str(self.folder / "ansible.cfg"),
        )
        done = subprocess.run(
            [PLAYBOOK, str(playbook), *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, cwd=self.folder, check=False, timeout=300
        )
        return done.returncode, done.stdout.decode()


@pytest.fixture
def play(tmp_path, source):
    return Play(tmp_path, source)


def recap(text):
    line = [line for line in text.splitlines() if line.startswith("localhost") and "changed=" in line][-1]
    return {key: int(value) for key, value in (item.split("=") for item in line.split(":", 1)[1].split())}


def test_first_run_second_run_and_check_mode(play, source):
    code, text = play.run("--check")
    size = sum(p.stat().st_size for p in source.iterdir() if p.name != "SHA256SUMS")
    assert code == 0 and "%d bytes to fetch in 9 of 9 files" % size in " ".join(text.split()), text
    assert recap(text)["changed"] == 1 and not play.root.exists()
    code, text = play.run()
    assert code == 0 and recap(text)["changed"] >= 1, text
    assert (play.model / ".dsv4-staged.json").exists() and not (play.model / ".dsv4-parts").exists()
    before = {p.name: p.stat().st_atime_ns for p in play.model.glob("*.safetensors")}
    code, text = play.run()
    assert code == 0 and recap(text)["changed"] == 0, text
    assert before == {p.name: p.stat().st_atime_ns for p in play.model.glob("*.safetensors")}
    code, text = play.run("--check")
    assert code == 0 and recap(text)["changed"] == 0, text


def test_a_wrong_checkpoint_is_refused_with_all_reasons(play, source, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(source, broken)
    (broken / "SHA256SUMS").unlink()
    (broken / "model-00002-of-00004.safetensors").unlink()
    (broken / "generation_config.json").write_text("nope")
    code, text = play.run(model_staging_sources=[{"type": "directory", "path": str(broken)}])
    assert code != 0 and "missing_shards" in text and "generation_config_not_json" in text, text
    assert not (play.model / ".dsv4-staged.json").exists()


@pytest.mark.slow
def test_speculation_that_the_checkpoint_cannot_serve_is_refused(play):
    code, text = play.run(dsv4_topology={"speculation": "dspark"})
    assert code != 0 and "the checkpoint can serve mtp only" in " ".join(text.split()), text
    code, text = play.run(dsv4_topology={"speculation": "mtp"})
    assert code == 0 and recap(text)["changed"] == 0, text


@pytest.mark.slow
def test_a_model_in_use_is_not_pruned(play):
    assert play.run()[0] == 0
    old = play.root / "models" / "small@zero"
    shutil.copytree(play.model, old)
    release = play.root / "releases" / "abc"
    release.mkdir(parents=True)
    (release / "model").symlink_to(old)
    code, text = play.run(model_staging_prune=["small@zero"])
    assert code != 0 and "a kept release uses it" in " ".join(text.split()) and old.exists(), text
    (release / "model").unlink()
    code, text = play.run(model_staging_prune=["small@zero"])
    assert code == 0 and not old.exists() and play.model.exists(), text
    # Neither the model of this run nor a way out of the directory.
    assert play.run(model_staging_prune=["small@one"])[0] != 0
    assert play.run(model_staging_prune=["../models"])[0] != 0
    assert play.model.exists()


def spy(seconds, stop):
    """Look at the arguments and environments of all processes for the token, as another user of the machine could."""
    seen, until = [], time.monotonic() + seconds
    while time.monotonic() < until and not stop():
        for entry in os.listdir("/proc"):
            if not entry.isdigit() or int(entry) == os.getpid():
                continue
            for part in ("cmdline", "environ"):
                try:
                    with open("/proc/%s/%s" % (entry, part), "rb") as stream:
                        if TOKEN.encode() in stream.read():
                            seen.append((entry, part))
                except OSError:
                    pass
        time.sleep(0.01)
    return seen


@pytest.mark.parametrize("how", ["option", "file"])
def test_a_planted_token_is_nowhere_to_be_found(play, source, tmp_path, how):
    import threading

    files = {p.name: p.read_bytes() for p in source.iterdir()}
    variables = {"dsv4_model": {"name": "small", "revision": COMMIT}}
    private = tmp_path / "vars.yml"
    token_file = tmp_path / "token"
    if how == "file":
        token_file.write_text(TOKEN + "\n")
        token_file.chmod(0o600)
        variables["model_staging_token_file"] = str(token_file)
        extra = []
    else:
        private.write_text(json.dumps({"model_staging_token": TOKEN}))
        private.chmod(0o600)
        extra = ["-e", "@" + str(private)]
    with bad_mirror.Mirror(files, prefix="/owner/name/resolve/%s/" % COMMIT, token=TOKEN, delay=0.02) as mirror:
        endpoint = "http://127.0.0.1:%d" % mirror.server.server_port
        listing = json.dumps(
            [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40, "lfs": {"oid": hashlib.sha256(data).hexdigest(), "size": len(data)}}
                for name, data in files.items()
            ]
        ).encode()
        asked = []

        def tree(request):
            asked.append(request.headers.get("Authorization"))
            mirror.plain(request, 200, listing, "application/json")

        mirror.routes["/api/models/owner/name/tree/" + COMMIT] = tree
        variables["model_staging_sources"] = [{"type": "hub", "endpoint": endpoint, "repository": "owner/name"}]
        outcome = {}
        thread = threading.Thread(target=lambda: outcome.update(zip(("code", "text"), play.run("-vvv", "--diff", *extra, **variables))))
        thread.start()
        seen = spy(120, lambda: not thread.is_alive())
        thread.join()
    assert outcome["code"] == 0, outcome["text"][-3000:]
    assert asked and set(asked) == {"Bearer " + TOKEN}
    assert TOKEN not in outcome["text"]
    assert seen == []
    for place in (tmp_path,):
        for path in place.rglob("*"):
            if path.is_file() and path not in (private, token_file):
                assert TOKEN.encode() not in path.read_bytes(), path


def test_a_failure_does_not_tell_the_token_either(play, tmp_path):
    private = tmp_path / "vars.yml"
    private.write_text(json.dumps({"model_staging_token": TOKEN}))
    with bad_mirror.Mirror({}, token="another") as mirror:
        code, text = play.run("-vvv", "-e", "@" + str(private), model_staging_sources=[{"type": "http", "url": mirror.url}])
    assert code != 0 and "unauthorized" in text and TOKEN not in text


def test_arguments_of_the_maker_stay_small():
    config = maker.configuration(argparse.Namespace(**vars(maker.parser().parse_args(["x"]))))
    assert config["num_hidden_layers"] == 43 and len(config["compress_ratios"]) == 44
