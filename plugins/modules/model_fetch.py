#!/usr/bin/python
# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: model_fetch
short_description: Bring a model onto a host, resumable and right to the byte
version_added: "0.1.0"
description:
  - Makes a directory hold a model, file by file as a manifest says, from the first source in a list that can give it.
  - Files grow under other names in a work directory, in pieces, by several connections, and are hashed while they stream. A file
    gets its name when its sha256 is right, and a marker, C(.dsv4-staged.json), is written last, after the checkpoint was judged as
    M(blackwell.dsv4.checkpoint) does. A run that was killed, cut or lost its machine goes on where it was.
  - A second run compares size, modification time and inode with the record in the marker and reads no content.
options:
  dest:
    description: Directory to fill, one for each revision of a model.
    type: path
    required: true
  name:
    description: Name of the model, noted in the marker.
    type: str
  revision:
    description: Revision of the model, noted in the marker. For a source of type V(hub) it must be a commit.
    type: str
  sources:
    description:
      - Where to get the model, tried in this order. What one source could not give is asked from the next one.
      - With an empty list the directory is only verified.
    type: list
    elements: dict
    default: []
    suboptions:
      type:
        description:
          - V(directory) is a mounted directory. V(http) is a mirror that serves files below one address. V(hub) is a repository on a
            server that speaks the hub's protocol. V(rsync) is another host.
        type: str
        required: true
        choices: [directory, http, hub, rsync]
      path:
        description: The directory, for O(sources[].type=directory).
        type: path
      url:
        description: Address of the folder, for O(sources[].type=http), or what rsync understands, for O(sources[].type=rsync).
        type: str
      sums:
        description: Name of the file with the sums on a mirror, used when O(manifest) is not given.
        type: str
        default: SHA256SUMS
      repository:
        description: Repository as owner/name, for O(sources[].type=hub).
        type: str
      endpoint:
        description: Address of the hub, for O(sources[].type=hub).
        type: str
      revision:
        description: Commit to fetch from the hub, O(revision) by default.
        type: str
      program:
        description: The rsync program.
        type: str
        default: rsync
      shell:
        description: Remote shell of rsync, for example C(ssh -i /etc/dsv4/mirror_key -o BatchMode=yes).
        type: str
  manifest:
    description:
      - What the model must be, as text. Understood are the output of C(sha256sum), the tree listing of the hub, and the JSON that
        M(blackwell.dsv4.checkpoint) returns.
      - Without it the marker of a former run is used, and without that the source is asked.
    type: str
  exclude:
    description: Patterns of files that a source lists and that are not wanted. A manifest that is given is taken whole.
    type: list
    elements: str
    default: [.gitattributes, .gitignore, SHA256SUMS, "*.md", "*.pdf", "*.png", "*.jpg", "*.svg", "*.gif"]
  deep_verify:
    description: Read all files again and compare their sha256. Wrong files are fetched anew.
    type: bool
    default: false
  parallel:
    description: Connections at the same time.
    type: int
    default: 4
  rate:
    description: Limit in bytes per second for all connections together, such as V(200M). Unlimited when empty.
    type: str
    default: ""
  chunk:
    description: Size of a request. A kill costs less than this much for each file that was on its way.
    type: str
    default: 64M
  retries:
    description: Attempts without a byte of progress before a file is given up for a source.
    type: int
    default: 8
  stall_timeout:
    description: Seconds without a byte, or with a trickle only, before a connection or a child is ended and tried again.
    type: int
    default: 60
  reserve:
    description: Space that must stay free in O(dest).
    type: str
    default: 1G
  token:
    description: Token for an http or hub source. It is sent to the host in the address only, never to where that redirects.
    type: str
  token_file:
    description: File on the target with the token. It must have mode 0600.
    type: path
  ca_bundle:
    description: Certificates to trust in place of the system's.
    type: path
  proxy:
    description: Address of an HTTP proxy. Environment variables are not looked at.
    type: str
  owner:
    description: Owner of the files.
    type: str
  group:
    description: Group of the files.
    type: str
  expect:
    description: Values that C(config.json) must have.
    type: dict
    default: {}
  check:
    description: Whether to judge the checkpoint before the marker is written. Turn it off only for what is no DeepSeek-V4.
    type: bool
    default: true
  status_path:
    description: File that is rewritten every second with the progress, for M(blackwell.dsv4.progress). By default inside of the work directory.
    type: path
  plan_only:
    description: Return what would be done, as in check mode, and change nothing.
    type: bool
    default: false
extends_documentation_fragment:
  - blackwell.dsv4.attributes
attributes:
  check_mode:
    support: full
    details:
      - Says how many bytes would be fetched. Sources are asked for their listing only.
  diff_mode:
    support: none
  platform:
    support: full
    platforms: linux
author:
  - The blackwell.dsv4 maintainers (@blackwell-dsv4)
seealso:
  - module: blackwell.dsv4.checkpoint
  - module: blackwell.dsv4.progress
"""

EXAMPLES = r"""
- name: Stage from a mounted disk, or else from a mirror
  blackwell.dsv4.model_fetch:
    dest: /opt/dsv4/models/deepseek-v4-flash@0f3c1e2d4b5a69788796a5b4c3d2e1f001122334
    name: deepseek-v4-flash
    revision: 0f3c1e2d4b5a69788796a5b4c3d2e1f001122334
    manifest: "{{ lookup('ansible.builtin.file', 'deepseek-v4-flash.json') }}"
    sources:
      - type: directory
        path: /mnt/usb/deepseek-v4-flash
      - type: http
        url: https://mirror.example.org/models/deepseek-v4-flash
    rate: 400M

- name: See what is missing
  blackwell.dsv4.model_fetch:
    dest: /opt/dsv4/models/deepseek-v4-flash@0f3c1e2d4b5a69788796a5b4c3d2e1f001122334
    plan_only: true
  register: plan

- name: Read everything again
  blackwell.dsv4.model_fetch:
    dest: /opt/dsv4/models/deepseek-v4-flash@0f3c1e2d4b5a69788796a5b4c3d2e1f001122334
    deep_verify: true
"""

RETURN = r"""
complete:
  description: Whether the directory holds the model, judged, with its marker.
  returned: always
  type: bool
  sample: true
path:
  description: The directory.
  returned: always
  type: str
bytes_total:
  description: Size of the model.
  returned: success
  type: int
bytes_to_fetch:
  description: What a run would fetch.
  returned: in check mode and with O(plan_only)
  type: int
files_to_fetch:
  description: Files that are absent or known to be wrong.
  returned: in check mode and with O(plan_only)
  type: list
  elements: str
files_to_read:
  description: Files of the right size without a valid record, whose content must be read.
  returned: in check mode and with O(plan_only)
  type: list
  elements: str
fetched_files:
  description: Number of files that were published.
  returned: when the run was real
  type: int
fetched_bytes:
  description: Bytes that came from sources.
  returned: when the run was real
  type: int
resumed_bytes:
  description: Bytes that were there from an earlier, unfinished run.
  returned: when the run was real
  type: int
refetched_bytes:
  description: Bytes that came more than once.
  returned: when the run was real
  type: int
facts:
  description: What the checkpoint is, see RV(blackwell.dsv4.checkpoint#module:facts).
  returned: success
  type: dict
findings:
  description: What is wrong or worth knowing, see RV(blackwell.dsv4.checkpoint#module:findings).
  returned: when the checkpoint was judged
  type: list
  elements: dict
verified:
  description: V(manifest) when a manifest said what the content must be, V(source) when the source was believed.
  returned: success
  type: str
manifest_from:
  description: Where the manifest came from.
  returned: success
  type: str
troubles:
  description: How often each kind of trouble was met on the way, by id.
  returned: always
  type: dict
  sample: {download_stalled: 1, slow_down: 3}
events:
  description: The first hundred of them.
  returned: always
  type: list
  elements: dict
id:
  description: Stable name of the reason of a failure.
  returned: failure
  type: str
  sample: no_space
"""

import signal
import threading

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.blackwell.dsv4.plugins.module_utils.staging import Staging, StagingError

ARGUMENTS = {
    "dest": {"type": "path", "required": True},
    "name": {"type": "str"},
    "revision": {"type": "str"},
    "sources": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "type": {"type": "str", "required": True, "choices": ["directory", "http", "hub", "rsync"]},
            "path": {"type": "path"},
            "url": {"type": "str"},
            "sums": {"type": "str", "default": "SHA256SUMS"},
            "repository": {"type": "str"},
            "endpoint": {"type": "str"},
            "revision": {"type": "str"},
            "program": {"type": "str", "default": "rsync"},
            "shell": {"type": "str"},
        },
        "required_if": [
            ("type", "directory", ("path",)),
            ("type", "http", ("url",)),
            ("type", "rsync", ("url",)),
            ("type", "hub", ("repository", "endpoint")),
        ],
    },
    "manifest": {"type": "str"},
    "exclude": {
        "type": "list",
        "elements": "str",
        "default": [".gitattributes", ".gitignore", "SHA256SUMS", "*.md", "*.pdf", "*.png", "*.jpg", "*.svg", "*.gif"],
    },
    "deep_verify": {"type": "bool", "default": False},
    "parallel": {"type": "int", "default": 4},
    "rate": {"type": "str", "default": ""},
    "chunk": {"type": "str", "default": "64M"},
    "retries": {"type": "int", "default": 8},
    "stall_timeout": {"type": "int", "default": 60},
    "reserve": {"type": "str", "default": "1G"},
    "token": {"type": "str", "no_log": True},
    "token_file": {"type": "path", "no_log": False},
    "ca_bundle": {"type": "path"},
    "proxy": {"type": "str", "no_log": True},
    "owner": {"type": "str"},
    "group": {"type": "str"},
    "expect": {"type": "dict", "default": {}},
    "check": {"type": "bool", "default": True},
    "status_path": {"type": "path"},
    "plan_only": {"type": "bool", "default": False},
}


def main():
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True, mutually_exclusive=[("token", "token_file")])
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda dummy_number, dummy_frame: stop.set())
    answer = {"path": module.params["dest"], "complete": False}
    staging = None
    try:
        staging = Staging(module.params, stop)
        plan = staging.plan()
        if module.check_mode or module.params["plan_only"]:
            answer.update(plan, changed=not plan["complete"])
        elif plan["complete"]:
            answer.update(plan, changed=False, fetched_files=0, fetched_bytes=0, resumed_bytes=0, refetched_bytes=0)
        else:
            answer.update(staging.run(), complete=True)
            marker = staging.marker() or {}
            answer.update(verified=marker.get("verified", ""), manifest_sha256=marker.get("manifest_sha256", ""))
    except StagingError as exc:
        answer.update(exc.details)
        answer.update(troubles=staging.events.counts if staging else {}, events=staging.events.items if staging else [])
        answer.pop("changed", None)
        module.fail_json(msg="%s: %s" % (exc.code, exc), id=exc.code, **answer)
    answer.update(troubles=staging.events.counts, events=staging.events.items)
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
