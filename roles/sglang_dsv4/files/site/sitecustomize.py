# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keeps keys out of the engine's log: at start it logs all of its arguments, keys included.

Python imports this by itself in every process of a worker (PYTHONPATH of the unit, only where a key is set).
"""

import logging
import re

_KEY = re.compile(r"""(api_key['"]?\s*[:=]\s*)(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")""")
_ARGUMENT = re.compile(r"""(--(?:admin-)?api-key(?:\s+|=))(?:'[^']*'|"[^"]*"|[^\s'"]+)""")
_plain = logging.getLogRecordFactory()


def redacted(text):
    """The text with the values of keys left out."""
    return _ARGUMENT.sub(r"\1(left out)", _KEY.sub(r"\1'(left out)'", text))


def _record(*args, **kwargs):
    record = _plain(*args, **kwargs)
    try:
        message = record.getMessage()
    except Exception:  # a record that can't be formatted is logging's own business
        return record
    if "api_key" in message or "api-key" in message:
        record.msg, record.args = redacted(message), ()
    return record


logging.setLogRecordFactory(_record)
