"""Run transformers' own common model tests against Heed: `make conformance`.

The tests of the installed version are fetched into `.cache/conformance/`: from transformers' source distribution on
PyPI with pip, and those of generation and export from GitHub or a checkout (`--tests FOLDER`). `suite/` adds missing
files and the adapters to our models. pytest runs all tests with tiny models: Heed, its recurrent models, and Marian,
BART and T5. `--write` puts the printed report into docs/conformance.md. The exit status is 1 if Heed fails a test, or
skips a test that Marian runs.

    python scripts/conformance/run.py --models heed marian -k "not fsdp"
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path

from report import faults, read_outcomes, report

ROOT = Path(__file__).resolve().parents[2]
SUITE = Path(__file__).resolve().parent / "suite"
CACHE = ROOT / ".cache" / "conformance"
DOCUMENT = ROOT / "docs" / "conformance.md"
BEGIN, END = "<!-- begin: written by make conformance -->", "<!-- end -->"
MODELS = ("heed", "heed_rnn", "marian", "bart", "t5", "tokenizers")
# An import of transformers' tests that Heed does not need.
TEST_LIBRARY = "parameterized==0.9.0"
# Generation and export tests: only in the repository.
IN_REPOSITORY = ("generation/test_utils.py", "exporters/test_export.py")
REPOSITORY = "https://raw.githubusercontent.com/huggingface/transformers/v{release}/tests/{name}"
# Our files, used only if the source distribution lacks them.
STAND_INS = (
    "distributed_testing_utils.py",
    "exporters/test_export.py",
    "generation/test_utils.py",
    "utils/test_configuration_utils.py",
)


def pip(*arguments: str):
    """Run pip quietly with its configured index."""
    subprocess.run([sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"], check=True)


def fetch(release: str) -> Path:
    """Return the folder of transformers' tests and their library, fetched at first use.

    Args:
        release: Version of transformers.
    """
    folder = CACHE / release
    if folder.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        new = Path(temporary)
        pip("download", "--no-deps", "--no-binary=transformers", "--dest", str(new), f"transformers=={release}")
        (archive,) = new.glob("transformers-*.tar.gz")
        with tarfile.open(archive) as files:
            top = f"{archive.name.removesuffix('.tar.gz')}/"
            members = [member for member in files.getmembers() if member.name.startswith(f"{top}tests/")]
            files.extractall(new / "unpacked", members=members, filter="data")
        shutil.move(new / "unpacked" / top / "tests", new / "fetched" / "tests")
        pip("install", "--no-deps", "--target", str(new / "fetched" / "libraries"), TEST_LIBRARY)
        (new / "fetched").rename(folder)
    return folder


def add_from_repository(fetched: Path, release: str) -> str:
    """Add the tests of generation and export to the fetched ones, and return their source.

    Args:
        fetched: Folder of the fetched tests.
        release: Version of transformers; its tag is fetched.
    """
    missing = [name for name in IN_REPOSITORY if not (fetched / "tests" / name).exists()]
    texts = {}
    for name in missing:
        address = REPOSITORY.format(release=release, name=name)
        try:
            with urllib.request.urlopen(address, timeout=20) as answer:
                texts[name] = answer.read()
        except (urllib.error.URLError, TimeoutError) as error:
            print(f"{address} is not available ({error}): our own tests are used instead", file=sys.stderr)
            return "Heedful's own, instead of the repository's"
        print(f"fetched {address}", file=sys.stderr)
    for name, text in texts.items():
        (fetched / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (fetched / "tests" / name).write_bytes(text)
    return f"transformers' repository, tag v{release}"


def lay_out(fetched: Path, folder: Path, checkout: Path | None = None):
    """Combine the fetched tests and our files as the package `tests` in an empty folder.

    Args:
        fetched: Folder of the fetched tests.
        folder: Folder for `tests/`.
        checkout: Folder of transformers' repository, for the tests of generation and export.
    """
    shutil.copytree(fetched / "tests", folder / "tests")
    for name in IN_REPOSITORY if checkout else ():
        (folder / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkout / "tests" / name, folder / "tests" / name)
    for file in sorted(SUITE.rglob("*.py")):
        name = file.relative_to(SUITE)
        target = folder / "tests" / name
        if name.as_posix() in STAND_INS and target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    for package in [folder / "tests", *(path for path in (folder / "tests").rglob("*") if path.is_dir())]:
        (package / "__init__.py").touch()
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")


def run_tests(fetched: Path, folder: Path, models: list[str], expression: str) -> Path:
    """Run pytest and return the file of the outcomes.

    Args:
        fetched: Folder of the fetched tests and their `libraries`.
        folder: Folder from `lay_out`.
        models: Names of `suite/models/test_*.py`.
        expression: pytest's `-k`.

    Raises:
        SystemExit: If pytest itself failed.
    """
    outcomes = folder / "outcomes.json"
    paths = [os.environ.get("PYTHONPATH", ""), str(folder), str(fetched / "libraries")]
    environment = {
        **{"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ},
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        "pytest.ini",
        "-q",
        "--tb=short",
        "-W",
        "ignore",
        "-W",
        "always::FutureWarning",
    ]
    command += ["-p", "no:cacheprovider", "--timeout=600", "--outcomes", str(outcomes), "-k", expression]
    command += [f"tests/models/test_{model}.py" for model in models]
    log = CACHE / f"pytest-{fetched.name}.log"
    with log.open("w", encoding="utf-8") as output:
        finished = subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=output, check=False)
    print(f"pytest's output is in {log.relative_to(ROOT)}", file=sys.stderr)
    if finished.returncode not in (0, 1):
        sys.exit(f"pytest ended with {finished.returncode}; the last lines are\n{log.read_text()[-2000:]}")
    return outcomes


def write(text: str):
    """Replace the generated part of docs/conformance.md."""
    document = DOCUMENT.read_text(encoding="utf-8")
    before, rest = document.split(BEGIN)
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


def main():
    """Fetch, run, report."""
    parser = argparse.ArgumentParser(description="Run transformers' own common model tests against Heed.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="models to test")
    parser.add_argument("-k", dest="expression", default="", help="only tests with matching names, as in pytest's -k")
    parser.add_argument("--write", action="store_true", help="put the report into docs/conformance.md")
    parser.add_argument("--tests", type=Path, metavar="FOLDER", help="checkout of the installed transformers")
    options = parser.parse_args()
    lacking = [name for name in IN_REPOSITORY if options.tests and not (options.tests / "tests" / name).is_file()]
    if lacking:
        parser.error(f"`--tests` must be a checkout of transformers, but {options.tests} lacks tests/{lacking[0]}.")
    if options.write and (options.expression or set(options.models) != set(MODELS)):
        parser.error("`--write` must be given without `--models` and `-k`, because the page reports the whole suite.")

    versions = {name: version(name) for name in ("transformers", "torch", "tokenizers")}
    fetched = fetch(versions["transformers"])
    origin = f"transformers' repository, {options.tests}"
    if not options.tests:
        origin = add_from_repository(fetched, versions["transformers"])
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        lay_out(fetched, Path(temporary), options.tests)
        outcomes = read_outcomes(run_tests(fetched, Path(temporary), options.models, options.expression))
    text = report(outcomes, {**versions, "Python": platform.python_version()}, origin)
    print(text)
    if options.write:
        write(text)
    sys.exit(1 if faults(outcomes) else 0)


if __name__ == "__main__":
    main()
