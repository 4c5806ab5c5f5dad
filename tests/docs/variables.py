# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write the README's tables of variables from the roles' argument specs, and of the topology from its filter's documentation.

usage: variables.py [--check]

The argument specs are the one source; the README holds the result between two marker lines. With --check
nothing is written and the exit status is 1 when the README is behind.
"""

from __future__ import annotations

import argparse
import difflib
import pathlib
import re
import sys

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
BEGIN = "<!-- variables: made by tests/docs/variables.py from the argument specs -->"
END = "<!-- variables: end -->"
# In the order of the site playbook; then what other playbooks run.
ROLES = (
    "preflight",
    "nvidia_driver",
    "sglang_runtime",
    "kernel_build",
    "model_staging",
    "sglang_dsv4",
    "verification",
    "deployment_record",
    "benchmark",
)


def cell(value: object) -> str:
    """One table cell: a single line, with the pipe escaped and Ansible's markup turned into Markdown."""
    text = " ".join(str(value).split())
    text = re.sub(r"\b[CVOM]\(([^()]*)\)", r"`\1`", text)
    return text.replace("|", "\\|")


def default(option: dict) -> str:
    """The default as YAML writes it, or what stands in its place."""
    if "default" not in option:
        return "**required**" if option.get("required") else ""
    value = option["default"]
    if isinstance(value, (dict, list)):
        text = yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()
    elif isinstance(value, bool):
        text = str(value).lower()
    elif value is None:
        text = "null"
    else:
        text = str(value) if value != "" else '""'
    return f"`{cell(text)}`"


def rows(options: dict) -> list[str]:
    """The table of some options."""
    lines = ["| variable | type | default | meaning |", "|---|---|---|---|"]
    for name, option in options.items():
        description = option.get("description", "")
        if isinstance(description, list):
            description = " ".join(description)
        if option.get("choices"):
            description += " One of " + ", ".join(f"`{choice}`" for choice in option["choices"]) + "."
        lines.append(f"| `{name}` | {option.get('type', 'str')} | {default(option)} | {cell(description)} |")
    return lines


def role_section(role: str) -> str:
    """The section of one role."""
    spec = yaml.safe_load((ROOT / "roles" / role / "meta" / "argument_specs.yml").read_text(encoding="utf-8"))
    main = spec["argument_specs"]["main"]
    return "\n".join([f"#### {role}", "", cell(main["short_description"]) + ".", "", *rows(main.get("options", {}))])


def topology_section() -> str:
    """The keys of dsv4_topology, and those of its instances."""
    text = (ROOT / "plugins" / "filter" / "serving_plan.yml").read_text(encoding="utf-8")
    topology = yaml.safe_load(text)["DOCUMENTATION"]["options"]["_input"]["suboptions"]
    instance = topology["instances"]["suboptions"]
    head = ["#### dsv4_topology", "", "What runs where; one variable, in the inventory.", ""]
    return "\n".join([*head, *rows(topology), "", "Keys of an instance:", "", *rows(instance)])


def main() -> int:
    """Write or check; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args().check
    readme = README.read_text(encoding="utf-8")
    if BEGIN not in readme or END not in readme:
        print(f"{README.name}: the lines {BEGIN!r} and {END!r} are missing", file=sys.stderr)
        return 1
    head, rest = readme.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    wanted = head + BEGIN + "\n\n" + "\n\n".join([topology_section(), *map(role_section, ROLES)]) + "\n\n" + END + tail
    if wanted == readme:
        return 0
    if check:
        sys.stdout.writelines(difflib.unified_diff(readme.splitlines(True), wanted.splitlines(True), "README.md", "from the argument specs"))
        print("README.md is behind the argument specs; run: python3 tests/docs/variables.py", file=sys.stderr)
        return 1
    README.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
