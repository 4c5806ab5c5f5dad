#!/usr/bin/env bash
# SPDX-License-Identifier: GPL-3.0-or-later
# make check-engine-args: the real ServerArgs of SGLang over every command line of the inventories (and of units below the folders
# that are given), and the table of MoE methods against the engine's own modules.
# usage: tests/engine_args/check.sh [FOLDER OF UNITS...]
set -euo pipefail
cd "$(dirname "$0")/../.."
here=tests/engine_args
python=$($here/environment.sh)
[[ -n $python ]] || exit 0
"$python" $here/dump_flags.py --check files/sglang_flags.json 2>/dev/null
arguments=(--inventory inventory/blackwell8 --inventory inventory/rehearsal)
for folder in "$@"; do arguments+=(--units "$folder"); done
PYTHONWARNINGS=ignore nice -n 10 "$python" $here/check_engine_args.py "${arguments[@]}"
PYTHONWARNINGS=ignore nice -n 10 "$python" $here/moe_methods.py --check files/moe_methods.json 2>/dev/null
