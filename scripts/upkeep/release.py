"""Build the distribution, and test it as a new user gets it: `make release`.

    python scripts/upkeep/release.py                    # everything
    python scripts/upkeep/release.py --only newest      # one environment
    python scripts/upkeep/release.py --only             # only the files, and what a tag needs

It builds an sdist and its wheel in dist/, checks metadata (twine), files and sizes, and installs the wheel into fresh
environments: with the oldest libraries, the newest, and each extra. In each one the README's commands make a small
run. It prints a line for each environment; the exit code is 1 if one fails.
"""

import argparse
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

from newest import README_RUN

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"
MOST_BYTES = 2_000_000  # of each file
BESIDE = {"LICENSE", "README.md", "pyproject.toml"}  # the package, in the sdist
SEVERAL = ("all", "dev")  # extras that combine others
# Import names that differ from the distribution's.
MODULES = {"protobuf": "google.protobuf", "mkdocs-material": "material"}


def read_project() -> dict[str, Any]:
    """Return the table `project` of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def build() -> Path:
    """Build both files, check them, and return the wheel."""
    for old in DIST.glob("*"):
        old.unlink()
    made = subprocess.run([sys.executable, "-m", "build", ROOT], capture_output=True, text=True, check=False)
    if made.returncode:
        sys.exit(made.stderr)
    files = sorted(DIST.iterdir())
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    tracked = set(
        subprocess.check_output(["git", "ls-files", "modeling/*/*", "configuration"], cwd=ROOT, text=True).split()
    )
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    check_same(sdist, packed & (tracked | BESIDE), tracked | BESIDE)
    installed = [
        re.sub("^modeling/", "", re.sub("^configuration/", "heedful/configuration/", each)) for each in tracked
    ]
    check_same(wheel, [name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name], installed)
    for file in files:
        print(f"{file.name}: {file.stat().st_size:,} bytes")
        if file.stat().st_size > MOST_BYTES:
            sys.exit(f"{file.name} must have at most {MOST_BYTES:,} bytes.")
    return wheel


def check_same(archive: Path, found: Any, expected: Any) -> None:
    """End the program if an archive's files are not exactly the expected ones."""
    if sorted(found) != sorted(expected):
        other = sorted({*found} ^ {*expected}) or "one twice"
        sys.exit(f"{archive.name} must hold each file of the package once, but differs by {other}.")


def missing_for_a_tag(project: dict[str, Any]) -> list[str]:
    """Return metadata that an index would show and that is missing."""
    version = re.search(r'__version__ = "(.*)"', (ROOT / "modeling/heedful/__init__.py").read_text(encoding="utf-8"))[
        1
    ]
    dated = re.compile(rf"^## {re.escape(version)}, \d{{4}}-\d\d-\d\d$", re.MULTILINE)
    missing = []
    if "Repository" not in project.get("urls", {}):
        missing.append("`Repository` under [project.urls] of pyproject.toml: the repository's address")
    if not dated.search((ROOT / "CHANGELOG.md").read_text(encoding="utf-8")):
        missing.append(f"the date in CHANGELOG.md: `## {version}, YYYY-MM-DD`")
    return missing


def modules_of(requirements: list[str]) -> list[str]:
    """Return the import names of an extra's distributions."""
    names = (re.match(r"[\w-]+", each)[0] for each in requirements)
    return [MODULES.get(name, name.replace("-", "_")) for name in names]


def failure(wheel: Path, extra: str, constraints: str | None, modules: list[str]) -> str | None:
    """Install the wheel into a fresh environment, make a small run, and return a failing command, or `None`."""
    with TemporaryDirectory() as place:
        python = Path(place) / "environment/bin/python"
        target = f"{wheel}[{extra}]" if extra else str(wheel)
        pinned = ["--constraint", ROOT / constraints] if constraints else []
        steps = [[sys.executable, "-m", "venv", python.parents[1]]]
        steps += [[python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", target, *pinned]]
        steps += [[python, "-c", f"import {name}"] for name in modules]
        steps += [[python, "-m", "heedful", *shlex.split(line)] for line in ("--version", *README_RUN)]
        for step in steps:
            result = subprocess.run([*map(str, step)], cwd=place, capture_output=True, text=True, check=False)
            if result.returncode:
                return f"{shlex.join(map(str, step[1:]))}: {result.stderr.strip()[-300:]}"
    return None


def main() -> None:
    """Build and test everything, or the chosen environments."""
    project = read_project()
    extras = {name: needs for name, needs in project["optional-dependencies"].items() if name not in SEVERAL}
    names = ["oldest", "newest", *extras]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=names, default=names, help="environments to try")
    only = parser.parse_args().only
    wheel, found = build(), {}
    for name in only:
        constraints = "constraints-oldest.txt" if name == "oldest" else None
        found[name] = failure(wheel, name if name in extras else "", constraints, modules_of(extras.get(name, [])))
        print(f"{name}: {found[name] or 'works'}", flush=True)
    missing = missing_for_a_tag(project)
    for line in missing:
        print(f"A tag needs {line}.")
    sys.exit(any(found.values()) or (not only and bool(missing)))


if __name__ == "__main__":
    main()
