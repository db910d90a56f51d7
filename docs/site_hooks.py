"""What the site needs beyond its pages: navigation, languages, links out of docs/, the reference, notebooks."""

import re
import tomllib
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[([^\]\n]+)\]\(((?:\.\./)+[^)#\s]+)(#[^)]*)?\)")
CHAPTER = re.compile(r"course/(ko|en)/\d\d_\w+\.md")
FIRST = ("README", "index")  # in the navigation of a folder
# The guides in the order of use; others follow.
FIRST += ("train", "low_resource", "text_to_text", "tokenizers", "convert", "finetune", "train_from_nothing")
FIRST += ("own_model", "lora", "train_in_python", "load_and_generate", "decoding", "score_and_compare", "attention")
FIRST += ("publish", "serve", "backtranslate", "chatbot", "recurrent", "kernels")
# In a table, the name of a file, a test, or a class or function; it is no link yet.
PATH = r"(?:[\w.-]+/)*[\w-]+\.py|(?:tests|configuration)/[\w./-]+"
NAMED = re.compile(rf"(?<!\[)`({PATH}|heedful(?:\.\w+)+)(?:::\w+)?`")
WIDE = ("benchmarks.md", "records/measurements.md")  # its tables take the place of the table of contents
ROW = re.compile(r"^\|.*$", re.MULTILINE)
PAGE = re.compile(r"\[([^\]]+)\]\((?!\w+:|#)([^)\s]+)\)")
# The first cell of a notebook; where Heedful is installed it does nothing.
INSTALL = """\
try:
    import heedful
except ImportError:
    %pip install --quiet "heedful[plots] @ {source}"
"""
# What the menu of a Korean page calls the parts of the site.
MENU = {"Home": "처음", "Course": "영어 강의", "Guides": "안내서", "Studies": "실험"}
MENU |= {"Paper and code": "논문과 코드", "Measured and promised": "측정과 약속", "Records": "기록"}
MENU |= {"Reference": "레퍼런스"}
NOTEBOOK = {"ko": "노트북으로 내려받기", "en": "Download as a notebook"}


def on_config(config):
    """Read the repository's address; let a folder in the navigation stand for its pages, its README or index first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.repo_url = project.get("urls", {}).get("Repository")
    entries = {title: where for entry in config.nav for title, where in entry.items()}
    named = {each for where in entries.values() for each in ([where] if isinstance(where, str) else where)}
    config.nav = [{title: pages(where, named)} for title, where in entries.items()]
    return config


def pages(where: str | list[str], named: set[str]):
    """Return a page as it is, and of a folder, or in a list of both, the pages that are not named by themselves."""
    if isinstance(where, str) and not where.endswith("/"):
        return where
    found = []
    for each in [where] if isinstance(where, str) else where:
        stems = {path.stem for path in (ROOT / "docs" / each).glob("*.md")} if each.endswith("/") else ()
        order = sorted(stems, key=lambda stem: (FIRST.index(stem) if stem in FIRST else len(FIRST), stem))
        inside = [normpath(join(each, f"{stem}.md")) for stem in order]
        found += [page for page in inside if page not in named] if each.endswith("/") else [each]
    return found


def file_of(name: str) -> str | None:
    """Return the file of the repository that a name is of: its path there or in the package, a module, what it has."""
    if name.startswith(("heedful.", "heedful_lab.")):
        parts = public_names().get(name.removeprefix("heedful."), name).split(".")
        paths = ["/".join(parts[:count]) + ".py" for count in range(len(parts), 1, -1)]
    else:
        paths = [name, f"{name}/config.json"]
    places = [join(folder, path) for path in paths for folder in ("", "modeling", "modeling/heedful")]
    return next((place for place in places if (ROOT / place).is_file()), None)


def link_to(path: str, uri: str, config, files) -> str:
    """Return the address of a file of the repository; where that has none, a copy in the site is made."""
    if config.repo_url:
        return f"{config.repo_url.rstrip('/')}/blob/main/{path}"
    from mkdocs.structure.files import File

    copy = f"source/{path}.txt"
    if files.get_file_from_path(copy) is None:
        files.append(File.generated(config, copy, abs_src_path=str(ROOT / path)))
    return relpath(copy, dirname(uri) or ".")


def on_page_markdown(markdown: str, page, config, files):
    """Link what lies outside of docs/, fill the reference, and offer a chapter as a notebook."""
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
    text = (ROOT / "modeling" / "heedful" / "__init__.pyi").read_text(encoding="utf-8")
    return {name: home for home, name in re.findall(r"from (\S+) import (\w+)", text)}


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
