# SPDX-License-Identifier: Apache-2.0
"""The command dsv4-sm120."""

from __future__ import annotations

import argparse
import json
import sys

from . import build_info, plugin


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="dsv4-sm120", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="print what this wheel was built from, as JSON")
    commands.add_parser("operations", help="print the operations that DSV4_SM120_KERNELS knows")
    options = parser.parse_args(argv)
    if options.command == "build":
        print(json.dumps(build_info(), indent=1, sort_keys=True))
    else:
        print("\n".join(plugin.operations()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
