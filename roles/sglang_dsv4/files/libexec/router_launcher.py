# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Starts the router in this process, with its key from a credential instead of an argument.

    router_launcher.py sglang-router|smg [--key-file FILE] OPTIONS OF THE ROUTER

The package's own parser reads the options and its own launch function runs; the key is put into the parsed
arguments. It is never in the process's arguments or environment.
"""

from __future__ import annotations

import importlib
import os
import sys

PACKAGES = {"sglang-router": "sglang_router.launch_router", "smg": "smg.launch_router"}
CREDENTIAL = "router-api-key"


def key_of(path):
    """The key in a file, or None when there is no such file."""
    try:
        with open(path, encoding="utf-8") as stream:
            key = stream.read().strip()
    except FileNotFoundError:
        return None
    return key or None


def main(argv=None, environment=None, load=importlib.import_module):
    """Parse with the router's parser, add the key, run."""
    words = list(sys.argv[1:] if argv is None else argv)
    environment = os.environ if environment is None else environment
    if not words or words[0] not in PACKAGES:
        print("usage: router_launcher.py %s [options of the router]" % "|".join(sorted(PACKAGES)), file=sys.stderr)
        return 2
    package = words.pop(0)
    path = os.path.join(environment.get("CREDENTIALS_DIRECTORY", ""), CREDENTIAL)
    if words[:1] == ["--key-file"]:
        path = words[1]
        words = words[2:]
    if "--api-key" in words:
        print("a key on the command line is readable by every user: use the credential", file=sys.stderr)
        return 2
    module = load(PACKAGES[package])
    arguments = module.parse_router_args(words)
    key = key_of(path)
    if key:
        arguments.api_key = key
    module.launch_router(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
