#!/usr/bin/env bash
# SPDX-License-Identifier: GPL-3.0-or-later
# Run parts of the tests one after the other, stop at the first that fails, and say at the end how long each took.
# usage: tests/parts.sh PART...   (each a target of the Makefile)
set -uo pipefail
cd "$(dirname "$0")/.." || exit
times=() code=0
for part in "$@"; do
  echo "== $part"
  began=$SECONDS
  make --no-print-directory "$part" || code=$?
  if ((code)); then word=FAILED; else word=passed; fi
  times+=("$(printf '%-20s %-8s %4d s' "$part" "$word" $((SECONDS - began)))")
  ((code)) && break
done
echo "== times"
printf '%s\n' "${times[@]}"
printf '%-29s %4d s\n' total $SECONDS
exit "$code"
