"""The page on training in Python runs, cell by cell in a notebook's kernel, and prints what it shows."""

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "train_in_python.md"
# A block of Python and, right behind it, what it prints.
BLOCK = re.compile(r"```python\n(.*?)```\n\n```\n(.*?)```", re.DOTALL)


@pytest.fixture
def cell(tmp_path, monkeypatch):
    """Run a cell in a kernel such as a notebook has; return what it wrote on standard output and on standard error."""
    manager = pytest.importorskip("jupyter_client.manager")
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    (tmp_path / "work").mkdir()
    kernel, client = manager.start_new_kernel(cwd=str(tmp_path / "work"))

    def run(code):
        messages = []
        reply = client.execute_interactive(code, timeout=120, output_hook=messages.append)["content"]
        assert reply["status"] == "ok", "\n".join(reply["traceback"])
        streams = [message["content"] for message in messages if message["msg_type"] == "stream"]
        return tuple("".join(s["text"] for s in streams if s["name"] == name) for name in ("stdout", "stderr"))

    yield run
    client.stop_channels()
    kernel.shutdown_kernel(now=True)


@pytest.mark.slow
def test_the_page_on_training_in_python_prints_in_a_notebook_what_it_says_it_prints(cell):
    text = GUIDE.read_text(encoding="utf-8")
    blocks = BLOCK.findall(text)
    assert len(blocks) == text.count("```python") >= 5
    for code, shown in blocks:
        printed, told = cell(code)
        assert printed == shown, code
        assert ("update/s" in told and "100%" in told) == ("train(recipe)" in code), told
