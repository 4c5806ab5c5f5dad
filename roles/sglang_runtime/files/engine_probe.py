# Runs once in the finished environment of the engine; the last line is kept beside it.
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import sysconfig

facts = {"sglang": importlib.metadata.version("sglang"), "arch_list": []}
if importlib.util.find_spec("sglang") is None:
    raise SystemExit("sglang is not importable")
if importlib.util.find_spec("torch") is not None:
    # At its first start the engine compiles kernels: Triton with gcc and Python.h, its own with c++ and ninja.
    needed = {word: shutil.which(word) for word in ("gcc", "c++")}
    needed["ninja"] = os.path.exists(os.path.join(sys.prefix, "bin/ninja"))
    needed["Python.h"] = os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))
    if not all(needed.values()):
        raise SystemExit("the engine cannot compile its kernels without " + ", ".join(name for name, found in needed.items() if not found))
    import torch

    facts["torch"] = torch.__version__
    # get_arch_list() is empty on a host whose driver is not loaded yet; this is what it reads.
    facts["arch_list"] = (torch._C._cuda_getArchFlags() or "").split()
print(json.dumps(facts, sort_keys=True))
