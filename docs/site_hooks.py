"""What the site needs beyond its pages: navigation, languages, links out of docs/, the reference, notebooks."""

import ast
import re
import tomllib
from pathlib import Path
from posixpath import dirname, join, normpath

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[([^\]\n]+)\]\(((?:\.\./)+[^)#\s]+)(#[^)]*)?\)")
CHAPTER = re.compile(r"course/(ko|en)/\d\d_\w+\.md")
FIRST = ("README.md", "index.md")  # in the navigation of a folder
WIDE = ("benchmarks.md", "records/measurements.md")  # its tables take the place of the table of contents
PAGE = re.compile(r"\[([^\]]+)\]\((?!\w+:|#)([^)\s]+)\)")
# The first cell of a notebook; where Heedful is installed it does nothing.
INSTALL = """\
try:
    import heedful
except ImportError:
    %pip install --quiet "heedful[plots] @ {source}"
"""
# What the menu of a Korean page calls the parts of the site.
MENU = {"Home": "처음", "Course": "영어 강의", "Lecture notes": "강의 노트", "Guides": "안내서", "Studies": "실험"}
MENU |= {"Measured and promised": "측정과 약속", "Records": "기록", "Reference": "레퍼런스"}
NOTEBOOK = {"ko": "노트북으로 내려받기", "en": "Download as a notebook"}


def on_config(config):
    """Read the repository's address; let a folder in the navigation stand for its pages, its README or index first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.repo_url = project.get("urls", {}).get("Repository")
    config.nav = [{title: pages(where) for title, where in entry.items()} for entry in config.nav]
    return config


def pages(where: str):
    """Return a page as it is, and the pages of a folder, those of docs/ itself without the home page."""
    if not where.endswith("/"):
        return where
    folder = ROOT / "docs" / where
    names = sorted((path.name for path in folder.glob("*.md")), key=lambda name: (name not in FIRST, name))
    return [normpath(join(where, name)) for name in names if (where, name) != ("./", "index.md")]


def on_page_markdown(markdown: str, page, config, files):
    """Write links out of docs/ as plain code, fill the reference, and offer a chapter as a notebook."""
    uri = page.file.src_uri

    def rewritten(match: re.Match) -> str:
        text, target, anchor = match.groups()
        path = normpath(join("docs", dirname(uri), target))
        if path.startswith("docs/"):
            return match[0]
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor or ''})"
        return f"{text} (`{path}`)" if path not in text else text

    markdown = LINK.sub(rewritten, markdown)
    if uri == "reference/index.md":
        markdown += "".join(f"\n::: {home}.{name}\n" for name, home in sorted(public_names().items()))
    if uri in WIDE:
        page.meta["hide"] = ["toc"]
    if CHAPTER.fullmatch(uri):
        # Chapters explain a term where it comes first: in the search, earlier ones come before later ones.
        page.meta["search"] = {"boost": 12 - int(Path(uri).name[:2])}
        title, _, rest = markdown.partition("\n")
        link = f'<a href="{Path(uri).stem}.ipynb" download>{NOTEBOOK[uri.split("/")[1]]}</a>'
        notebook = Path(config.site_dir, uri).with_suffix(".ipynb")
        notebook.parent.mkdir(parents=True, exist_ok=True)
        write_notebook(markdown, notebook, config, uri)
        markdown = f"{title}\n\n{link}\n{rest}"
    return markdown


def on_page_context(context, page, config, nav):
    """Give a Korean page a Korean frame: its `lang`, its menu, its table of contents and the words of its search."""
    is_korean = page.file.src_uri.startswith("course/ko/")
    config.theme["language"] = "ko" if is_korean else "en"
    for item, entry in zip(nav.items, config.nav, strict=True):  # pages are rendered one after the other
        (title,) = entry
        item.title = MENU.get(title, title) if is_korean else title
    return context


def public_names() -> dict[str, str]:
    """Read which module each public name comes from, without importing any."""
    tree = ast.parse((ROOT / "modeling" / "heedful" / "__init__.py").read_text(encoding="utf-8"))
    values = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}
    return ast.literal_eval(values["_HOMES"])


def write_notebook(markdown: str, path: Path, config, uri: str) -> None:
    """Write a chapter as a notebook that needs no other file: it installs Heedful, and its cells draw the figures."""
    import jupytext
    from nbformat.v4 import new_code_cell

    notebook = jupytext.reads(re.sub(r"^!\[.*\n", "", markdown, flags=re.MULTILINE), fmt="md")
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = PAGE.sub(lambda match: _whole_link(*match.groups(), config.site_url, uri), cell.source)
    source = f"git+{config.repo_url}" if config.repo_url else ROOT.as_uri()
    notebook.cells.insert(0, new_code_cell(INSTALL.format(source=source)))
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    jupytext.write(notebook, path)


def _whole_link(text: str, target: str, site_url: str | None, uri: str) -> str:
    """Return a link to a page as one that leads there from anywhere, or its text where the site has no address."""
    page = normpath(join(dirname(uri), target)).replace(".md", ".html")
    return f"[{text}]({site_url.rstrip('/')}/{page})" if site_url else text
