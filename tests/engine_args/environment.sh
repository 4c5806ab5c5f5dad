#!/usr/bin/env bash
# SPDX-License-Identifier: GPL-3.0-or-later
# Prints the interpreter of an environment that has the engine and PyTorch for the CPU (2.5 GB in the cache, named by its list of
# packages), made on first use; prints nothing where it cannot be made, and says why on stderr. SGL_PYTHON names another interpreter.
set -euo pipefail
cd "$(dirname "$0")"
if [[ -n ${SGL_PYTHON:-} ]]; then
  echo "$SGL_PYTHON"
  exit 0
fi
venv=${XDG_CACHE_HOME:-$HOME/.cache}/blackwell-dsv4/engine-args-$(sha256sum <requirements.txt | cut -c 1-12)
if [[ ! -e $venv/complete ]]; then
  base=$(command -v python3.11) || { echo "engine's environment: skipped: needs python3.11, for which its packages are pinned" >&2; exit 0; }
  torch=$(grep '^torch==' requirements.txt)
  if ! "$base" -m pip install -qq --disable-pip-version-check --dry-run --ignore-installed --no-deps "$torch" 2>/dev/null; then
    echo "engine's environment: skipped: pip finds no CPU build $torch (set PIP_FIND_LINKS to a folder that has it)" >&2
    exit 0
  fi
  echo "engine's environment: $venv ..." >&2
  rm -rf "$venv"
  "$base" -m venv "$venv"
  nice -n 10 "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --requirement requirements.txt >&2
  touch "$venv/complete"
fi
echo "$venv/bin/python"
