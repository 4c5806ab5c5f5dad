#!/usr/bin/python
# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: checkpoint
short_description: Check a DeepSeek-V4 checkpoint without loading it
version_added: "0.1.0"
description:
  - Judges a directory that is to be served as DeepSeek-V4. It looks at files and links, C(config.json), the index against the
    shards both ways, the header of every shard, names, dtypes and shapes of all tensors against the configuration, the
    tokenizer's thinking and tool tokens, chat template and generation config, and whether the service user can read all of it.
  - Never changes anything and does not fail because of what it finds. All problems come back at once as RV(findings), each
    with a stable id and a hint; RV(ok) is false when one of them is an error.
  - Needs neither torch nor any other package. Only headers are read, which takes about a second for a model of 160 GB, unless
    O(deep_verify) asks for the contents.
options:
  path:
    description: Directory of the checkpoint.
    type: path
    required: true
  user:
    description:
      - Service user that must be able to read the checkpoint. The test runs as this user, on every directory that leads to the
        files and on every file. It needs root.
    type: str
  allowed_roots:
    description: Directories outside of O(path) where links may lead, for example the blobs of a hub cache.
    type: list
    elements: path
    default: []
  expect:
    description: Values that C(config.json) must have, for example C(num_hidden_layers) of 43.
    type: dict
    default: {}
  manifest:
    description:
      - Manifest to compare with, as text. Understood are the output of C(sha256sum), the tree listing of the hub, and the JSON that
        RV(manifest) returns.
      - Without it the marker of the staged directory serves as manifest, when there is one.
    type: str
  deep_verify:
    description:
      - Read all contents and compare their sha256 with the manifest. Without a manifest the sums are only returned, which is how
        a manifest is made from a trusted copy.
    type: bool
    default: false
  workers:
    description: Threads that hash when O(deep_verify) is set, V(0) for one on each core.
    type: int
    default: 0
  structure:
    description: Whether to check configuration, shards and tokenizer. Turn it off to test the rights of O(user) only.
    type: bool
    default: true
extends_documentation_fragment:
  - blackwell.dsv4.attributes
attributes:
  check_mode:
    support: full
    details:
      - Reads only.
  diff_mode:
    support: none
  platform:
    support: full
    platforms: linux
author:
  - The blackwell.dsv4 maintainers (@blackwell-dsv4)
seealso:
  - module: blackwell.dsv4.model_fetch
"""

EXAMPLES = r"""
- name: Check the staged model as the service user
  blackwell.dsv4.checkpoint:
    path: /opt/dsv4/models/deepseek-v4-flash@main
    user: dsv4
  register: model

- name: Refuse a wrong checkpoint with every reason at once
  ansible.builtin.assert:
    that: model.ok | bool
    fail_msg: "{{ model.findings | selectattr('severity', 'eq', 'error') | list | to_nice_yaml }}"

- name: Make a manifest from a copy that is known to be good
  blackwell.dsv4.checkpoint:
    path: /mnt/usb/deepseek-v4-flash
    deep_verify: true
  register: trusted

- name: Keep the manifest beside the inventory
  ansible.builtin.copy:
    content: "{{ trusted.manifest }}"
    dest: "{{ inventory_dir }}/files/deepseek-v4-flash.json"
    mode: "0644"
  delegate_to: localhost
"""

RETURN = r"""
ok:
  description: Whether no finding is an error.
  returned: always
  type: bool
  sample: true
findings:
  description: What is wrong or worth knowing, errors first.
  returned: always
  type: list
  elements: dict
  contains:
    id:
      description: Stable name of the kind of problem.
      type: str
      sample: missing_shards
    severity:
      description: V(error), V(warning) or V(info).
      type: str
      sample: error
    file:
      description: The first file concerned, empty when none is.
      type: str
      sample: model-00003-of-00046.safetensors
    files:
      description: All files concerned, at most 200.
      type: list
      elements: str
    count:
      description: How often the problem was met.
      type: int
      sample: 1
    what:
      description: What was seen.
      type: str
    hint:
      description: What to do about it.
      type: str
    details:
      description: Numbers that belong to it, such as expected and actual size.
      type: list
      elements: dict
facts:
  description:
    - What the checkpoint is. Holds C(speculation) (V(none), V(mtp) or V(dspark)), C(experts) (V(fp4) or V(fp8)), C(layers),
      C(compress_ratios) (number of layers by ratio), C(token_ids), C(chat_template), C(generation), C(shards), C(tensors), C(bytes)
      and other numbers of C(config.json).
  returned: always
  type: dict
  sample: {speculation: mtp, experts: fp4, layers: 43, chat_template: false}
compared:
  description:
    - How much was read. V(headers) means that sizes and headers were checked, so that a corrupt byte cannot have been seen. V(content)
      means that all bytes were compared with a manifest, V(hashed) that they were read but there was none, V(none) that neither was done.
  returned: always
  type: str
  sample: headers
manifest:
  description: Manifest of what is there, with the sums when O(deep_verify) was set.
  returned: when the path is a directory
  type: str
"""

import os

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.blackwell.dsv4.plugins.module_utils import staging_manifest as manifests
from ansible_collections.blackwell.dsv4.plugins.module_utils.checkpoint import inspect


def wanted_files(params):
    """The manifest to compare with: the one given, else that of the marker, else none."""
    if params["manifest"]:
        return manifests.parse_manifest(params["manifest"])
    marker = manifests.load_json(os.path.join(params["path"], manifests.MARKER))
    listed = marker.get("files") if isinstance(marker, dict) else None
    if not isinstance(listed, dict) or not listed:
        return None
    return {name: {"size": entry.get("size"), "sha256": entry.get("sha256")} for name, entry in listed.items() if isinstance(entry, dict)}


def main():
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "user": {"type": "str"},
            "allowed_roots": {"type": "list", "elements": "path", "default": []},
            "expect": {"type": "dict", "default": {}},
            "manifest": {"type": "str"},
            "deep_verify": {"type": "bool", "default": False},
            "workers": {"type": "int", "default": 0},
            "structure": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        wanted = wanted_files(params)
    except manifests.ManifestError as exc:
        module.fail_json(msg="manifest: %s" % exc, id=exc.code)
    result = inspect(
        params["path"],
        user=params["user"],
        allowed_roots=params["allowed_roots"],
        expect=params["expect"],
        manifest=wanted,
        deep=params["deep_verify"],
        workers=params["workers"],
        structure=params["structure"],
    )
    answer = {key: result[key] for key in ("ok", "findings", "facts", "compared")}
    if result["files"]:
        record = result["record"]
        answer["manifest"] = manifests.dump_manifest(
            {name: {"size": status.st_size, "sha256": record.get(name, {}).get("sha256")} for name, status in result["files"].items()}
        )
    module.exit_json(changed=False, **answer)


if __name__ == "__main__":
    main()
