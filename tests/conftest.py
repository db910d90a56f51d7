"""No test reaches for the network, for a second core, or for a graphics card: those are for `make gpu`."""

import gc
import io
import os
import re
import shutil
import sys
import tempfile
from importlib.util import find_spec
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"
# The figures of the tests are the CPU's; the processes that they start inherit this.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Caches of this process alone: processes of one cache wait for each other, and read what the other half wrote.
# A worker of pytest-xdist begins with the environment of the process that started it.
os.environ["HF_HOME"] = (
    f"{os.environ['HF_HOME']}/{os.environ['PYTEST_XDIST_WORKER']}"
    if "PYTEST_XDIST_WORKER" in os.environ
    else tempfile.mkdtemp(prefix="heedful-tests-")
)
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Products of a thousand shapes, of which oneDNN keeps code and memory otherwise, are of no use to the next test.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")

import pytest
import torch
from accelerate.utils import memory

CACHES = os.environ["HF_HOME"]
# Here too, for fixtures of whole modules, which come before those of functions: sums over two threads differ in bits.
torch.set_num_threads(1)


# Packages of extras: a test of one that is not installed is skipped.
OPTIONAL = (
    "ctranslate2",
    "ipykernel",
    "jupytext",
    "koreanize_matplotlib",
    "matplotlib",
    "mkdocs",
    "nbclient",
    "num2words",
)
OPTIONAL += ("onnx", "onnxruntime", "onnxscript", "optuna", "peft", "schedulefree", "sentencepiece", "tensorboard")
OPTIONAL += ("torchao", "trackio")
ABSENT = "|".join(name for name in OPTIONAL if find_spec(name) is None)
MISSING = re.compile(rf"No module named '({ABSENT})\b|\b({ABSENT})\b[^\n]{{,30}}: pip install 'heedful")


def pytest_configure(config):
    """Make our own use of what is deprecated an error: of the package, its tests, our scripts and code in the docs."""
    support = (path.stem for path in (config.rootpath / "tests" / "support").glob("*.py"))
    ours = "|".join(["heedful", "transformers_modules", "test_", "conftest", "script_", "<", *support])
    for kind in ("DeprecationWarning", "FutureWarning"):
        config.addinivalue_line("filterwarnings", f"error::{kind}:({ours})")
    # Here too, for fixtures of modules, which come before those of functions: sums over two threads differ in bits.
    torch.set_num_threads(config.option.threads)
    if config.option.ice_lake:
        found = torch.cpu.get_capabilities() | ICE_LAKE
        torch.cpu.get_capabilities = lambda: found


def pytest_unconfigure():
    shutil.rmtree(CACHES, ignore_errors=True)


def missing_extra(text):
    """Return the package of an extra that is not installed, if a text says that it is needed."""
    found = MISSING.search(text) if ABSENT else None
    return found and (found[1] or found[2])


def skipped_without_extra(report, place):
    """Return a failed report as skipped where what failed is the import of a package that is not installed."""
    if report.failed and (extra := missing_extra(str(report.longrepr))) is not None:
        report.outcome, report.longrepr = "skipped", (str(place), None, f"Skipped: {extra} is not there")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return skipped_without_extra((yield), collector.path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    return skipped_without_extra((yield), item.path)


@pytest.fixture(autouse=True, scope="module")
def _few_collections_of_garbage():
    """Collect garbage once a file, without what is loaded; accelerate would collect it whenever training begins."""
    gc.collect()
    gc.freeze()
    memory.gc = SimpleNamespace(collect=lambda: None)


@pytest.fixture
def heedful_command(monkeypatch, capsys):
    """Run the command `heedful` in this process; return its exit code, output and errors."""
    from transformers.utils import logging

    from heedful.cli import main as cli

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()

    def run(*arguments, stdin=None):
        monkeypatch.setattr(sys, "argv", ["heedful", *map(str, arguments)])
        if stdin is not None:
            stream = io.BytesIO(stdin if isinstance(stdin, bytes) else stdin.encode())
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        output = capsys.readouterr()
        if (extra := missing_extra(output.err)) is not None:
            pytest.skip(f"{extra} is not there")
        return ended.value.code or 0, output.out, output.err

    yield run
    logging.set_verbosity(verbosity)
    if bars:
        logging.enable_progress_bar()


@pytest.fixture
def printed(heedful_command):
    """Run a command that ends well, and return what it prints."""

    def run(*arguments, **stdin):
        code, output, errors = heedful_command(*arguments, **stdin)
        assert code == 0, (arguments, errors)
        return output

    return run


@pytest.fixture
def refused(heedful_command):
    """Run a command that is a user's mistake: exit code 2, nothing printed, no traceback; return the one message."""

    def run(*arguments, **stdin):
        code, output, errors = heedful_command(*arguments, **stdin)
        assert (code, output) == (2, ""), arguments
        assert "Traceback" not in errors
        assert errors.count("heedful: ") == len(re.findall("^heedful: ", errors, re.MULTILINE)) == 1
        return errors[errors.index("heedful: ") :].strip()

    return run


@pytest.fixture(autouse=True)
def one_thread_and_one_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def fresh_accelerate():
    """Forget the precision of earlier runs in this process, and what TrainingArguments write into the environment."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    environment = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)
