"""Additions to the pages of the site: navigation, languages, links out of docs/, the reference, notebooks."""

import re
import tomllib
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[([^\]\n]+\n?[^\]\n]*)\]\(((?:\.\./)+[^)#\s]+)(#[^)]*)?\)")
CHAPTER = re.compile(r"course/(ko|en)/\d\d_\w+\.md")
FIRST = ("README", "index")  # pages that begin a folder in the menu
# A comment that the site replaces by the table of a command's options.
OPTIONS = re.compile(r"^<!-- options: ([\w -]+) -->$", re.MULTILINE)
# The name of a file, a test, a class or a function in a table, without a link.
PATH = r"(?:[\w.-]+/)*[\w-]+\.py|(?:tests|configuration)/[\w./-]+"
NAMED = re.compile(rf"(?<!\[)`({PATH}|heedful(?:\.\w+)+)(?:::\w+)?`")
# Pages with wide tables, which have no table of contents.
WIDE = ("benchmarks.md", "records/measurements.md", "recipe.md")
ROW = re.compile(r"^\|.*$", re.MULTILINE)
PAGE = re.compile(r"\[([^\]]+)\]\((?!\w+:|#)([^)\s]+)\)")
# The first cell of a notebook, which does nothing if Heedful is installed.
INSTALL = """\
try:
    import heedful
except ImportError:
    %pip install --quiet "heedful[plots] @ {source}"
"""
# The Korean titles in the menu of a Korean page.
MENU = {"Home": "처음", "Course": "영어 강의", "Guides": "안내서", "Studies": "실험"}
MENU |= {"Paper and code": "논문과 코드", "Measured and promised": "측정과 약속", "Records": "기록"}
MENU |= {"Reference": "레퍼런스"}
NOTEBOOK = {"ko": "노트북으로 내려받기", "en": "Download as a notebook"}


def on_config(config):
    """Take the repository's address from pyproject.toml, and replace each folder in the menu by its pages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.repo_url = project.get("urls", {}).get("Repository")
    named = set(re.findall(r"[\w/]+\.md", str(config.nav)))
    for entry in config.nav:
        for title, where in entry.items():
            if isinstance(where, str) and where.endswith("/"):
                entry[title] = [page for page in pages(where) if page not in named]
    return config


def pages(folder: str) -> list[str]:
    """Return the pages of a folder, its README or index first."""
    stems = {path.stem for path in (ROOT / "docs" / folder).glob("*.md")}
    order = sorted(stems, key=lambda stem: (stem not in FIRST, stem))
    return [normpath(join(folder, f"{stem}.md")) for stem in order]


def file_of(name: str) -> str | None:
    """Return the file of a name in the repository: the path of a file, a module, or a class or function in one."""
    if name.startswith(("heedful.", "heedful_lab.")):
        parts = public_names().get(name.removeprefix("heedful."), name).split(".")
        paths = ["/".join(parts[:count]) + ".py" for count in range(len(parts), 1, -1)]
    else:
        paths = [name, f"{name}/config.json"]
    places = [join(folder, path) for path in paths for folder in ("", "modeling", "modeling/heedful")]
    return next((place for place in places if (ROOT / place).is_file()), None)


def link_to(path: str, uri: str, config, files) -> str:
    """Return the address of a file of the repository, or of a copy in the site if the repository has no address."""
    if config.repo_url:
        return f"{config.repo_url.rstrip('/')}/blob/main/{path}"
    from mkdocs.structure.files import File

    copy = f"source/{path}.txt"
    if files.get_file_from_path(copy) is None:
        files.append(File.generated(config, copy, abs_src_path=str(ROOT / path)))
    return relpath(copy, dirname(uri) or ".")


def on_page_markdown(markdown: str, page, config, files):
    """Rewrite links out of docs/, fill the reference and the tables of options, and offer a chapter as a notebook."""
    uri = page.file.src_uri

    def rewritten(match: re.Match) -> str:
        text, target, anchor = match.groups()
        path = normpath(join("docs", dirname(uri), target))
        if path.startswith("docs/"):
            return match[0]
        if config.repo_url or (ROOT / path).is_file():
            return f"[{text}]({link_to(path, uri, config, files)}{anchor or ''})"
        return f"{text} (`{path}`)" if path not in text else text

    def linked(match: re.Match) -> str:
        path = file_of(match[1])
        return f"[{match[0]}]({link_to(path, uri, config, files)})" if path else match[0]

    markdown = LINK.sub(rewritten, markdown)
    if not uri.startswith("course/"):
        markdown = ROW.sub(lambda row: NAMED.sub(linked, row[0]), markdown)
    if uri == "reference/index.md":
        markdown += "".join(f"\n::: {home}.{name}\n" for name, home in sorted(public_names().items()))
    if uri == "reference/commands.md":
        markdown += "".join(
            f"\n## heedful {name}\n\n{command.help}\n\n{table(command)}" for name, command in commands()
        )
    markdown = OPTIONS.sub(lambda match: table(dict(commands())[match[1]]), markdown)
    if uri in WIDE:
        page.meta["hide"] = ["toc"]
    if CHAPTER.fullmatch(uri):
        # The first chapter with a term explains it, so earlier chapters come first in the search.
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


def commands(prefix: str = "", group=None):
    """Yield the name and the object of each command of `heedful`, also of those in groups such as `export`."""
    if group is None:
        from typer.main import get_command

        from heedful.cli.main import app

        group = get_command(app)
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if hasattr(command, "list_commands"):
            yield from commands(f"{prefix}{name} ", command)
        else:
            yield prefix + name, command


def table(command) -> str:
    """Return the arguments and options of a command as a table, from the help that the command prints."""
    import typer

    rows = ["| argument or option | meaning |", "|---|---|"]
    for parameter in command.params:
        if record := parameter.get_help_record(typer.Context(command)):
            name, meaning = record
            rows.append(f"| `{name}` | {meaning.replace('<', '&lt;').replace('|', '&#124;')} |")
    return "\n".join([*rows, ""])


def public_names() -> dict[str, str]:
    """Return the module of each public name, without importing any."""
    text = (ROOT / "modeling" / "heedful" / "__init__.pyi").read_text(encoding="utf-8")
    return {name: home for home, name in re.findall(r"from (\S+) import (\w+)", text)}


def write_notebook(markdown: str, path: Path, config, uri: str) -> None:
    """Write a chapter as a notebook that needs no other file: it installs Heedful and draws its figures."""
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
    """Return a link to a page with its whole address, or only the link's text if the site has no address."""
    page = normpath(join(dirname(uri), target)).replace(".md", ".html")
    return f"[{text}]({site_url.rstrip('/')}/{page})" if site_url else text
