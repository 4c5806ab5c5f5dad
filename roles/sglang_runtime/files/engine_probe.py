# Runs once in the finished environment of the engine; the last line is kept beside it.
import importlib.metadata
import importlib.util
import json

facts = {"sglang": importlib.metadata.version("sglang"), "arch_list": []}
if importlib.util.find_spec("sglang") is None:
    raise SystemExit("sglang is not importable")
if importlib.util.find_spec("torch") is not None:
    import torch

    facts["torch"] = torch.__version__
    # get_arch_list() is empty on a host whose driver is not loaded yet; this is what it reads.
    facts["arch_list"] = (torch._C._cuda_getArchFlags() or "").split()
print(json.dumps(facts, sort_keys=True))
