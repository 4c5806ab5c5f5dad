# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What every role keeps to, tested on all roles at once."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[3]
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if path.is_dir())


def load(path: pathlib.Path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def tasks(value):
    """Every task of a task file, blocks opened."""
    for task in value or []:
        yield task
        for part in ("block", "rescue", "always"):
            yield from tasks(task.get(part))


@pytest.mark.parametrize("role", ROLES)
def test_defaults_equal_the_argument_specs(role):
    folder = ROOT / "roles" / role
    options = load(folder / "meta" / "argument_specs.yml")["argument_specs"]["main"].get("options", {})
    defaults = load(folder / "defaults" / "main.yml") or {}
    with_default = {name for name, option in options.items() if "default" in option}
    assert set(defaults) == with_default
    for name in sorted(defaults):
        assert options[name]["default"] == defaults[name], name


@pytest.mark.parametrize("role", ROLES)
def test_variables_carry_the_roles_name(role):
    folder = ROOT / "roles" / role
    for name in load(folder / "defaults" / "main.yml") or {}:
        assert name.startswith(f"{role}_"), name
    for path in sorted((folder / "vars").glob("*.yml")):
        for name in load(path) or {}:
            assert name.startswith(f"__{role}_"), f"{path.name}: {name}"


@pytest.mark.parametrize("role", ROLES)
def test_a_role_says_what_it_is(role):
    folder = ROOT / "roles" / role
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert "dempoten" in readme and "ollback" in readme, "README.md says whether the role is idempotent and what it can roll back"
    assert load(folder / "meta" / "main.yml")["galaxy_info"]["license"] == "GPL-3.0-or-later"


@pytest.mark.parametrize("role", ROLES)
def test_commands_say_when_they_change_and_no_secret_is_in_an_environment(role):
    for path in sorted((ROOT / "roles" / role / "tasks").rglob("*.yml")):
        for task in tasks(load(path)):
            command = task.get("ansible.builtin.command")
            if command is not None:
                assert isinstance(command, dict) and "argv" in command, f"{path.name}: {task.get('name')}: command in argv form"
                assert "changed_when" in task, f"{path.name}: {task.get('name')}: changed_when"
            assert "ansible.builtin.shell" not in task, f"{path.name}: {task.get('name')}: no shell"
            for name in task.get("environment") or {}:
                assert not re.search(r"TOKEN|SECRET|PASSWORD|API_KEY", str(name)), f"{path.name}: {name} leaks at -vvv"


def test_preflight_knows_the_variables_of_every_role():
    assert load(ROOT / "roles" / "preflight" / "vars" / "main.yml")["__preflight_roles"] == ROLES


def test_the_readme_lists_the_variables_as_the_specs_say():
    check = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "docs" / "variables.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stdout + check.stderr
