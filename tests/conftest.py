"""No test reaches for the network, for a second core, or for a graphics card: those are for `make gpu`."""

import gc
import io
import os
import re
import shutil
import sys
import tempfile
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

pytest_plugins = ["learned"]
CACHES = os.environ["HF_HOME"]
ICE_LAKE = {"cpu_name": "Intel Xeon Platinum 8375C", "avx512_bf16": False, "amx_bf16": False}


def pytest_addoption(parser):
    """Let `make machines` compute as on another machine."""
    parser.addoption("--threads", type=int, default=1, help="Of torch in this process.")
    parser.addoption("--ice-lake", action="store_true", help="Be on Intel's without bfloat16, in this process.")


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
def one_thread_and_one_seed(pytestconfig):
    torch.set_num_threads(pytestconfig.option.threads)
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
