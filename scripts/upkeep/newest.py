"""Check Heedful with the installed libraries; `make newest` checks the newest ones.

    .venv-newest/bin/python scripts/upkeep/newest.py
    python scripts/upkeep/newest.py --readme    # only the README's commands

It runs the README's commands on a small run, the tests, and the folders that each version of transformers saves (with
the environments of `make test` and `make oldest`, if they exist). It prints a line for each version; the exit code is
1 if something fails.
"""

import os
import shlex
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = {"oldest": ".venv-oldest", "pinned": ".venv", "newest": ".venv-newest"}
BESIDE = ("torch", "accelerate", "tokenizers", "datasets", "huggingface_hub", "peft")
README_RUN = (
    "train quickstart output=run data.train=builtin:train:2000 optimization.max_updates=30 validation.every_updates=9",
    "evaluate run/model --data builtin:compositional:20 --source ko --target en",
    "translate run/model '누가 사탕을 맛보고 있었어요?' --num-beams 4 --n-best 2 --scores",
)


def pytest(*arguments: str, **environment: str) -> dict[str, int]:
    """Run pytest in an environment, and return the numbers of passed, failed and skipped tests."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-m", "pytest", "--numprocesses", "auto", "--maxprocesses", "4", "--dist", "loadfile"]
        command = [sys.executable, *options, f"--junitxml={report}", *arguments]
        subprocess.run(command, cwd=ROOT, check=False, env={**os.environ, **environment})
        suite = ElementTree.parse(report).getroot()[0]
    counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    return {"passed": counts["tests"] - failed - counts["skipped"], "failed": failed, "skipped": counts["skipped"]}


def summary(counts: dict[str, int]) -> str:
    """Return the test results as text."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def first_failure() -> str | None:
    """Run the README's commands on a small run, and return the first that fails, or `None`."""
    with tempfile.TemporaryDirectory() as folder:
        for line in README_RUN:
            command = [sys.executable, "-m", "heedful", *shlex.split(line)]
            if subprocess.run(command, cwd=folder, check=False).returncode:
                return line.split()[0]
    return None


def main() -> None:
    """Run everything, then print the results."""
    failure = first_failure()
    if "--readme" in sys.argv[1:]:
        sys.exit(None if failure is None else f"`heedful {failure}` of the README's commands fails")
    suite = pytest()
    test = "tests/house/test_versions.py::test_a_folder_means_the_same_to_all_versions_with_heedful_and_without"
    here = {name: ROOT / place for name, place in ENVIRONMENTS.items() if (ROOT / place).is_dir()}
    folders = {name: pytest("-m", "", f"{test}[{name}]") for name in here}
    print()
    for name, place in here.items():
        found = subprocess.run(
            [place / "bin" / "python", "-c", "from importlib.metadata import version; print(version('transformers'))"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        line = "skipped (it needs two environments)" if folders[name]["skipped"] else summary(folders[name])
        line = "every version reads them, with Heedful and without" if folders[name]["passed"] else line
        print(f"transformers {found} ({name}): folders that it saves: {line}")
    beside = ", ".join(f"{library} {version(library)}" for library in BESIDE)
    readme = "works" if failure is None else f"fails at `heedful {failure}`"
    works = not suite["failed"] and failure is None and not any(found["failed"] for found in folders.values())
    verdict = "works" if works else "DOES NOT WORK"
    outcome = f"tests {summary(suite)}; README run {readme}"
    print(f"transformers {version('transformers')} with {beside}: {verdict}: {outcome}")
    sys.exit(not works)


if __name__ == "__main__":
    main()
