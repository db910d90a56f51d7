"""Refuse large files that git knows and no list allows: models, data and pictures that a test or a run left behind.

    python scripts/upkeep/sizes.py

`make check` and pre-commit run it. It prints what it refuses, and exits 1.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST = 250_000  # bytes
# Larger files, each with the reason for which every clone carries it.
ALLOWED = {"tests/saved/transformer/model.safetensors": "weights of an earlier version, which later ones must read"}


def refused(root: Path, allowed: dict[str, str]) -> list[str]:
    """Return what is wrong with the sizes of the files that git knows, but for those that are deleted."""
    known = subprocess.check_output(["git", "ls-files", "-z"], cwd=root, text=True).split("\0")
    sizes = {name: (root / name).lstat().st_size for name in known if name and (root / name).is_file()}
    large = {name: size for name, size in sizes.items() if size > MOST}
    return [
        f"{name} must have at most {MOST:,} bytes, but has {size:,}: leave it out, or allow it with its reason in "
        "scripts/upkeep/sizes.py."
        for name, size in large.items()
        if name not in allowed
    ] + [f"{name} need not be allowed in scripts/upkeep/sizes.py." for name in allowed if name not in large]


if __name__ == "__main__":
    sys.exit("\n".join(refused(ROOT, ALLOWED)) or 0)
