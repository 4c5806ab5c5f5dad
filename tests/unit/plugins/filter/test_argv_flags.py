# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest
from ansible.errors import AnsibleFilterError

from ansible_collections.blackwell.dsv4.plugins.filter.argv_flags import argv_flags


def test_switches_values_and_lists_keep_their_order():
    argv = ["python", "-m", "x", "--port", "30000", "--numa-node", "0", "0", "--enable-metrics", "--a=b"]
    assert argv_flags(argv) == [
        {"flag": "--port", "value": "30000"},
        {"flag": "--numa-node", "value": "0 0"},
        {"flag": "--enable-metrics", "value": ""},
        {"flag": "--a", "value": "b"},
    ]


def test_a_program_alone_has_no_flags():
    assert argv_flags(["python", "-m", "x"]) == []


@pytest.mark.parametrize("wrong", ["--port 30000", [1], None])
def test_what_is_no_argv_is_named(wrong):
    with pytest.raises(AnsibleFilterError, match="argv_flags needs a list of strings"):
        argv_flags(wrong)
