#!/usr/bin/env bash
# SPDX-License-Identifier: GPL-3.0-or-later
# The playbooks on the newest ansible-core (2.21), where a Python 3.12 or newer is there.
# usage: tests/ansible_next.sh [PLAYBOOK-ARGUMENT ...]
# Without arguments: syntax of every playbook and a run of the inventory's own checks with every deprecation
# shown; any that this collection causes is a failure. With arguments: ansible-playbook with them.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${XDG_CACHE_HOME:-$HOME/.cache}/blackwell-dsv4

# A version manager's shim can be on PATH without its interpreter: what counts is that it runs.
python=
for candidate in python3.13 python3.12; do
  if "$candidate" -c 'import ensurepip' 2>/dev/null; then python=$candidate && break; fi
done
if [ -z "$python" ] && [ -d "$HOME/.pyenv/versions" ]; then
  python=$(find "$HOME/.pyenv/versions" -maxdepth 3 -path '*/bin/python3.1[23]' | sort | tail -n 1)
fi
if [ -z "$python" ]; then
  echo "ansible-core 2.21: not run, no Python 3.12 or newer here"
  exit 0
fi

hash=$(cat tests/requirements-next.txt <("$python" --version) | sha256sum | cut -c1-12)
venv=$cache/venv-next-$hash
if [ ! -e "$venv/.complete" ]; then
  rm -rf "$venv"
  "$python" -m venv "$venv"
  "$venv/bin/pip" install --quiet --requirement tests/requirements-next.txt
  touch "$venv/.complete"
fi
PATH=$venv/bin:$PATH
export ANSIBLE_DEPRECATION_WARNINGS=true
if [ $# -gt 0 ]; then
  exec ansible-playbook "$@"
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
for playbook in site verify rollback; do
  ansible-playbook "$playbook.yml" -i inventory/blackwell8 --syntax-check 2>&1 | tee -a "$log"
done
ansible-playbook playbooks/render.yml -i inventory/blackwell8 -e "render_dir=$(mktemp -d)" 2>&1 | tee -a "$log"
if grep -i 'deprecat' "$log"; then
  echo "ansible-core 2.21 calls something here deprecated; see the lines above" >&2
  exit 1
fi
ansible --version | sed -n 1p
