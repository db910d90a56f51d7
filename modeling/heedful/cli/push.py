"""`heedful push`: upload a model to the Hub."""

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from heedful.cli import options

Form = Literal["heed", "transformers"]


def push(
    model: options.Model,
    repository: Annotated[str, Argument(metavar="REPO", help="Id on the Hub, such as name/model.")],
    private: Annotated[bool | None, Option("--private/--public", help="Visibility if new. Default: owner's.")] = None,
    revision: Annotated[str | None, Option(help="Branch, created if missing. Default: main.")] = None,
    message: Annotated[str | None, Option(help="Commit message.")] = None,
    form: Annotated[Form, Option("--as", help="With Heed's code, or in a form that needs no code.")] = "heed",
    dry_run: Annotated[bool, Option("--dry-run", help="Check and list the files without sending them.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Push a model to the Hub with its code, tokenizers and card, in one commit."""
    from heedful.cards import hub

    in_form: Any = nullcontext
    if form == "transformers":
        from heedful.export.transformers_export import stock_form as in_form
    options.quieten()
    with in_form(model) as folder:
        if dry_run:
            files = hub.checked_files(Path(folder), repository)
            return options.print_result({"repository": repository, "files": files}, "\n".join(files), as_json)
        pushed = hub.push(folder, repository, private=private, revision=revision, message=message)
    text = f"{pushed.repository} at revision {pushed.commit}\n{pushed.url}"
    return options.print_result(asdict(pushed), text, as_json)
