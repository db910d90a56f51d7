"""Run all or some chapters of the course, and write their output and figures into both languages.

python scripts/upkeep/course.py
python scripts/upkeep/course.py 02_rnn 06_qkv
"""

import contextlib
import io
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

COURSE = Path(__file__).parents[2] / "docs" / "course"
# A cell, followed by its output and figure, if any.
CELL = re.compile(
    r"```python\n(?P<code>.*?)```(?P<shown>\n\n```\n.*?```)?(?P<picture>\n\n!\[[^\]]*\]\(\.\./figures/(?P<figure>\S+)\))?",
    re.DOTALL,
)


def outputs_of(chapter: str, figures: Path | None = None) -> Iterator[str]:
    """Run the cells in order, and return their outputs; figures go into the folder `figures`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names: dict[str, object] = {}
    for cell in CELL.finditer(chapter):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(cell["code"], "cell", "exec"), names)
        if figures and cell["figure"]:
            with matplotlib.rc_context({"svg.hashsalt": cell["figure"], "svg.fonttype": "none"}):
                pyplot.savefig(figures / cell["figure"], metadata={"Date": None}, bbox_inches="tight")
        pyplot.close("all")
        yield printed.getvalue()


def main(names: list[str]) -> None:
    """Update the chapters with these names, or all."""
    for path in sorted(path for path in COURSE.glob("ko/[0-9]*.md") if not names or path.stem in names):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            outputs = list(outputs_of(path.read_text(encoding="utf-8"), COURSE / "figures"))
        for language in ("ko", "en"):
            chapter, left = COURSE / language / path.name, iter(outputs)

            def refreshed(cell: re.Match, left=left) -> str:
                output = next(left)
                shown = f"\n\n```\n{output.rstrip()}\n```" if output else ""
                return f"```python\n{cell['code']}```{shown}{cell['picture'] or ''}"

            chapter.write_text(CELL.sub(refreshed, chapter.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
