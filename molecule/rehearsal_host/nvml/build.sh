#!/bin/sh
# SPDX-License-Identifier: GPL-3.0-or-later
# Build the stand-in NVML and CUDA libraries and nvidia-smi: build.sh OUTDIR [VERSION]
# VERSION is the driver version that the libraries belong to.
set -eu
out=${1:?usage: build.sh OUTDIR [VERSION]}
version=${2:-580.95.05}
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
cc=${CC:-gcc}
case $version in
    *[!0-9.]*|'') echo "build.sh: '$version' is not a driver version" >&2; exit 2 ;;
esac
mkdir -p "$out"
"$cc" -std=gnu11 -O2 -Wall -Wextra -Werror -fPIC -shared -fvisibility=hidden -DDRIVER_VERSION="\"$version\"" \
    -Wl,-soname,libnvidia-ml.so.1 -o "$out/libnvidia-ml.so.$version" "$here/nvml.c" -pthread
ln -sfn "libnvidia-ml.so.$version" "$out/libnvidia-ml.so.1"
"$cc" -std=gnu11 -O2 -Wall -Wextra -Werror -fPIC -shared -fvisibility=hidden \
    -Wl,-soname,libcuda.so.1 -o "$out/libcuda.so.$version" "$here/cuda.c" -ldl
ln -sfn "libcuda.so.$version" "$out/libcuda.so.1"
"$cc" -std=gnu11 -O2 -Wall -Wextra -Werror -o "$out/nvidia-smi" "$here/nvidia-smi.c" -ldl
