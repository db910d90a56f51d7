"""Refuse unlisted large files in git, such as models, data and pictures left by a test or run.

    python scripts/upkeep/sizes.py

`make check` and pre-commit run it. It prints refused files and exits with 1.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST = 250_000  # bytes
# Larger files, each with its reason.
ALLOWED = {"tests/saved/transformer/model.safetensors": "weights of an earlier version, which later ones must load"}


def refused(root: Path, allowed: dict[str, str]) -> list[str]:
    """Return errors in the sizes of files in git, except deleted ones."""
    known = subprocess.check_output(["git", "ls-files", "-z"], cwd=root, text=True).split("\0")
    sizes = {name: (root / name).lstat().st_size for name in known if name and (root / name).is_file()}
    large = {name: size for name, size in sizes.items() if size > MOST}
    return [
        f"{name} must have at most {MOST:,} bytes, but has {size:,}: leave it out, or allow it with its reason in "
        "scripts/upkeep/sizes.py."
        for name, size in large.items()
        if name not in allowed
    ] + [f"{name} need no entry in scripts/upkeep/sizes.py." for name in allowed if name not in large]


if __name__ == "__main__":
    sys.exit("\n".join(refused(ROOT, ALLOWED)) or 0)
