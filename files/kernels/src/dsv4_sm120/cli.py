# SPDX-License-Identifier: Apache-2.0
"""The command dsv4-sm120."""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import sys

from . import build_info, children, contests, gpu, measure, plugin, selection, selftest, show

OK, FAILED, NO_GPU, UNFINISHED = 0, 1, 3, 4
STATUS = """exit status:
  0  right                      2  the command line was wrong       4  select: the time ran out, the record is partial
  1  a kernel is wrong, or      3  there is no CUDA GPU
     the command failed
"""


def say(line: str) -> None:
    """Writes a line of progress."""
    print(line, file=sys.stderr, flush=True)


def names(text: str) -> tuple[str, ...]:
    """Returns the operations of a comma-separated list; refuses unknown ones."""
    known = plugin.operations()
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    if unknown := [name for name in found if name not in known]:
        raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; known: {', '.join(known)}")
    return found


def seconds(text: str) -> float:
    """Returns a time limit."""
    value = float(text)
    if math.isnan(value) or value <= 0:
        raise argparse.ArgumentTypeError("a time limit is more than 0 seconds")
    return value


def parser() -> argparse.ArgumentParser:
    """Returns the command line's parser."""
    raw = argparse.RawDescriptionHelpFormatter
    whole = argparse.ArgumentParser(
        prog="dsv4-sm120", allow_abbrev=False, formatter_class=raw, epilog=STATUS,
        description="Build, proof and choice of the DeepSeek-V4 decode kernels. CUDA_VISIBLE_DEVICES says which GPU is used.",
    )  # fmt: skip
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("build", help="print what this wheel was built from, as JSON")
    commands.add_parser("operations", help="print the operations that DSV4_SM120_KERNELS knows")
    prove = commands.add_parser(
        "selftest", allow_abbrev=False, formatter_class=raw, epilog=STATUS,
        help="hold every kernel against its reference on this GPU",
        description="Holds every operation against its float64 reference on this GPU, over the shapes in which such kernels go\n"
        "wrong. Each runs in a process of its own, so that a crash or a hang is that operation's fault alone.",
    )  # fmt: skip
    choose = commands.add_parser(
        "select", allow_abbrev=False, formatter_class=raw, epilog=STATUS,
        help="time ours against the engine's own and write the record that the plugin reads",
        description="Runs the self-test, then times every operation that passed it against what the installed engine would run on\n"
        "this GPU, for the deployment's shapes: CUDA-graph replays with an emptied L2, contestants in turns. Ours serves where\n"
        "it is faster by more than the noise. The record is replaced at once after each cell, so it is valid at any moment.",
    )  # fmt: skip
    for command in (prove, choose):
        command.add_argument(
            "--operations", type=names, default=(), metavar="A,B",
            help="only these" + ("; default: those that the deployment names" if command is choose else "; default: all"),
        )  # fmt: skip
        command.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    prove.add_argument(
        "--time-limit", type=seconds, default=selftest.SECONDS, metavar="S", help="seconds for each operation (%(default).0f)"
    )
    prove.add_argument("--dry-run", action="store_true", help="only say on which GPU what would be proved")
    prove.add_argument("--out", type=pathlib.Path, metavar="FILE", help="keep the result as JSON in this file too")
    prove.add_argument("--key", default="", help="what the result holds for, kept in it as it is")
    choose.add_argument(
        "--topology", type=pathlib.Path, required=True, metavar="FILE",
        help='the deployment\'s shapes: {"schema": 1, "context_length": N, "instances": {NAME: {"heads": N, "max_batch": N, '
        '"rows_per_request": N, "kernels": [...]}}}',
    )  # fmt: skip
    choose.add_argument("--out", type=pathlib.Path, required=True, metavar="FILE", help="the record")
    choose.add_argument(
        "--selftest", type=pathlib.Path, metavar="FILE",
        help="what `selftest --out` left for this build and this GPU; default: run the self-test",
    )  # fmt: skip
    choose.add_argument("--key", default="", help="what the record holds for, kept in it as it is")
    choose.add_argument("--time-limit", type=seconds, default=1200.0, metavar="S", help="seconds for everything (%(default).0f)")
    choose.add_argument("--repeats", type=int, default=40, metavar="N", help="replays of each contestant and cell (%(default)s)")
    view = commands.add_parser(
        "show", allow_abbrev=False, help="print a record as tables", description="Prints a selection record as tables for people."
    )
    view.add_argument(
        "record", type=pathlib.Path, nargs="?", help="the record; default: the one that DSV4_SM120_SELECTION names"
    )
    return whole


def run_selftest(options: argparse.Namespace) -> int:
    """dsv4-sm120 selftest."""
    device, wanted = gpu.visible()[0], list(options.operations or plugin.operations())
    if options.dry_run:
        print(f"would prove {', '.join(wanted)} on {device['name']} ({device['uuid']})")
        return OK
    results = selftest.prove_all(wanted, options.time_limit, progress=say)
    document = selftest.document(results, device) | {"key": options.key}
    if options.out:
        selection.write_record(options.out, document)
    print(json.dumps(document, indent=1, sort_keys=True) if options.json else show.selftest(document["operations"]))
    return FAILED if any(result.status == selftest.FAIL for result in results.values()) else OK


def run_select(options: argparse.Namespace) -> int:
    """dsv4-sm120 select."""
    record = measure.select(
        options.topology, options.out, options.key, options.operations, options.time_limit, options.repeats, say,
        selftest.read(options.selftest) if options.selftest else None,
    )  # fmt: skip
    print(json.dumps(record, indent=1, sort_keys=True) if options.json else show.record(record))
    return OK if record["state"] == measure.COMPLETE else UNFINISHED


def run_show(options: argparse.Namespace) -> int:
    """dsv4-sm120 show."""
    path = options.record or pathlib.Path(os.environ.get("DSV4_SM120_SELECTION") or "selection.json")
    print(show.record(selection.read_record(path)))
    return OK


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    options = parser().parse_args(argv)
    children.end_with_us()
    try:
        if options.command == "build":
            print(json.dumps(build_info(), indent=1, sort_keys=True))
        elif options.command == "operations":
            print("\n".join(plugin.operations()))
        else:
            return {"selftest": run_selftest, "select": run_select, "show": run_show}[options.command](options)
    except gpu.NoGpu as error:
        say(f"dsv4-sm120: {error}")
        return NO_GPU
    except (contests.DeploymentError, selection.SelectionError, selftest.ResultError, OSError) as error:
        say(f"dsv4-sm120: {error}")
        return FAILED
    return OK


if __name__ == "__main__":
    sys.exit(main())
