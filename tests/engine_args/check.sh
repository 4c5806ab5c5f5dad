#!/usr/bin/env bash
# SPDX-License-Identifier: GPL-3.0-or-later
# make check-engine-args: the real ServerArgs of SGLang over every command line of the inventories (and of units below the folders
# that are given), and the table of MoE methods against the engine's own modules. Its virtual environment (2.5 GB) lies in the cache, named by its list of packages; SGL_PYTHON names another one.
# usage: tests/engine_args/check.sh [FOLDER OF UNITS...]
set -euo pipefail
cd "$(dirname "$0")/../.."
here=tests/engine_args
python=${SGL_PYTHON:-}
if [[ -z $python ]]; then
  venv=${XDG_CACHE_HOME:-$HOME/.cache}/blackwell-dsv4/engine-args-$(sha256sum <$here/requirements.txt | cut -c 1-12)
  python=$venv/bin/python
  if [[ ! -e $venv/complete ]]; then
    base=$(command -v python3.11) || { echo "check-engine-args: skipped: needs python3.11, for which its packages are pinned"; exit 0; }
    torch=$(grep '^torch==' $here/requirements.txt)
    if ! "$base" -m pip install -qq --disable-pip-version-check --dry-run --ignore-installed --no-deps "$torch" 2>/dev/null; then
      echo "check-engine-args: skipped: pip finds no CPU build $torch (set PIP_FIND_LINKS to a folder that has it)"
      exit 0
    fi
    echo "check-engine-args: virtual environment $venv ..."
    rm -rf "$venv"
    "$base" -m venv "$venv"
    nice -n 10 "$python" -m pip install -qq --disable-pip-version-check --no-deps --requirement $here/requirements.txt
    touch "$venv/complete"
  fi
fi
"$python" $here/dump_flags.py --check files/sglang_flags.json 2>/dev/null
arguments=(--inventory inventory/blackwell8 --inventory inventory/rehearsal)
for folder in "$@"; do arguments+=(--units "$folder"); done
PYTHONWARNINGS=ignore nice -n 10 "$python" $here/check_engine_args.py "${arguments[@]}"
PYTHONWARNINGS=ignore nice -n 10 "$python" $here/moe_methods.py --check files/moe_methods.json 2>/dev/null
