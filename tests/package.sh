#!/usr/bin/env bash
# SPDX-License-Identifier: GPL-3.0-or-later
# Build the collection, install it into an empty folder and check its playbooks from there, as a user of the
# tarball would.   usage: tests/package.sh   (ansible's programs on PATH)
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

git -C "$root" ls-files -z --cached --others --exclude-standard -- . ':!.collections' |
  (cd "$root" && xargs -0 tar --no-recursion -cf -) | (mkdir "$work/source" && tar -C "$work/source" -xf -)
cd "$work"
ansible-galaxy collection build "$work/source" --output-path "$work/dist"
ansible-galaxy collection install --offline --collections-path "$work/installed" "$work"/dist/blackwell-dsv4-*.tar.gz
: >ansible.cfg  # nobody else's settings
export ANSIBLE_COLLECTIONS_PATH="$work/installed" ANSIBLE_CONFIG="$work/ansible.cfg"
for playbook in "$root"/playbooks/*.yml; do
  ansible-playbook "blackwell.dsv4.$(basename "$playbook" .yml)" -i "$root/inventory/blackwell8" --syntax-check
done
# One that touches no host is run, with what the tarball holds.
ansible-playbook blackwell.dsv4.render -i "$root/inventory/blackwell8" -e render_dir="$work/render"
test -s "$work/render/blackwell8/ports.txt"
