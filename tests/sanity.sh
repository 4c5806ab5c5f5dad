#!/usr/bin/env bash
# SPDX-License-Identifier: GPL-3.0-or-later
# ansible-test sanity --local, without containers and without Ansible's file host.
# usage: tests/sanity.sh   (ansible-test on PATH)
#
# ansible-test wants the tree at ansible_collections/<namespace>/<name> for real (a link is resolved and
# refused), and fetches a get-pip script for each of its environments; the stand-in below, put where
# ansible-test looks first, uses the interpreter's own ensurepip instead.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/blackwell-dsv4/sanity
tree=$cache/ansible_collections/blackwell/dsv4
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9

mkdir -p "$HOME/.ansible/test/cache"
for version in 24_2 25_2; do
  cat >"$HOME/.ansible/test/cache/get_pip_$version.py" <<'PY'
import subprocess
import sys

if __name__ == "__main__":
    wanted = [word for word in sys.argv[1:] if word.startswith("pip==")]
    # In this process ensurepip would switch off pip's configuration for what follows.
    subprocess.check_call([sys.executable, "-m", "ensurepip", "--default-pip"], stdout=subprocess.DEVNULL)
    subprocess.check_call([sys.executable, "-m", "pip", "install", "--quiet", *wanted])
PY
done

# A copy of what git tracks or would track, as a repository of its own: ansible-test asks git for the files.
rm -rf "$cache/ansible_collections"
mkdir -p "$tree"
git -C "$root" ls-files -z --cached --others --exclude-standard | (cd "$root" && xargs -0 tar --no-recursion -cf -) | tar -C "$tree" -xf -
cd "$tree"
git init --quiet && git add --all
python=$(python3 -c 'import sys; print(f"{sys.version_info.major}.{sys.version_info.minor}")')
# Shims of version managers break the "compile" test: the environment's programs and the system's only.
PATH=$(dirname "$(command -v ansible-test)"):/usr/sbin:/usr/bin:/sbin:/bin \
  ansible-test sanity --local --color no --python "$python" "$@"
