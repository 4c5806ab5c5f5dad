# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Is this directory a DeepSeek-V4 checkpoint that the engine can serve?

Read-only and without torch: files and links, config.json, the index against the shards both ways, the
header of every shard, names, dtypes and shapes against the configuration, tokenizer, chat template,
generation config, and whether the service user can read all of it. All problems are reported at once, as
findings with a stable id, and none as a traceback.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import pwd
import re
import stat

from ansible_collections.blackwell.dsv4.plugins.module_utils import dsv4_layout as layout
from ansible_collections.blackwell.dsv4.plugins.module_utils import staging_manifest as manifests
from ansible_collections.blackwell.dsv4.plugins.module_utils.safetensors_header import HeaderError, read_header, whole
from ansible_collections.blackwell.dsv4.plugins.module_utils.staging_hash import hash_many

ARCHITECTURE = "DeepseekV4ForCausalLM"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: Tokens that the chat encoding of V4 depends on.
TOKENS = {"<think>": 128821, "</think>": 128822, "｜DSML｜": 128825}
#: The first of V3's tool tokens; V4's tokenizer still carries them, which proves nothing about V4.
V3_TOOL_TOKEN = "<｜tool▁calls▁begin｜>"

_OF = re.compile(r"\A(.+)-(\d{5})-of-(\d{5})\.safetensors\Z")

HINTS = {
    "not_a_directory": "Give the directory that holds config.json and the shards.",
    "link_loop": "Replace the links by the files: copy with links followed (cp -L, rsync -L).",
    "dangling_links": "A hub cache was copied without its blobs. Copy with links followed (cp -L, rsync -L) or stage again.",
    "link_leaves_root": "Copy the file into the directory, or name the root where links may lead.",
    "odd_file": "Only regular files belong into a checkpoint.",
    "unreadable_file": "Check mode, owner and the medium; then stage again.",
    "zero_byte_shards": "The file was created and never filled. Stage again: exactly these files are fetched.",
    "empty_file": "The file was created and never filled. Stage again.",
    "config_missing": "This is no checkpoint directory, or its transfer never started.",
    "config_not_json": "config.json is broken. Stage again; a login page saved as a file looks like this.",
    "config_key_missing": "config.json is not that of a DeepSeek-V4 checkpoint. Stage it again from the source.",
    "config_value_invalid": "config.json is not that of a DeepSeek-V4 checkpoint. Stage it again from the source.",
    "config_compress_ratios": "The attention layout follows compress_ratios. Take config.json of the same revision as the shards.",
    "wrong_model": "The units serve DeepSeek-V4. Check the variables that name model and revision.",
    "unexpected_config": "The inventory expects another model. Correct the inventory or stage the right revision.",
    "index_missing": "Several shards need model.safetensors.index.json. Stage again.",
    "index_not_json": "The index is broken. Stage it again.",
    "index_invalid": "The index is broken. Stage it again.",
    "index_unsafe_path": "Do not use this checkpoint: its index points outside of its directory.",
    "index_does_not_match_files": "The index is of another split of the model; nothing is missing. Take the index that belongs to these shards.",
    "missing_shards": "Stage again: only what is missing is fetched. The engine would start without it and answer nonsense.",
    "no_shards": "There is no safetensors file. Stage the model.",
    "shard_not_in_index": "The engine ignores it. Remove it, or take the index that names it.",
    "shard_not_a_file": "A shard must be a regular file.",
    "truncated_shard": "The transfer ended early. Stage again: the file is fetched anew.",
    "shard_trailing_bytes": "The file is longer than its header says. Stage it again.",
    "header_length_invalid": "The file is no safetensors file, or its first bytes are corrupt. Stage it again.",
    "header_not_json": "The file is no safetensors file, or its header is corrupt. Stage it again.",
    "header_duplicate_tensor": "The header is corrupt. Stage the shard again.",
    "header_unknown_dtype": "The shard was written by something newer or is corrupt.",
    "header_bad_tensor": "The header is corrupt. Stage the shard again.",
    "header_bad_metadata": "The header is odd but its tensors can be used.",
    "header_size_mismatch": "The header is corrupt. Stage the shard again.",
    "header_overlap": "The header is corrupt. Stage the shard again.",
    "header_gap": "The header is corrupt. Stage the shard again.",
    "tensor_not_in_shard": "Index and shards are of different revisions. Stage both from one revision.",
    "tensor_not_in_index": "Index and shards are of different revisions. Stage both from one revision.",
    "tensor_in_two_shards": "The checkpoint holds two values for one tensor. Stage it again.",
    "total_size_mismatch": "Index and shards are of different revisions, or a shard is short.",
    "missing_tensors": "The shards are not those of this config.json, or not all of one revision.",
    "unexpected_tensors": "The engine ignores or rejects names that it does not know.",
    "wrong_shape": "The shard is of another model. Stage all files from one revision.",
    "wrong_dtype": "The shard is of another quantization of the model. Stage all files from one revision.",
    "experts_mixed": "Routed experts must be all fp4 or all fp8. Stage all files from one revision.",
    "experts_differ_from_config": "config.json says another type of routed experts than the shards hold.",
    "mtp_incomplete": "Speculation with MTP is off for this checkpoint. Stage the missing shard to use it.",
    "mtp_without_config": "The shards hold a draft head that config.json does not announce, so the engine does not load it.",
    "dspark_incomplete": "config.json announces a DSpark draft that the shards do not hold: the engine would pick the draft and fail.",
    "tokenizer_missing": "Stage tokenizer.json and tokenizer_config.json too.",
    "tokenizer_not_json": "The tokenizer is broken. Stage it again.",
    "tokenizer_wrong_token": "The tokenizer is of another model: thinking or tool calls would be inert. Stage it from the model's revision.",
    "tokenizer_vocabulary": "Tokenizer and config.json are of different models.",
    "tokenizer_config_not_json": "The file is broken. Stage it again.",
    "generation_config_missing": "The engine uses its own sampling defaults. Stage generation_config.json to have the model's.",
    "generation_config_not_json": "The file is broken. Stage it again.",
    "generation_config_tokens": "Generation would not stop at the model's end token. Stage the file from the model's revision.",
    "path_not_searchable": "Give the service user search permission on this directory (chmod o+x, or its group).",
    "permission_denied": "Give the service user read permission on these files.",
    "user_unknown": "Create the service user first, or name another.",
    "readability_not_checked": "Only root can test what another user may read. Run the module as root.",
    "checksum_mismatch": "The content differs from the manifest although size and header are right. Stage again: exactly these files are fetched.",
    "size_mismatch": "The size differs from the manifest. Stage again: exactly these files are fetched.",
    "manifest_file_missing": "The manifest lists files that are not there. Stage again.",
    "file_not_in_manifest": "The file is not part of the model's revision.",
    "content_not_compared": "Sizes and headers cannot see a corrupt byte. Ask for the deep verification to compare contents.",
}
WARNINGS = frozenset(
    (
        "shard_not_in_index",
        "header_bad_metadata",
        "unexpected_tensors",
        "mtp_incomplete",
        "mtp_without_config",
        "generation_config_missing",
        "readability_not_checked",
        "file_not_in_manifest",
        "odd_file",
    )
)
INFOS = frozenset(("content_not_compared",))


class Report:
    """Collects findings, one per id, each with all its files."""

    def __init__(self):
        self._by_id = {}

    def add(self, code, what, file="", severity=None, **details):
        """Note one problem; the same id again adds to the same finding."""
        severity = severity or ("warning" if code in WARNINGS else "info" if code in INFOS else "error")
        item = self._by_id.setdefault((code, severity), {"id": code, "severity": severity, "count": 0, "files": [], "texts": [], "details": []})
        item["count"] += 1
        if file and file not in item["files"] and len(item["files"]) < 200:
            item["files"].append(file)
        if len(item["texts"]) < 8:
            item["texts"].append("%s: %s" % (file, what) if file else what)
        if details and len(item["details"]) < 200:
            item["details"].append(dict(details, file=file) if file else details)

    def findings(self):
        """Findings as plain data, errors first."""
        order = {"error": 0, "warning": 1, "info": 2}
        result = []
        for item in sorted(self._by_id.values(), key=lambda i: order[i["severity"]]):
            text = "; ".join(item["texts"])
            if item["count"] > len(item["texts"]):
                text += " (and %d more)" % (item["count"] - len(item["texts"]))
            result.append(
                {
                    "id": item["id"],
                    "severity": item["severity"],
                    "file": item["files"][0] if item["files"] else "",
                    "files": item["files"],
                    "count": item["count"],
                    "what": text,
                    "hint": HINTS.get(item["id"], ""),
                    "details": item["details"],
                }
            )
        return result


def _reason(exc):
    return exc.strerror or str(exc)


def scan(path, report, allowed_roots=()):
    """List the files below a directory with links followed: C({relative path: status}). Our own state is left out."""
    root = os.path.realpath(path)
    roots = [root] + [os.path.realpath(r) for r in allowed_roots]
    files, links = {}, {}

    def visit(directory, relative, depth):
        try:
            with os.scandir(directory) as listing:
                entries = sorted(listing, key=lambda e: e.name)
        except OSError as exc:
            report.add("unreadable_file", _reason(exc), relative or ".")
            return
        for entry in entries:
            name = "%s/%s" % (relative, entry.name) if relative else entry.name
            if not relative and (entry.name == manifests.WORK_DIR or entry.name.startswith((manifests.MARKER, ".dsv4-"))):
                continue
            if entry.name in (".git", ".cache", ".huggingface") and not relative:
                continue
            try:
                if entry.is_symlink():
                    target = os.path.realpath(entry.path)
                    if not any(target == r or target.startswith(r.rstrip("/") + "/") for r in roots):
                        links[name] = target
                status = os.stat(entry.path)
            except OSError as exc:
                if exc.errno == errno.ELOOP:
                    report.add("link_loop", "the link leads in a circle", name)
                elif exc.errno == errno.ENOENT:
                    target = os.readlink(entry.path) if entry.is_symlink() else "?"
                    report.add("dangling_links", "-> %s, which is absent" % target[:200], name)
                else:
                    report.add("unreadable_file", _reason(exc), name)
                links.pop(name, None)
                continue
            if stat.S_ISDIR(status.st_mode):
                if entry.is_symlink() and (target == root or root.startswith(target.rstrip("/") + "/")):
                    report.add("link_loop", "the link leads back to a directory above it", name)
                    links.pop(name, None)
                elif depth < 8:
                    visit(entry.path, name, depth + 1)
            elif stat.S_ISREG(status.st_mode):
                files[name] = status
            else:
                report.add("odd_file", "neither file nor directory", name)

    visit(path, "", 0)
    for name, target in links.items():
        report.add("link_leaves_root", "-> %s, outside of the model's directory" % target[:200], name)
    return files


def _read_json(path, report, code, name, limit=manifests.MAX_TEXT):
    """A JSON object from a file, or None with a finding."""
    try:
        with open(path, "rb") as stream:
            raw = stream.read(limit + 1)
    except OSError as exc:
        report.add("unreadable_file", _reason(exc), name)
        return None
    if not raw:
        report.add("empty_file", "the file has no byte", name)
        return None
    if len(raw) > limit:
        report.add(code, "larger than %d bytes" % limit, name)
        return None
    try:
        data = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as exc:
        shown = raw[:60].decode("utf-8", "replace").strip()
        report.add(code, "not JSON (%s); it begins with %r" % (str(exc)[:80], shown), name)
        return None
    if not isinstance(data, dict):
        report.add(code, "JSON, but no object", name)
        return None
    return data


def _config(path, files, report, expect):
    """config.json judged; returns (config, usable for the layout)."""
    if "config.json" not in files:
        report.add("config_missing", "there is no config.json", "config.json")
        return None, False
    config = _read_json(os.path.join(path, "config.json"), report, "config_not_json", "config.json", 1 << 22)
    if config is None:
        return None, False
    architectures = config.get("architectures")
    known = isinstance(architectures, list) and ARCHITECTURE in architectures
    if not known:
        report.add("wrong_model", "architectures is %s, not [%s]" % (str(architectures)[:120], ARCHITECTURE), "config.json")
    for key, wanted in sorted((expect or {}).items()):
        if config.get(key) != wanted:
            report.add("unexpected_config", "%s is %s, expected %s" % (key, str(config.get(key))[:80], str(wanted)[:80]), "config.json")
    problems = layout.config_problems(config) if known else []
    for code, message in problems:
        report.add(code, message, "config.json")
    return config, known and not problems


def _numbering(names):
    """C({(stem, total): set of numbers}) of shard names that follow the usual pattern."""
    numbered = {}
    for name in names:
        match = _OF.match(name)
        if match:
            numbered.setdefault((match.group(1), int(match.group(3))), set()).add(int(match.group(2)))
    return numbered


def _index(path, files, report):
    """The weight map (or None) and the shards to read, with all disagreements between index and directory."""
    present = sorted(name for name in files if name.endswith(".safetensors") and "/" not in name)
    if INDEX not in files:
        if not present:
            report.add("no_shards", "no file ends in .safetensors")
        elif present != [SINGLE] and len(present) > 1:
            report.add("index_missing", "%d shards and no index" % len(present), INDEX)
        return None, None, present
    data = _read_json(os.path.join(path, INDEX), report, "index_not_json", INDEX)
    if data is None:
        return None, None, present
    weight_map = data.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        report.add("index_invalid", "weight_map is not a mapping of tensor to shard", INDEX)
        return None, None, present
    named = set(weight_map.values())
    for name in sorted(named):
        try:
            manifests.safe_path(name)
        except manifests.ManifestError as exc:
            report.add("index_unsafe_path", str(exc), INDEX)
            named.discard(name)
    absent = sorted(named - set(files))
    foreign = sorted(set(present) - named)
    wanted, found = _numbering(named), _numbering(foreign)
    complete = [key for key, numbers in found.items() if numbers == set(range(1, key[1] + 1))]
    if absent and complete and not set(complete) & set(wanted):
        (dummy, total) = complete[0]
        report.add(
            "index_does_not_match_files",
            "the index names %d shards, the directory holds a complete set of %d others" % (len(named), total),
            INDEX,
            indexed=len(named),
            present=len(present),
        )
        return None, None, present
    for name in absent:
        report.add("missing_shards", "the index names it, the directory lacks it", name)
    for name in foreign:
        report.add("shard_not_in_index", "the index does not name it", name)
    metadata = data.get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, total_size, sorted((named & set(files)) | set(foreign))


def _shards(path, names, files, report):
    """Headers of all shards: C({shard: Header})."""
    headers = {}
    for name in names:
        try:
            header = read_header(os.path.join(path, name))
        except HeaderError as exc:
            report.add(exc.code, str(exc), name, **exc.details)
            continue
        for code, message, details in header.problems:
            report.add(code, message, name, **details)
        headers[name] = header
    return headers


def _compare_index(weight_map, total_size, headers, report):
    """Index against headers, both ways."""
    indexed_total, counted = 0, {}
    for tensor, shard in weight_map.items():
        header = headers.get(shard)
        if header is None:
            continue
        if tensor not in header.tensors:
            if not header.problems:
                report.add("tensor_not_in_shard", "the index places %s there" % tensor[:120], shard)
            continue
        counted[shard] = counted.get(shard, 0) + 1
        entry = header.tensors[tensor]
        indexed_total += entry[3] - entry[2]
    named = set(weight_map.values())
    for shard, header in headers.items():
        if shard not in named or counted.get(shard, 0) == len(header.tensors):
            continue
        for tensor in header.tensors:
            if weight_map.get(tensor) != shard:
                report.add("tensor_not_in_index", "%s is there, the index does not say so" % tensor[:120], shard)
    complete = all(shard in headers and not headers[shard].problems for shard in named)
    if complete and whole(total_size) and total_size != indexed_total:
        report.add("total_size_mismatch", "total_size is %d, the tensors have %d bytes" % (total_size, indexed_total), INDEX)


def _tensors(weight_map, headers, report):
    """All tensors of the model: C({name: (dtype, shape, begin, end)})."""
    named = set(weight_map.values()) if weight_map else None
    tensors = {}
    for shard, header in headers.items():
        if named is not None and shard not in named:
            continue
        for name in tensors.keys() & header.tensors.keys():
            report.add("tensor_in_two_shards", "%s is in another shard too" % name[:120], shard)
        tensors.update(header.tensors)
    return tensors


def _places(weight_map, headers):
    """A function from the name of a tensor to its shard, for messages."""
    def place(name):
        if weight_map and name in weight_map:
            return weight_map[name]
        return next((shard for shard, header in headers.items() if name in header.tensors), "")

    return place


class _Layout:
    """Compares tensors with the layout that config.json asks for."""

    def __init__(self, config, tensors, place, complete, report):
        self.config, self.tensors, self.place, self.complete, self.report = config, tensors, place, complete, report
        self.seen = 0
        self.experts = {}
        self.mtp_missing = []

    def _missing(self, name, prefix):
        if prefix.startswith("mtp."):
            self.mtp_missing.append(name)
        elif self.complete:
            self.report.add("missing_tensors", "%s is in no shard" % name)

    def _judge(self, name, found, role, shape):
        dtype, actual = found[:2]
        self.seen += 1
        if dtype not in layout.ROLE_DTYPES[role]:
            self.report.add(
                "wrong_dtype", "%s is %s, expected %s" % (name, dtype, " or ".join(layout.ROLE_DTYPES[role])), self.place(name)
            )
        if actual != shape:
            self.report.add(
                "wrong_shape", "%s is %s, config.json asks for %s" % (name, list(actual), list(shape)), self.place(name)
            )

    def _linear(self, name, found, shape):
        """An fp8 weight needs its scale, a bf16 one has none."""
        scale_name = name[: -len(".weight")] + ".scale"
        scale = self.tensors.get(scale_name)
        if scale is not None:
            self._judge(scale_name, scale, "linear_scale", layout.fp8_scale_shape(self.config, shape))
        elif found[0] == "F8_E4M3" and self.complete:
            self.report.add("missing_tensors", "%s is fp8 and has no scale %s" % (name, scale_name), self.place(name))

    def part(self, prefix, template, with_experts):
        """One layer, one head, or the top level."""
        tensors = self.tensors
        for suffix, (role, shape) in template.items():
            name = prefix + suffix
            found = tensors.get(name)
            if found is None:
                self._missing(name, prefix)
                continue
            self._judge(name, found, role, shape)
            if role == "linear":
                self._linear(name, found, shape)
        if with_experts:
            self._experts(prefix)

    def _experts(self, prefix):
        tensors, config = self.tensors, self.config
        kinds = {}
        fixed = {kind: layout.expert_tensors(config, kind).items() for kind in ("fp4", "fp8")}
        for number in range(config["n_routed_experts"]):
            base = "%sffn.experts.%d." % (prefix, number)
            first = tensors.get(base + "w1.weight")
            if first is None:
                for suffix in ("w1.weight", "w1.scale", "w2.weight", "w2.scale", "w3.weight", "w3.scale"):
                    if base + suffix not in tensors:
                        self._missing(base + suffix, prefix)
                    else:
                        self.seen += 1
                continue
            kind = "fp4" if first[0] in layout.FP4_DTYPES else "fp8"
            kinds[kind] = kinds.get(kind, 0) + 1
            for suffix, (role, shape) in fixed[kind]:
                found = tensors.get(base + suffix)
                if found is None:
                    self._missing(base + suffix, prefix)
                elif found[1] == shape and found[0] in layout.ROLE_DTYPES[role]:
                    self.seen += 1
                else:
                    self._judge(base + suffix, found, role, shape)
        for kind, count in kinds.items():
            self.experts[kind] = self.experts.get(kind, 0) + count


def _speculation(config, tensors, check, report):
    """Which speculation the checkpoint can serve: none, mtp or dspark."""
    heads = sorted({name.split(".")[1] for name in tensors if name.startswith("mtp.")})
    if layout.has_dspark_keys(config):
        wanted = ("mtp.0.main_proj.weight",)
        markov = any(name.startswith("mtp.") and ".markov_head." in name for name in tensors)
        if all(name in tensors for name in wanted) and markov:
            return "dspark"
        report.add("dspark_incomplete", "config.json has dspark keys, the shards lack main_proj or markov_head", "config.json")
        return "none"
    announced = config.get("num_nextn_predict_layers", 0)
    if announced:
        if not check.mtp_missing:
            return "mtp"
        report.add(
            "mtp_incomplete",
            "config.json announces %d MTP head(s), %d of their tensors are absent (%s)"
            % (announced, len(check.mtp_missing), check.mtp_missing[0]),
        )
    elif heads:
        report.add("mtp_without_config", "tensors of %d MTP head(s), num_nextn_predict_layers is 0" % len(heads), "config.json")
    return "none"


def _experts_kind(config, check, report):
    """fp4 or fp8, from what the shards hold; config.json must agree."""
    if len(check.experts) > 1:
        report.add("experts_mixed", ", ".join("%d experts %s" % (n, k) for k, n in sorted(check.experts.items())))
        return "mixed"
    kind = next(iter(check.experts), "")
    said = config.get("expert_dtype")
    quantization = config.get("quantization_config")
    method = quantization.get("routed_experts_quant_method") if isinstance(quantization, dict) else None
    if kind and (said in ("fp4", "fp8") and said != kind or method == "mxfp4" and kind != "fp4"):
        report.add("experts_differ_from_config", "config.json says %s, the shards hold %s" % (method or said, kind), "config.json")
    return kind


def _tokenizer(path, files, config, report):
    """Token ids that thinking and tool calls depend on; returns facts."""
    facts = {"token_ids": {}, "v3_tool_tokens": False, "chat_template": False, "chat_template_from": ""}
    if "tokenizer.json" not in files:
        report.add("tokenizer_missing", "there is no tokenizer.json", "tokenizer.json")
    else:
        data = _read_json(os.path.join(path, "tokenizer.json"), report, "tokenizer_not_json", "tokenizer.json")
        if data is not None:
            ids = {}
            for item in data.get("added_tokens") if isinstance(data.get("added_tokens"), list) else ():
                if isinstance(item, dict) and isinstance(item.get("content"), str):
                    ids[item["content"]] = item.get("id")
            for token, wanted in TOKENS.items():
                facts["token_ids"][token] = ids.get(token)
                if ids.get(token) != wanted:
                    report.add(
                        "tokenizer_wrong_token", "%s is %s, DeepSeek-V4 has %d" % (token, ids.get(token), wanted), "tokenizer.json"
                    )
            facts["v3_tool_tokens"] = V3_TOOL_TOKEN in ids
            numbers = [n for n in ids.values() if whole(n)]
            vocabulary = config.get("vocab_size") if config else None
            if whole(vocabulary) and numbers and max(numbers) >= vocabulary:
                report.add(
                    "tokenizer_vocabulary", "the highest token is %d, vocab_size %d" % (max(numbers), vocabulary), "tokenizer.json"
                )
    if "tokenizer_config.json" not in files:
        report.add("tokenizer_missing", "there is no tokenizer_config.json", "tokenizer_config.json")
    else:
        data = _read_json(
            os.path.join(path, "tokenizer_config.json"), report, "tokenizer_config_not_json", "tokenizer_config.json", 1 << 24
        )
        if data is not None and data.get("chat_template"):
            facts.update(chat_template=True, chat_template_from="tokenizer_config.json")
    for name in ("chat_template.jinja", "chat_template.json"):
        if name in files and files[name].st_size:
            facts.update(chat_template=True, chat_template_from=name)
    return facts


def _generation(path, files, config, report):
    """generation_config.json: its end token must be the model's."""
    if "generation_config.json" not in files:
        report.add("generation_config_missing", "there is no generation_config.json", "generation_config.json")
        return {}
    data = _read_json(
        os.path.join(path, "generation_config.json"), report, "generation_config_not_json", "generation_config.json", 1 << 22
    )
    if data is None:
        return {}
    if config and "eos_token_id" in config and "eos_token_id" in data:
        ours, theirs = ({x} if whole(x) else set(x) if isinstance(x, list) else set() for x in (config["eos_token_id"], data["eos_token_id"]))
        if not ours & theirs:
            report.add(
                "generation_config_tokens",
                "eos_token_id is %s, config.json has %s" % (data["eos_token_id"], config["eos_token_id"]),
                "generation_config.json",
            )
    return {key: data[key] for key in ("temperature", "top_p", "top_k", "do_sample", "eos_token_id") if key in data}


def _as_user(account, work):
    """Run C(work) in a child that has become the account; returns what it returned, as JSON. Needs root."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            os.initgroups(account.pw_name, account.pw_gid)
            os.setresgid(account.pw_gid, account.pw_gid, account.pw_gid)
            os.setresuid(account.pw_uid, account.pw_uid, account.pw_uid)
            with os.fdopen(writer, "wb") as stream:
                stream.write(json.dumps(work()).encode("utf-8"))
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        raw = stream.read()
    dummy, code = os.waitpid(child, 0)
    if code != 0:
        raise OSError("the check as user %s ended with status %d" % (account.pw_name, code))
    return json.loads(raw.decode("utf-8"))


def check_readable(path, files, user, report):
    """Test, as the service user itself, every directory on the way and every file."""
    try:
        account = pwd.getpwnam(user) if not str(user).isdigit() else pwd.getpwuid(int(user))
    except KeyError:
        report.add("user_unknown", "there is no user %s on this host" % user)
        return
    if os.geteuid() not in (0, account.pw_uid):
        report.add("readability_not_checked", "running as uid %d, the service user is %s" % (os.geteuid(), user))
        return
    root = os.path.realpath(path)
    # Every directory that leads to the files themselves; links may lead elsewhere than to the root.
    targets = {name: os.path.realpath(os.path.join(path, name)) for name in files}
    directories = {root}
    for target in targets.values():
        directories.add(os.path.dirname(target))
    ancestors = set()
    for directory in list(directories):
        while directory not in ancestors:
            ancestors.add(directory)
            directory = os.path.dirname(directory)
    ordered = sorted(ancestors, key=lambda d: (d.count("/") if d != "/" else 0, d))
    # Held open so that one closed door does not hide the next one.
    handles = {}
    for directory in directories:
        try:
            handles[directory] = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            pass

    def look():
        blocked, denied = [], []
        for directory in ordered:
            try:
                handle = os.open(directory, os.O_PATH | os.O_DIRECTORY)
                os.close(handle)
                if not os.access(directory, os.X_OK):
                    blocked.append(directory)
            except OSError:
                # Something above is closed already; ask this directory alone, through the held handle.
                if blocked and directory in handles:
                    if not os.access(".", os.X_OK, dir_fd=handles[directory]):
                        blocked.append(directory)
                elif not blocked:
                    blocked.append(directory)
        if root not in blocked:
            try:
                handle = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=handles[root])
                os.close(handle)
            except (OSError, KeyError):
                if not blocked:
                    denied.append(".")
        for name, target in targets.items():
            directory, base = os.path.split(target)
            if directory in blocked or directory not in handles:
                continue
            try:
                os.close(os.open(base, os.O_RDONLY | os.O_NONBLOCK, dir_fd=handles[directory]))
            except OSError:
                denied.append(name)
        return {"blocked": blocked, "denied": denied}

    try:
        result = look() if os.geteuid() == account.pw_uid else _as_user(account, look)
    except (OSError, ValueError) as exc:
        report.add("readability_not_checked", str(exc)[:200])
        return
    finally:
        for handle in handles.values():
            os.close(handle)
    for directory in result["blocked"]:
        report.add("path_not_searchable", "user %s may not enter %s" % (user, directory), directory)
    for name in result["denied"]:
        report.add("permission_denied", "user %s may not read it" % user, name)


def _deep(path, files, wanted, workers, report, on_bytes=None):
    """Compare contents with the manifest; returns C({path: record entry})."""
    names = sorted(name for name in files if wanted is None or name in wanted)
    full = {os.path.join(path, name): name for name in names}
    git_sizes = {}
    if wanted:
        git_sizes = {p: files[n].st_size for p, n in full.items() if wanted[n].get("git_sha1") and not wanted[n].get("sha256")}
    outcome = hash_many(list(full), workers, on_bytes, git_sizes)
    record = {}
    for place, name in full.items():
        result = outcome[place]
        if isinstance(result, OSError):
            report.add("unreadable_file", _reason(result), name)
            continue
        status, sha256, git_sha1 = result
        record[name] = manifests.stat_entry(status, sha256)
        if wanted is None:
            continue
        expected = wanted[name].get("sha256") or wanted[name].get("git_sha1")
        actual = sha256 if wanted[name].get("sha256") else git_sha1
        if expected and expected != actual:
            report.add("checksum_mismatch", "the content has %s, the manifest %s" % (actual[:12], expected[:12]), name, expected=expected, actual=actual)
    return record


def _against_manifest(files, wanted, report):
    """Names and sizes against the manifest."""
    for name, entry in wanted.items():
        if name not in files:
            report.add("manifest_file_missing", "listed in the manifest, absent here", name)
        elif entry.get("size") is not None and entry["size"] != files[name].st_size:
            report.add(
                "size_mismatch",
                "%d bytes, the manifest says %d" % (files[name].st_size, entry["size"]),
                name,
                expected=entry["size"],
                actual=files[name].st_size,
            )
    for name in files:
        if name not in wanted:
            report.add("file_not_in_manifest", "present, not listed in the manifest", name)


def inspect(
    path,
    user=None,
    allowed_roots=(),
    expect=None,
    manifest=None,
    deep=False,
    workers=0,
    structure=True,
    on_bytes=None,
    content_known=False,
):
    """Judge a directory; returns C({ok, facts, findings, files, compared, record})."""
    report = Report()
    facts = {}
    record = {}
    files = {}
    compared = "none"
    try:
        status = os.stat(path)
        directory = stat.S_ISDIR(status.st_mode)
        reason = "it is a file" if not directory else ""
    except OSError as exc:
        directory, reason = False, _reason(exc)
        if exc.errno == errno.ELOOP:
            report.add("link_loop", "the link leads in a circle", str(path))
    except ValueError as exc:
        directory, reason = False, str(exc)
    if not directory:
        if not report.findings():
            report.add("not_a_directory", reason, str(path))
        return _result(report, facts, files, compared, record)

    files = scan(path, report, allowed_roots)
    for name, status in files.items():
        if status.st_size == 0 and not name.endswith(".safetensors"):
            if name not in ("config.json", INDEX, "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
                report.add("empty_file", "the file has no byte", name, severity="warning")
    if manifest is not None:
        _against_manifest(files, manifest, report)
    if structure:
        # Hundreds of thousands of small objects and no cycles: the collector would only look at them in vain.
        collecting = gc.isenabled()
        gc.disable()
        try:
            facts = _structure(path, files, report, expect)
        finally:
            if collecting:
                gc.enable()
        compared = "headers"
    if deep:
        record = _deep(path, files, manifest, workers, report, on_bytes)
        compared = "content" if manifest is not None else "hashed"
    elif content_known:
        compared = "content"
    elif structure:
        report.add("content_not_compared", "sizes and headers were checked, contents were not read")
    if user is not None and user != "":
        check_readable(path, files, user, report)
    return _result(report, facts, files, compared, record)


def _structure(path, files, report, expect):
    config, usable = _config(path, files, report, expect)
    weight_map, total_size, names = _index(path, files, report)
    headers = _shards(path, names, files, report)
    if weight_map is not None:
        _compare_index(weight_map, total_size, headers, report)
    tensors = _tensors(weight_map, headers, report)
    wanted = set(weight_map.values()) if weight_map else set(names)
    complete = bool(headers) and all(n in headers and not headers[n].problems for n in wanted)
    facts = {
        "architecture": "",
        "speculation": "none",
        "experts": "",
        "layers": 0,
        "shards": len(names),
        "tensors": len(tensors),
        "bytes": sum(s.st_size for s in files.values()),
    }
    if config is not None:
        architectures = config.get("architectures")
        facts["architecture"] = str(architectures[0])[:120] if isinstance(architectures, list) and architectures else ""
        for fact, key in (
            ("layers", "num_hidden_layers"),
            ("hidden_size", "hidden_size"),
            ("heads", "num_attention_heads"),
            ("routed_experts", "n_routed_experts"),
            ("vocab_size", "vocab_size"),
            ("max_position_embeddings", "max_position_embeddings"),
            ("mtp_heads", "num_nextn_predict_layers"),
            ("bos_token_id", "bos_token_id"),
            ("eos_token_id", "eos_token_id"),
        ):
            if isinstance(config.get(key), (int, list)):
                facts[fact] = config[key]
    if usable:
        ratios = config["compress_ratios"][: config["num_hidden_layers"]]
        facts["compress_ratios"] = {str(r): ratios.count(r) for r in layout.RATIOS}
        if headers:
            place = _places(weight_map, headers)
            check = _Layout(config, tensors, place, complete, report)
            for prefix, template, with_experts in layout.groups(config):
                check.part(prefix, template, with_experts)
            facts["experts"] = _experts_kind(config, check, report)
            facts["speculation"] = _speculation(config, tensors, check, report) if complete else "none"
            if complete and check.seen != len(tensors):
                _unexpected(config, tensors, place, report)
    facts.update(_tokenizer(path, files, config, report))
    facts["generation"] = _generation(path, files, config, report)
    return facts


def _unexpected(config, tensors, place, report):
    """Name the tensors that the layout does not know; slow, so only called when the numbers differ."""
    known = set()
    kinds = ("fp4", "fp8")
    for prefix, template, with_experts in layout.groups(config):
        for suffix, (role, dummy) in template.items():
            known.add(prefix + suffix)
            if role == "linear":
                known.add(prefix + suffix[: -len(".weight")] + ".scale")
        if with_experts:
            for number in range(config["n_routed_experts"]):
                for kind in kinds:
                    known.update("%sffn.experts.%d.%s" % (prefix, number, s) for s in layout.expert_tensors(config, kind))
                    break
    draft = layout.has_dspark_keys(config) or not config.get("num_nextn_predict_layers", 0)
    for name, entry in tensors.items():
        if name not in known and not (draft and name.startswith("mtp.")):
            report.add("unexpected_tensors", "%s (%s %s)" % (name[:120], entry[0], list(entry[1])), place(name))


def _result(report, facts, files, compared, record):
    findings = report.findings()
    return {
        "ok": not any(f["severity"] == "error" for f in findings),
        "facts": facts,
        "findings": findings,
        "files": files,
        "compared": compared,
        "record": record,
    }
