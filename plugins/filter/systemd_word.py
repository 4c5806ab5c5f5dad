# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One word, as systemd's unit files want it."""

from __future__ import annotations

import re

from ansible.errors import AnsibleFilterError

_PLAIN = re.compile(r"^[A-Za-z0-9@%+=:,./_-]+$")


def systemd_word(word, command=True):
    """See plugins/filter/systemd_word.yml."""
    text = str(word)
    if "\n" in text or "\0" in text:
        raise AnsibleFilterError("a unit file can't hold a line break in a word: %r" % text)
    text = text.replace("%", "%%")
    if command:
        text = text.replace("$", "$$")
    if _PLAIN.match(text) and (command or "=" not in text):
        return text
    return '"%s"' % text.replace("\\", "\\\\").replace('"', '\\"')


class FilterModule:
    """The filters of this file."""

    def filters(self):
        """Name to function."""
        return {"systemd_word": systemd_word}
