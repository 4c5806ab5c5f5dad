#!/usr/bin/env bash
# SPDX-License-Identifier: GPL-3.0-or-later
# The whole main job on the rehearsal host: boot it when it is not there, site.yml, verify.yml, the table.
# Called by `make rehearse`, with the virtual environment first in PATH. Words after it go to site.yml.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit

step() {
  local began=$SECONDS code=0
  echo "== $*"
  "$@" || code=$?
  echo "== $1 ${2##*/} ended with $code after $((SECONDS - began)) s"
  return "$code"
}

main() {
  step python molecule/rehearsal_host/host.py up || return
  step ansible-playbook site.yml -i inventory/rehearsal "$@" || return
  step ansible-playbook verify.yml -i inventory/rehearsal
}

code=0
main "$@" || code=$?
PYTHONPATH=.collections python molecule/rehearsal_host/last_table.py reports/rehearsal
if ((code)); then word="failed (exit code $code)"; else word="done"; fi
printf 'rehearse: %s in %d min %02d s\n' "$word" $((SECONDS / 60)) $((SECONDS % 60))
exit "$code"
