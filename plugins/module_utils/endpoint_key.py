# Copyright: blackwell.dsv4 contributors
# GNU General Public License v3.0-or-later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The endpoint's key for a module, from its argument or from a file, masked where masking does no harm."""

from __future__ import annotations

from ansible_collections.blackwell.dsv4.plugins.module_utils import verdict


def read(module, seen=(), warn=False):
    """The key, or None. ``seen``: texts of the result that would be censored by a key that is part of them."""
    key = module.params.get("api_key")
    path = module.params["api_key_file"]
    if path:
        try:
            with open(path, encoding="utf-8") as handle:
                key = handle.read().strip()
        except OSError as exc:
            module.fail_json(msg="api_key_file cannot be read: %s" % exc)
        if key:
            module.no_log_values.add(key)
    if key and (verdict.is_placeholder(key) or any(key in text for text in seen)):
        module.no_log_values.discard(key)
        if warn:
            module.warn("the API key is a placeholder or a common word: it protects nothing and is not masked in the result")
    return key or None
