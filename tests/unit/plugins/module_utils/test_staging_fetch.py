# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Transfers from a directory, from a server that misbehaves, and from a child that does."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import stat
import sys
import threading
import time

import bad_mirror
import pytest

from ansible_collections.blackwell.dsv4.plugins.module_utils import staging, staging_fetch, staging_sources
from ansible_collections.blackwell.dsv4.plugins.module_utils import staging_manifest as manifests

Mirror = bad_mirror.Mirror

CHUNK = 1 << 16


def noise(name, size):
    return hashlib.shake_128(name.encode()).digest(size)


def content(files=5, size=300000):
    made = {"part-%d.bin" % n: noise("part-%d" % n, size + 7919 * n) for n in range(files)}
    made["sub/small.json"] = b'{"a": 1}'
    made["empty"] = b""
    return made


def manifest_of(files, sizes=True):
    return {p: {"size": len(d) if sizes else None, "sha256": hashlib.sha256(d).hexdigest()} for p, d in files.items()}


def sums_of(files):
    return "".join("%s  %s\n" % (hashlib.sha256(d).hexdigest(), p) for p, d in sorted(files.items())).encode()


def tree(folder, files):
    for path, data in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return folder


def fetcher(dest, files, sources, **options):
    defaults = {"parallel": 4, "chunk": CHUNK, "reserve": 0, "stall_timeout": 5.0, "backoff": 0.01, "retries": 20}
    return staging_fetch.Fetcher(str(dest), files, sources, **dict(defaults, **options))


def http(mirror, **options):
    return staging_sources.HttpSource(mirror.url, **dict({"timeout": 2.0}, **options))


def same(dest, files):
    for path, data in files.items():
        assert (dest / path).read_bytes() == data, path
    leftover = [p for p in (dest / manifests.WORK_DIR).iterdir() if p.suffix in (".part", ".json") and p.name not in ("record.json", "progress.json")]
    assert leftover == []


# -- from a directory -----------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [1, 2, 8])
def test_a_directory_is_copied_and_hashed_on_the_way(tmp_path, parallel):
    files = content()
    source = staging_sources.DirectorySource(str(tree(tmp_path / "from", files)))
    run = fetcher(tmp_path / "to", manifest_of(files), [source], parallel=parallel)
    counters = run.run()
    same(tmp_path / "to", files)
    assert counters["fetched_files"] == len(files) and counters["refetched_bytes"] == 0
    assert {p: e["sha256"] for p, e in run.record.items()} == {p: e["sha256"] for p, e in manifest_of(files).items()}
    if parallel == 1:
        assert counters["read_back_bytes"] == 0


def test_a_second_run_reads_nothing(tmp_path, monkeypatch):
    files = content()
    source = staging_sources.DirectorySource(str(tree(tmp_path / "from", files)))
    fetcher(tmp_path / "to", manifest_of(files), [source]).run()

    def never(*args, **options):
        raise AssertionError("a file was opened")

    monkeypatch.setattr(staging_fetch, "hash_many", never)
    monkeypatch.setattr(staging_sources.DirectorySource, "open", never)
    again = fetcher(tmp_path / "to", manifest_of(files), [source])
    assert again.plan() == (sorted(files), [], [])
    assert again.run()["fetched_bytes"] == 0


def test_only_what_changed_comes_again(tmp_path):
    files = content()
    source = staging_sources.DirectorySource(str(tree(tmp_path / "from", files)))
    dest = tmp_path / "to"
    fetcher(dest, manifest_of(files), [source]).run()
    os.truncate(dest / "part-0.bin", 0)
    os.truncate(dest / "part-1.bin", 100)
    (dest / "part-2.bin").unlink()
    flipped = bytearray(files["part-3.bin"])
    flipped[1000] ^= 1
    (dest / "part-3.bin").write_bytes(flipped)
    run = fetcher(dest, manifest_of(files), [source])
    counters = run.run()
    same(dest, files)
    assert counters["fetched_files"] == 4
    assert run.events.counts == {"zero_byte_shards": 1, "size_mismatch": 1, "checksum_mismatch": 1}
    assert fetcher(dest, manifest_of(files), [source]).run()["fetched_files"] == 0


def test_files_that_lie_there_already_are_read_once_and_kept(tmp_path):
    files = content()
    dest = tree(tmp_path / "to", files)
    run = fetcher(dest, manifest_of(files), [])
    counters = run.run()
    assert counters["fetched_files"] == 0 and counters["read_back_bytes"] == sum(map(len, files.values()))
    assert fetcher(dest, manifest_of(files), []).run()["read_back_bytes"] == 0


def test_a_deep_run_finds_what_hides_behind_its_old_time(tmp_path):
    files = content()
    source = staging_sources.DirectorySource(str(tree(tmp_path / "from", files)))
    dest = tmp_path / "to"
    fetcher(dest, manifest_of(files), [source]).run()
    path = dest / "part-1.bin"
    before = path.stat()
    with open(path, "r+b") as stream:
        stream.write(b"!")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert fetcher(dest, manifest_of(files), [source]).run()["fetched_files"] == 0
    run = fetcher(dest, manifest_of(files), [source], deep=True)
    assert run.run()["fetched_files"] == 1 and run.events.counts == {"checksum_mismatch": 1}
    same(dest, files)


def test_a_corrupt_source_is_refused_and_the_next_one_asked(tmp_path):
    files = content(3)
    good = staging_sources.DirectorySource(str(tree(tmp_path / "good", files)))
    wrong = dict(files)
    wrong["part-1.bin"] = bytes(len(files["part-1.bin"]))
    wrong["part-2.bin"] = files["part-2.bin"][:-1]
    del wrong["sub/small.json"]
    bad = staging_sources.DirectorySource(str(tree(tmp_path / "bad", wrong)))
    dest = tmp_path / "to"
    with pytest.raises(staging_fetch.FetchFailed) as caught:
        fetcher(dest, manifest_of(files), [bad]).run()
    assert sorted(caught.value.details["files"]) == ["part-1.bin", "part-2.bin", "sub/small.json"]
    assert {r["file"]: r["id"] for r in caught.value.details["reasons"]} == {
        "part-1.bin": "checksum_mismatch",
        "part-2.bin": "wrong_length",
        "sub/small.json": "not_found",
    }
    assert not (dest / "part-1.bin").exists()
    run = fetcher(dest, manifest_of(files), [bad, good])
    assert run.run()["fetched_files"] == 3
    same(dest, files)


def test_links_of_a_hub_cache_are_followed_and_dangling_ones_named(tmp_path):
    files = content(2)
    blobs = tree(tmp_path / "blobs", files)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for name in ("part-0.bin", "part-1.bin"):
        (snapshot / name).symlink_to("../blobs/" + name)
    source = staging_sources.DirectorySource(str(snapshot))
    listed = source.listing()
    assert {p: e["size"] for p, e in listed.items()} == {n: len(files[n]) for n in ("part-0.bin", "part-1.bin")}
    fetcher(tmp_path / "to", listed, [source]).run()
    assert not (tmp_path / "to/part-0.bin").is_symlink()
    (blobs / "part-0.bin").unlink()
    with pytest.raises(staging_sources.SourceError) as caught:
        source.listing()
    assert caught.value.code == "dangling_links"


# -- space, rights, locks -------------------------------------------------------------------------


class Statvfs:
    def __init__(self, free, inodes=10**6):
        self.f_bavail, self.f_frsize, self.f_files, self.f_favail = free, 1, 10**6, inodes


@pytest.mark.parametrize("free, inodes, reserve, code", [(10**6, 10**6, 0, "no_space"), (10**9, 10**6, 10**9, "no_space"), (10**9, 10, 0, "no_inodes")])
def test_space_and_inodes_are_checked_before_the_first_byte(tmp_path, free, inodes, reserve, code):
    files = content()
    source = staging_sources.DirectorySource(str(tree(tmp_path / "from", files)))
    run = fetcher(tmp_path / "to", manifest_of(files), [source], reserve=reserve, statvfs=lambda p: Statvfs(free, inodes))
    with pytest.raises(staging_fetch.FetchFailed) as caught:
        run.run()
    assert caught.value.code == code and run.received == 0
    assert caught.value.details["needed"]


def test_only_what_is_missing_needs_space(tmp_path):
    files = content(2, 1 << 20)
    source = staging_sources.DirectorySource(str(tree(tmp_path / "from", files)))
    tree(tmp_path / "to", {"part-0.bin": files["part-0.bin"]})
    need = len(files["part-1.bin"]) + 100
    fetcher(tmp_path / "to", manifest_of(files), [source], statvfs=lambda p: Statvfs(need)).run()


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    files = content(1)
    source = staging_sources.DirectorySource(str(tree(tmp_path / "from", files)))
    run = fetcher(tmp_path / "to", manifest_of(files), [source])

    def full(descriptor, data, position):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run, "_write", full)
    with pytest.raises(staging_fetch.FetchFailed) as caught:
        run.run()
    assert caught.value.code == "no_space"


def test_two_transfers_into_one_directory_exclude_each_other(tmp_path):
    files = content(1)
    tree(tmp_path / "from", files)
    source = staging_sources.DirectorySource(str(tmp_path / "from"))
    second = fetcher(tmp_path / "to", manifest_of(files), [source])
    seen = []

    def inside(first):
        with pytest.raises(staging_fetch.FetchFailed) as caught:
            second.run()
        seen.append(caught.value.code)

    fetcher(tmp_path / "to", manifest_of(files), [source]).run(inside)
    assert seen == ["busy"]


def test_modes_and_owner(tmp_path, umask_077):
    files = content(1)
    source = staging_sources.DirectorySource(str(tree(tmp_path / "from", files)))
    owner = (65534, 65534) if os.geteuid() == 0 else None
    fetcher(tmp_path / "to", manifest_of(files), [source], owner=owner).run()
    for name in ("part-0.bin", "sub/small.json"):
        status = (tmp_path / "to" / name).stat()
        assert stat.S_IMODE(status.st_mode) == 0o644 and (owner is None or status.st_uid == 65534)
    assert stat.S_IMODE((tmp_path / "to/sub").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "to" / manifests.WORK_DIR).stat().st_mode) == 0o700


def test_a_link_planted_as_a_part_is_not_followed(tmp_path):
    files = content(1)
    source = staging_sources.DirectorySource(str(tree(tmp_path / "from", files)))
    run = fetcher(tmp_path / "to", manifest_of(files), [source])
    victim = tmp_path / "victim"
    victim.write_text("precious")
    work = tmp_path / "to" / manifests.WORK_DIR
    work.mkdir(parents=True)
    job = staging_fetch.Job(run, "part-0.bin", manifest_of(files)["part-0.bin"])
    os.symlink(victim, job.part)
    with pytest.raises(OSError):
        run.run()
    assert victim.read_text() == "precious"


# -- from a server that misbehaves ----------------------------------------------------------------


def test_a_mirror_is_fetched_in_ranges(tmp_path):
    files = content()
    with Mirror(files) as mirror:
        counters = fetcher(tmp_path / "to", manifest_of(files), [http(mirror)]).run()
    same(tmp_path / "to", files)
    assert counters["refetched_bytes"] == 0
    assert sum(mirror.sent.values()) == sum(map(len, files.values()))
    assert sum("Range" in headers for dummy, headers in mirror.requests) > len(files)


def test_one_large_file_is_fetched_by_several_connections(tmp_path):
    files = {"one.bin": noise("one", 3 << 20)}
    with Mirror(files, delay=0.002) as mirror:
        run = fetcher(tmp_path / "to", manifest_of(files), [http(mirror)], parallel=4, chunk=1 << 18)
        seen = []
        real = run._lane

        def lane(job, first, last, view):
            seen.append(job.lanes)
            return real(job, first, last, view)

        run._lane = lane
        run.run()
    same(tmp_path / "to", files)
    assert max(seen) == 4


@pytest.mark.parametrize("fault", bad_mirror.FAULTS)
def test_each_fault_is_survived(tmp_path, fault):
    files = content(4)
    # A whole file in answer to the first range is no loss; the second one must be worth a test.
    turn = 0 if fault == "ignore_range" else 1
    last = 3 if fault in ("corrupt", "slow_down_date", "stall") else 1000

    def plan(path, number, request):
        return fault if number % 2 == turn and number <= last else None

    with Mirror(files, plan=plan, stall=8.0) as mirror:
        run = fetcher(tmp_path / "to", manifest_of(files), [http(mirror, timeout=0.7)], stall_timeout=0.7)
        run.run()
    same(tmp_path / "to", files)
    assert mirror.log[fault] > 0 and mirror.log["good"] > 0
    code = {
        "cut": "cut",
        "short": "cut",
        "ignore_range": "range_ignored",
        "changed": "source_changed",
        "html": "not_the_file",
        "slow_down": "slow_down",
        "slow_down_date": "slow_down",
        "stall": "download_stalled",
        "wrong_length": "wrong_length",
        "server_error": "server_error",
        "drop": "connection",
        "wrong_range": "wrong_range",
        "compressed": "not_the_file",
        "corrupt": "checksum_mismatch",
    }[fault]
    assert run.events.counts.get(code), run.events.counts


def test_a_cut_costs_no_byte(tmp_path):
    files = content(3, 1 << 20)
    with Mirror(files, plan=lambda path, number, request: "cut" if number % 2 else None) as mirror:
        counters = fetcher(tmp_path / "to", manifest_of(files), [http(mirror)], parallel=2).run()
    same(tmp_path / "to", files)
    assert mirror.log["cut"] >= 3
    assert counters["refetched_bytes"] == 0


def test_a_server_without_ranges_is_read_in_one_go(tmp_path):
    files = content(2, 1 << 20)
    with Mirror(files, plan=lambda path, number, request: "ignore_range") as mirror:
        fetcher(tmp_path / "to", manifest_of(files), [http(mirror)]).run()
    same(tmp_path / "to", files)
    assert max(mirror.numbers[("/" + name)] for name in files) <= 4


def test_a_server_whose_etag_always_changes_is_judged_by_the_hash(tmp_path):
    files = content(2)
    with Mirror(files, plan=lambda path, number, request: "changed") as mirror:
        fetcher(tmp_path / "to", manifest_of(files), [http(mirror)]).run()
    same(tmp_path / "to", files)
    assert mirror.log["good"] == 0


def test_versions_are_never_mixed_without_a_hash(tmp_path):
    old, new = {"x.bin": noise("old", 1 << 20)}, {"x.bin": noise("new", 1 << 20)}
    with Mirror(dict(old)) as mirror:
        mirror.etag = lambda path: '"%s"' % hashlib.sha256(mirror.files[path]).hexdigest()[:8]

        def plan(path, number, request):
            if number == 4:
                mirror.files = new
            return None

        mirror.plan = plan
        wanted = {"x.bin": {"size": 1 << 20, "sha256": None}}
        run = fetcher(tmp_path / "to", wanted, [http(mirror)], parallel=1)
        run.run()
    assert (tmp_path / "to/x.bin").read_bytes() == new["x.bin"]
    assert run.events.counts["source_changed"] == 1


def test_too_many_requests_wait_and_do_not_count_as_failures(tmp_path):
    files = content(1)
    with Mirror(files, plan=lambda path, number, request: "slow_down" if number < 12 else None) as mirror:
        run = fetcher(tmp_path / "to", manifest_of(files), [http(mirror)], retries=2, parallel=1)
        run.run()
    same(tmp_path / "to", files)
    assert run.events.counts["slow_down"] >= 11


@pytest.mark.parametrize(
    "status, code, requests",
    [(404, "not_found", 1), (401, "unauthorized", 1), (403, "unauthorized", 1), (400, "unexpected_status", 1), (502, "server_error", 4)],
)
def test_what_cannot_help_is_not_tried_again(tmp_path, status, code, requests):
    files = {"x.bin": noise("x", 1000)}
    with Mirror(files) as mirror:
        mirror.routes["/x.bin"] = lambda request: mirror.plain(request, status, b"no")
        run = fetcher(tmp_path / "to", manifest_of(files), [http(mirror)], retries=3, parallel=1)
        with pytest.raises(staging_fetch.FetchFailed) as caught:
            run.run()
    assert caught.value.code == code and mirror.numbers["/x.bin"] == requests


def test_what_one_source_began_the_next_one_ends(tmp_path):
    files = {"x.bin": noise("x", 1 << 20)}

    def plan(path, number, request):
        return "cut" if number == 1 else "server_error"

    with Mirror(files, plan=plan, cut_at=700000) as first, Mirror(files) as second:
        run = fetcher(
            tmp_path / "to", manifest_of(files), [http(first), http(second)], parallel=1, retries=2, chunk=1 << 22
        )
        counters = run.run()
    same(tmp_path / "to", files)
    assert counters["refetched_bytes"] < (1 << 22) // 8
    assert sum(second.sent.values()) < len(files["x.bin"])


def test_the_stall_of_a_hub_is_ended_and_named(tmp_path):
    """The transfer that hangs near its end."""
    files = {"x.bin": noise("x", 1 << 20)}
    with Mirror(files, plan=lambda path, number, request: "stall" if number == 1 else None, cut_at=int(0.97 * (1 << 20)), stall=20) as mirror:
        run = fetcher(tmp_path / "to", manifest_of(files), [http(mirror, timeout=0.6)], parallel=1, chunk=1 << 23, stall_timeout=0.6)
        start = time.monotonic()
        run.run()
    same(tmp_path / "to", files)
    assert time.monotonic() - start < 10
    stalled = [e for e in run.events.items if e["id"] == "download_stalled"]
    assert len(stalled) == 1 and stalled[0]["what"].startswith("download_stalled at ") and " of 1048576 bytes" in stalled[0]["what"]


def test_a_trickle_is_a_stall(tmp_path):
    files = {"x.bin": noise("x", 200000)}
    with Mirror(files) as mirror:

        def trickle(request):
            if mirror.numbers["/x.bin"] > 1:
                return mirror.serve(request, "x.bin", files["x.bin"], None, 2)
            request.send_response(200)
            request.send_header("Content-Length", "200000")
            request.end_headers()
            for index in range(200):
                request.wfile.write(files["x.bin"][index:index + 1])
                request.wfile.flush()
                if mirror.closing.wait(0.05):
                    break

        mirror.routes["/x.bin"] = trickle
        run = fetcher(tmp_path / "to", manifest_of(files), [http(mirror)], parallel=1, stall_timeout=0.5, low_speed=1000, chunk=1 << 22)
        run.run()
    same(tmp_path / "to", files)
    assert run.events.counts == {"download_stalled": 1} or run.events.counts == {"download_stalled": 1, "range_ignored": 1}


def test_the_rate_is_kept(tmp_path):
    files = content(2, 1 << 20)
    with Mirror(files) as mirror:
        start = time.monotonic()
        fetcher(tmp_path / "to", manifest_of(files), [http(mirror)], rate=2 << 20).run()
        elapsed = time.monotonic() - start
    # Two and a bit MiB at two MiB a second, of which half a second may be saved up.
    assert 0.4 < elapsed < 5


def test_a_stop_is_obeyed_and_the_next_run_goes_on(tmp_path):
    files = content(3, 2 << 20)
    with Mirror(files, delay=0.01) as mirror:
        stop = threading.Event()
        run = fetcher(tmp_path / "to", manifest_of(files), [http(mirror)], stop=stop)
        threading.Timer(0.3, stop.set).start()
        with pytest.raises(staging_fetch.Interrupted):
            run.run()
        mirror.delay = 0
        again = fetcher(tmp_path / "to", manifest_of(files), [http(mirror)])
        counters = again.run()
    same(tmp_path / "to", files)
    assert counters["resumed_bytes"] > 0
    assert sum(mirror.sent.values()) <= sum(map(len, files.values())) + 4 * CHUNK + (1 << 19)


def test_after_a_reboot_only_what_was_on_the_disk_counts(tmp_path):
    files = {"x.bin": noise("x", 1 << 20)}
    with Mirror(files, plan=lambda path, number, request: "server_error" if number > 8 else None) as mirror:
        run = fetcher(tmp_path / "to", manifest_of(files), [http(mirror)], parallel=1, retries=1)
        with pytest.raises(staging_fetch.FetchFailed):
            run.run()
        mirror.plan = lambda path, number, request: None
        state_path = next(p for p in (tmp_path / "to" / manifests.WORK_DIR).glob("*.json") if p.name not in ("record.json", "progress.json"))
        state = json.loads(state_path.read_text())
        assert state["boot"] == staging_fetch.boot_id() and state["durable"] == state["done"]  # the end of a run flushes
        # The machine was lost before the last flush: nothing was known to be on the disk.
        none = base64.b64encode(bytes(len(base64.b64decode(state["done"])))).decode()
        state.update(boot="another", durable=none)
        state_path.write_text(json.dumps(state))
        with open(tmp_path / "to" / manifests.WORK_DIR / (state_path.stem + ".part"), "r+b") as stream:
            stream.write(bytes(1 << 16))  # what the disk really had
        counters = fetcher(tmp_path / "to", manifest_of(files), [http(mirror)], parallel=1).run()
    same(tmp_path / "to", files)
    assert counters["resumed_bytes"] == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: "not json",
        lambda state: "[]",
        lambda state: json.dumps(dict(state, done="%%%")),
        lambda state: json.dumps(dict(state, done="AAAA")),
        lambda state: json.dumps(dict(state, piece=0)),
        lambda state: json.dumps(dict(state, piece="x")),
        lambda state: json.dumps(dict(state, size=5)),
        lambda state: json.dumps({k: v for k, v in state.items() if k != "done"}),
    ],
)
def test_a_damaged_state_is_not_believed(tmp_path, damage):
    files = {"x.bin": noise("x", 1 << 20)}
    with Mirror(files, plan=lambda path, number, request: "server_error" if number > 5 else None) as mirror:
        with pytest.raises(staging_fetch.FetchFailed):
            fetcher(tmp_path / "to", manifest_of(files), [http(mirror)], parallel=1, retries=1).run()
        mirror.plan = lambda path, number, request: None
        path = next(p for p in (tmp_path / "to" / manifests.WORK_DIR).glob("*.json") if p.name not in ("record.json", "progress.json"))
        path.write_text(damage(json.loads(path.read_text())))
        fetcher(tmp_path / "to", manifest_of(files), [http(mirror)], parallel=1).run()
    same(tmp_path / "to", files)


# -- token, redirects, proxy ----------------------------------------------------------------------


def test_the_token_goes_to_the_first_host_only(tmp_path):
    files = content(2)
    with Mirror(files) as storage, Mirror({}, token="secret-token") as front:
        for name in files:

            def go(request, name=name):
                assert request.headers["Authorization"] == "Bearer secret-token"
                # Another name of the same machine is another host.
                front.plain(request, 302, b"", extra={"Location": storage.url.replace("127.0.0.1", "localhost") + "/" + name + "?X-Signature=abc"})

            front.routes["/" + name] = go
        run = fetcher(tmp_path / "to", manifest_of(files), [http(front, token="secret-token")])
        run.run()
    same(tmp_path / "to", files)
    assert storage.requests and all("Authorization" not in headers for dummy, headers in storage.requests)


def test_an_expired_signature_is_asked_for_again(tmp_path):
    files = {"x.bin": noise("x", 1 << 20)}
    with Mirror(files) as storage, Mirror({}) as front:
        signs = {"now": 0}

        def go(request):
            signs["now"] += 1
            front.plain(request, 302, b"", extra={"Location": "%s/x.bin?sign=%d" % (storage.url, signs["now"])})

        def check(request):
            if request.path.endswith("sign=1") and storage.numbers["/x.bin"] > 3:
                return storage.plain(request, 403, b"expired")
            return storage.serve(request, "x.bin", files["x.bin"], None, 0)

        front.routes["/x.bin"] = go
        storage.routes["/x.bin"] = check
        fetcher(tmp_path / "to", manifest_of(files), [http(front)], parallel=1).run()
    same(tmp_path / "to", files)
    assert signs["now"] == 2


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://x/y", ""])
def test_a_redirect_to_something_odd_is_refused(tmp_path, location):
    files = {"x.bin": b"12345"}
    with Mirror({}) as front:
        front.routes["/x.bin"] = lambda request: front.plain(request, 302, b"", extra={"Location": location} if location else {})
        run = fetcher(tmp_path / "to", manifest_of(files), [http(front)], retries=1)
        with pytest.raises(staging_fetch.FetchFailed) as caught:
            run.run()
    assert caught.value.code == "redirect"


def test_a_circle_of_redirects_ends(tmp_path):
    with Mirror({}) as front:
        front.routes["/x.bin"] = lambda request: front.plain(request, 302, b"", extra={"Location": "/x.bin"})
        run = fetcher(tmp_path / "to", manifest_of({"x.bin": b"12345"}), [http(front)])
        with pytest.raises(staging_fetch.FetchFailed) as caught:
            run.run()
    assert caught.value.code == "redirect" and front.numbers["/x.bin"] == staging_sources.MAX_REDIRECTS


def test_the_proxy_is_used_and_the_environment_is_not(tmp_path, monkeypatch):
    files = {"x.bin": noise("x", 1000)}
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with Mirror(files) as mirror:
        fetcher(tmp_path / "direct", manifest_of(files), [http(mirror)]).run()
        proxy = "http://user:pa%20ss@127.0.0.1:" + mirror.url.rpartition(":")[2]
        source = staging_sources.HttpSource("http://mirror.invalid", proxy=proxy, timeout=2.0)
        fetcher(tmp_path / "proxied", manifest_of(files), [source]).run()
        headers = mirror.requests[-1][1]
    same(tmp_path / "proxied", files)
    assert headers["Host"] == "mirror.invalid" and headers["Proxy-Authorization"].startswith("Basic ")


def test_addresses_are_shown_without_their_secrets():
    assert staging_sources.shown("https://user:pw@host:8443/a/b?token=x#y") == "https://host:8443/a/b"
    assert "x" not in staging_sources.shown("http://[bad?token=x")


@pytest.mark.parametrize("url", ["ftp://x/", "http://", "x", "http://u:p@x/", "http://x:port/", "http://[::1"])
def test_an_address_that_cannot_be_used_is_refused(url):
    with pytest.raises(staging_sources.SourceError) as caught:
        staging_sources.HttpSource(url)
    assert caught.value.code == "source_invalid"


def test_a_token_file_must_be_private(tmp_path):
    path = tmp_path / "token"
    path.write_text("abc\n")
    os.chmod(path, 0o644)
    with pytest.raises(staging_sources.SourceError):
        staging_sources.read_token_file(str(path))
    os.chmod(path, 0o600)
    assert staging_sources.read_token_file(str(path)) == "abc"
    for bad in ("", "a b", "a\r\nX-Header: 1", "ä"):
        path.write_text(bad)
        with pytest.raises(staging_sources.SourceError) as caught:
            staging_sources.read_token_file(str(path))
        assert bad not in str(caught.value) or not bad
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(staging_sources.SourceError):
        staging_sources.read_token_file(str(tmp_path / "pipe"))


@pytest.mark.parametrize(
    "value, seconds",
    [("3", 3.0), ("0", 0.0), ("999999", 3600.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0), ("soon", None), ("", None), (None, None), ("-1", None)],
)
def test_retry_after_in_both_forms(value, seconds):
    assert staging_sources.retry_after(value) == seconds


# -- the hub --------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def hub_listing(files, large=1000):
    items = [{"type": "directory", "oid": "0" * 40, "path": "sub"}]
    for path, data in sorted(files.items()):
        item = {"type": "file", "size": len(data), "path": path}
        if len(data) > large:
            item.update(oid="f" * 40, lfs={"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130})
        else:
            digest = manifests.git_blob(len(data))
            digest.update(data)
            item["oid"] = digest.hexdigest()
        items.append(item)
    return items


def serve_hub(mirror, files, pages=2):
    items = hub_listing(files)
    base = "/api/models/owner/name/tree/" + COMMIT

    def page(request):
        number = int(request.path.rpartition("cursor=")[2]) if "cursor=" in request.path else 0
        step = -(-len(items) // pages)
        extra = {}
        if (number + 1) * step < len(items):
            extra["Link"] = '<%s%s?recursive=true&cursor=%d>; rel="next"' % (mirror.url.rsplit("/owner", 1)[0], base, number + 1)
        mirror.plain(request, 200, json.dumps(items[number * step:(number + 1) * step]).encode(), "application/json", extra)

    mirror.routes[base] = page


def test_a_commit_of_the_hub_is_listed_in_pages_and_fetched(tmp_path):
    files = content(3)
    with Mirror(files, prefix="/owner/name/resolve/%s/" % COMMIT) as mirror:
        endpoint = "http://127.0.0.1:%d" % mirror.server.server_port
        mirror.url = endpoint
        serve_hub(mirror, files)
        source = staging_sources.HubSource("owner/name", COMMIT, endpoint, timeout=2.0)
        listed = source.listing()
        assert set(listed) == set(files) and listed["part-0.bin"]["sha256"] and listed["sub/small.json"].get("git_sha1")
        run = fetcher(tmp_path / "to", listed, [source])
        run.run()
        # A corrupt small file is found through git's name for it.
        (tmp_path / "to/sub/small.json").write_bytes(b'{"a": 2}')
        again = fetcher(tmp_path / "to", listed, [source])
        assert again.run()["fetched_files"] == 1 and again.events.counts == {"checksum_mismatch": 1}
    same(tmp_path / "to", files)


@pytest.mark.parametrize("revision", ["main", "", None, COMMIT[:12], COMMIT.upper()])
def test_the_hub_wants_a_commit(revision):
    with pytest.raises(staging_sources.SourceError) as caught:
        staging_sources.HubSource("owner/name", revision, "https://hub.example.org")
    assert caught.value.code == "revision_not_pinned"


# -- rsync, and any child that does the work ------------------------------------------------------

FAKE_RSYNC = """#!{python}
import os, sys, time
arguments = sys.argv[1:]
source = arguments[arguments.index("--") + 1]
target = arguments[-1]
if "--list-only" in arguments:
    print("-rw-r--r-- %14d 2026/01/01 00:00:00 x" % os.path.getsize(source))
    sys.exit(0)
with open({log!r}, "a") as log:
    log.write(repr((arguments, os.environ.get("STAGING_PLAIN"))) + "\\n")
data = open(source, "rb").read()
start = os.path.getsize(target) if "--append" in arguments and os.path.exists(target) else 0
out = open(target, "r+b" if os.path.exists(target) else "wb")
out.seek(start)
mode = {mode!r}
if mode == "stall" and not os.environ.get("STAGING_PLAIN"):
    out.write(data[start:int(len(data) * 0.97)])
    out.flush()
    time.sleep(300)
if mode == "slow":
    for position in range(start, len(data), 20000):
        out.write(data[position:position + 20000])
        out.flush()
        time.sleep(0.05)
    sys.exit(0)
if mode == "fail":
    sys.stderr.write("rsync: connection unexpectedly closed\\n")
    sys.exit(12)
if mode == "corrupt" and not os.environ.get("STAGING_PLAIN"):
    data = bytes(len(data))
out.write(data[start:])
out.truncate()
"""


def fake_rsync(tmp_path, mode):
    program = tmp_path / ("rsync-" + mode)
    program.write_text(FAKE_RSYNC.format(python=sys.executable, log=str(tmp_path / "log"), mode=mode))
    program.chmod(0o755)
    return str(program)


def calls(tmp_path):
    return [eval(line) for line in (tmp_path / "log").read_text().splitlines()]  # pylint: disable=eval-used


@pytest.mark.parametrize("case", [pytest.param("stall", id="MDL-04")])
def test_a_child_that_hangs_near_the_end(tmp_path, case):
    files = {"x.bin": noise("x", 1 << 20)}
    tree(tmp_path / "from", files)
    source = staging_fetch.RsyncSource(str(tmp_path / "from"), program=fake_rsync(tmp_path, case))
    run = fetcher(tmp_path / "to", manifest_of(files), [source], stall_timeout=1.0)
    start = time.monotonic()
    run.run()
    same(tmp_path / "to", files)
    assert time.monotonic() - start < 20
    expected = "download_stalled at %d of %d bytes" % (int(0.97 * (1 << 20)), 1 << 20)
    assert any(e["what"].startswith(expected) for e in run.events.items), run.events.items
    # Once more, with the plain switch in the child's environment from its start.
    first, second = calls(tmp_path)
    assert first[1] is None and "--append" in first[0]
    assert second[1] == "1" and "--append" not in second[0] and "--whole-file" in second[0]


def test_rsync_resumes_and_is_not_believed(tmp_path):
    files = content(3)
    tree(tmp_path / "from", files)
    source = staging_fetch.RsyncSource(str(tmp_path / "from"), program=fake_rsync(tmp_path, "good"))
    sizeless = manifest_of(files, sizes=False)
    fetcher(tmp_path / "to", sizeless, [source]).run()
    same(tmp_path / "to", files)
    source = staging_fetch.RsyncSource(str(tmp_path / "from"), program=fake_rsync(tmp_path, "corrupt"))
    run = fetcher(tmp_path / "to2", manifest_of(files), [source])
    run.run()
    same(tmp_path / "to2", files)
    assert run.events.counts["checksum_mismatch"] >= 3


def test_rsync_that_was_stopped_goes_on_where_it_was(tmp_path):
    files = {"x.bin": noise("x", 1 << 20)}
    tree(tmp_path / "from", files)
    slow = staging_fetch.RsyncSource(str(tmp_path / "from"), program=fake_rsync(tmp_path, "slow"))
    stop = threading.Event()
    run = fetcher(tmp_path / "to", manifest_of(files), [slow], stop=stop)
    threading.Timer(1.2, stop.set).start()
    with pytest.raises(staging_fetch.Interrupted):
        run.run()
    good = staging_fetch.RsyncSource(str(tmp_path / "from"), program=fake_rsync(tmp_path, "good"))
    counters = fetcher(tmp_path / "to", manifest_of(files), [good]).run()
    same(tmp_path / "to", files)
    assert counters["resumed_bytes"] > 0 and counters["refetched_bytes"] < CHUNK
    # A source of another kind goes on with it as well.
    stop = threading.Event()
    threading.Timer(1.2, stop.set).start()
    with pytest.raises(staging_fetch.Interrupted):
        fetcher(tmp_path / "to2", manifest_of(files), [slow], stop=stop).run()
    counters = fetcher(tmp_path / "to2", manifest_of(files), [staging_sources.DirectorySource(str(tmp_path / "from"))]).run()
    same(tmp_path / "to2", files)
    assert counters["resumed_bytes"] > 0 and counters["refetched_bytes"] < CHUNK


def test_an_orphaned_child_keeps_others_away_from_its_part(tmp_path):
    files = {"x.bin": noise("x", 600000)}
    tree(tmp_path / "from", files)
    work = tmp_path / "to" / manifests.WORK_DIR
    work.mkdir(parents=True)
    run = fetcher(tmp_path / "to", manifest_of(files), [])
    run.lock_descriptor = os.open(work / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(run.lock_descriptor, fcntl.LOCK_EX)
    source = staging_fetch.RsyncSource(str(tmp_path / "from"), program=fake_rsync(tmp_path, "slow"))
    job = staging_fetch.Job(run, "x.bin", manifest_of(files)["x.bin"])
    job.open()
    os.ftruncate(job.descriptor, 0)  # as _rsync_one does: a child appends to what is there
    thread = threading.Thread(target=run._rsync_child, args=(source, job, 0, False))
    thread.start()
    while not (tmp_path / "log").exists():
        time.sleep(0.02)
    os.close(run.lock_descriptor)  # as a kill of the parent does; the child holds its copy
    with pytest.raises(staging_fetch.FetchFailed) as caught:
        fetcher(tmp_path / "to", manifest_of(files), [source]).run()
    assert caught.value.code == "busy"
    thread.join()
    fetcher(tmp_path / "to", manifest_of(files), [source]).run()
    same(tmp_path / "to", files)


def test_a_failing_rsync_gives_its_last_words_and_the_next_source_is_asked(tmp_path):
    files = {"x.bin": noise("x", 1 << 20)}
    tree(tmp_path / "from", files)
    broken = staging_fetch.RsyncSource(str(tmp_path / "from"), program=fake_rsync(tmp_path, "fail"))
    missing = staging_fetch.RsyncSource(str(tmp_path / "from"), program=str(tmp_path / "no-rsync"))
    with pytest.raises(staging_fetch.FetchFailed) as caught:
        fetcher(tmp_path / "to", manifest_of(files), [broken]).run()
    assert caught.value.code == "rsync_failed" and "connection unexpectedly closed" in str(caught.value)
    with pytest.raises(staging_fetch.FetchFailed) as caught:
        fetcher(tmp_path / "to", manifest_of(files), [missing]).run()
    assert caught.value.code == "rsync_missing"
    good = staging_sources.DirectorySource(str(tmp_path / "from"))
    fetcher(tmp_path / "to", manifest_of(files), [missing, broken, good]).run()
    same(tmp_path / "to", files)


@pytest.mark.parametrize("url", ["", "-e sh", "a\nb", None])
def test_an_rsync_source_cannot_smuggle_options(url):
    with pytest.raises(staging_sources.SourceError):
        staging_fetch.RsyncSource(url)


# -- the whole request ----------------------------------------------------------------------------


def params(dest, sources, **options):
    defaults = {
        "dest": str(dest), "name": "m", "revision": "r", "sources": sources, "manifest": None, "exclude": ["SHA256SUMS", "*.md"], "deep_verify": False,
        "parallel": 2, "rate": "", "chunk": "64K", "retries": 3, "stall_timeout": 5, "reserve": "0", "token": None, "token_file": None,
        "ca_bundle": None, "proxy": None, "owner": None, "group": None, "expect": {}, "check": False, "status_path": None,
    }
    return dict(defaults, **options)


def stage(dest, sources, **options):
    return staging.Staging(params(dest, sources, **options))


def test_the_marker_comes_last_and_the_work_directory_goes(tmp_path):
    files = content()
    tree(tmp_path / "from", files)
    answer = stage(tmp_path / "to", [{"type": "directory", "path": str(tmp_path / "from")}]).run()
    assert answer["changed"] and answer["fetched_files"] == len(files)
    marker = json.loads((tmp_path / "to" / manifests.MARKER).read_text())
    assert set(marker["files"]) == set(files) and marker["verified"] == "source"
    entry = marker["files"]["part-0.bin"]
    status = (tmp_path / "to/part-0.bin").stat()
    assert entry == {"size": status.st_size, "mtime": status.st_mtime_ns, "inode": status.st_ino, "sha256": hashlib.sha256(files["part-0.bin"]).hexdigest()}
    assert not (tmp_path / "to" / manifests.WORK_DIR).exists()
    plan = stage(tmp_path / "to", []).plan()
    assert plan["complete"] and plan["bytes_to_fetch"] == 0 and plan["manifest_from"] == "marker"


def test_the_service_user_may_enter_and_read_it_whatever_the_umask_is(tmp_path, umask_077):
    tree(tmp_path / "from", content(1))
    stage(tmp_path / "root/models/m", [{"type": "directory", "path": str(tmp_path / "from")}], status_path=str(tmp_path / "status.json")).run()
    for name in ("root", "root/models", "root/models/m"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o755, name
    for name in ("root/models/m/" + manifests.MARKER, "status.json"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o644, name


def test_sums_beside_the_files_prove_them(tmp_path):
    files = content(2)
    tree(tmp_path / "from", dict(files, SHA256SUMS=sums_of(files)))
    answer = stage(tmp_path / "to", [{"type": "directory", "path": str(tmp_path / "from")}]).run()
    assert answer["changed"] and stage(tmp_path / "to", []).plan()["verified"] == "manifest"
    assert not (tmp_path / "to/SHA256SUMS").exists()


def test_a_mirror_with_sums_needs_no_manifest(tmp_path):
    files = content(2)
    with Mirror(dict(files, SHA256SUMS=sums_of(files))) as mirror:
        source = [{"type": "http", "url": mirror.url}]
        plan = stage(tmp_path / "to", source).plan()
        assert plan["bytes_to_fetch"] == sum(map(len, files.values())) and not (tmp_path / "to").exists()
        stage(tmp_path / "to", source).run()
    for path, data in files.items():
        assert (tmp_path / "to" / path).read_bytes() == data


@pytest.mark.parametrize("case", [pytest.param("zero", id="MDL-10")])
def test_a_marker_is_not_trusted(tmp_path, case):
    """Three shards of no byte beside a marker that says done."""
    files = content(15)
    tree(tmp_path / "from", files)
    source = [{"type": "directory", "path": str(tmp_path / "from")}]
    stage(tmp_path / "to", source).run()
    (tmp_path / "to/.staged").write_text("done")
    emptied = ["part-3.bin", "part-9.bin", "part-14.bin"]
    for name in emptied:
        os.truncate(tmp_path / "to" / name, 0)
    request = stage(tmp_path / "to", source)
    plan = request.plan()
    assert sorted(plan["files_to_fetch"]) == sorted(emptied) and not plan["complete"]
    assert request.events.counts == {"zero_byte_shards": 3}
    second = stage(tmp_path / "to", source).run()
    assert second["changed"] and second["fetched_files"] == 3
    assert second["fetched_bytes"] == sum(len(files[n]) for n in emptied)
    third = stage(tmp_path / "to", source)
    assert third.plan()["complete"]


def test_an_unfinished_transfer_keeps_its_manifest(tmp_path):
    """The source gets another file in between: what was begun is ended, not mixed."""
    files = {"a.bin": noise("a", 500000), "b.bin": noise("b", 500000)}

    def plan(path, number, request):
        return "server_error" if path == "b.bin" and number > 1 else None

    with Mirror(dict(files, SHA256SUMS=sums_of(files)), plan=plan) as mirror:
        source = [{"type": "http", "url": mirror.url}]
        with pytest.raises(staging.StagingError) as caught:
            stage(tmp_path / "to", source, retries=1).run()
        assert caught.value.code == "server_error" and not (tmp_path / "to" / manifests.MARKER).exists()
        newer = dict(files, **{"b.bin": noise("newer", 500000)})
        mirror.plan = lambda path, number, request: None
        mirror.files = dict(newer, SHA256SUMS=sums_of(newer))
        with pytest.raises(staging.StagingError) as caught:
            stage(tmp_path / "to", source, retries=1).run()
        assert caught.value.code == "checksum_mismatch" and not (tmp_path / "to" / manifests.MARKER).exists()
        mirror.files = dict(files, SHA256SUMS=sums_of(files))
        answer = stage(tmp_path / "to", source).run()
    assert answer["fetched_files"] == 1 and (tmp_path / "to/b.bin").read_bytes() == files["b.bin"]


def test_no_source_and_nothing_there(tmp_path):
    for sources, code in (([], "no_source"), ([{"type": "directory", "path": str(tmp_path / "no")}], "not_found")):
        with pytest.raises(staging.StagingError) as caught:
            stage(tmp_path / "to", sources).plan()
        assert caught.value.code == code and "model_staging_sources" in str(caught.value)
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "link"):
        with pytest.raises(staging.StagingError) as caught:
            stage(tmp_path / name, [])
        assert caught.value.code == "dest_invalid"


@pytest.mark.parametrize(
    "options, code",
    [
        ({"rate": "fast"}, "option_invalid"),
        ({"chunk": "1"}, "option_invalid"),
        ({"manifest": "nonsense"}, "manifest_invalid"),
        ({"manifest": "{}"}, "manifest_invalid"),
        ({"owner": "no-such-user-here"}, "owner_unknown"),
        ({"token": "a b"}, "token_invalid"),
        ({"token_file": "/nonexistent"}, "token_file"),
        ({"sources": [{"type": "hub", "repository": "a/b", "endpoint": "https://x"}]}, "revision_not_pinned"),
        ({"sources": [{"type": "hub", "repository": "ab", "endpoint": "https://x"}]}, "source_invalid"),
        ({"sources": [{"type": "http", "url": "gopher://x"}]}, "source_invalid"),
        ({"sources": [{"type": "http", "url": "https://x"}], "ca_bundle": "/nonexistent"}, "ca_bundle"),
        ({"sources": [{"type": "carrier pigeon"}]}, "source_invalid"),
        ({"sources": [{"type": "directory"}]}, "source_invalid"),
    ],
)
def test_a_bad_request_is_refused_before_anything_happens(tmp_path, options, code):
    with pytest.raises(staging.StagingError) as caught:
        stage(tmp_path / "to", options.pop("sources", [{"type": "directory", "path": str(tmp_path)}]), **options).plan()
    assert caught.value.code == code
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    "text, size", [("", 0), (None, 0), ("5", 5), (7, 7), ("200M", 200 << 20), ("1.5GiB", 3 << 29), ("64MiB/s", 64 << 20), ("2k", 2048), (" 1 T ", 1 << 40)]
)
def test_sizes_are_written_as_people_write_them(text, size):
    assert staging.parse_size(text) == size


def test_the_status_file_tells_how_far_it_is(tmp_path):
    files = content(2, 1 << 20)
    with Mirror(files, delay=0.15) as mirror:
        run = fetcher(tmp_path / "to", manifest_of(files), [http(mirror)], parallel=2, status_path=str(tmp_path / "status.json"))
        thread = threading.Thread(target=run.run)
        thread.start()
        seen = []
        while thread.is_alive():
            data = manifests.load_json(str(tmp_path / "status.json"))
            if data and data["phase"] == "fetch" and data["done_bytes"]:
                seen.append(data)
            time.sleep(0.05)
        thread.join()
    assert seen and seen[0]["total_bytes"] == sum(map(len, files.values()))
    assert 0 < seen[0]["percent"] <= 100 and seen[0]["rate"] > 0
    assert json.loads((tmp_path / "status.json").read_text())["percent"] == 100.0
