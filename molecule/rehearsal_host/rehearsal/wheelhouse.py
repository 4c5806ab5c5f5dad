from pathlib import Path
def ensure(): return Path("/nonexistent")
