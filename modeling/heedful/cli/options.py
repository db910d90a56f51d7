"""What several commands share: their options and arguments, and a quiet terminal."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

Device = Annotated[str | None, Option(help="cpu, cuda, cuda:1, mps; by default a GPU where there is one.")]
Beams = Annotated[int | None, Option("--num-beams", help="Beam width; 1 is greedy. Default: the model's own.")]
MaxNewTokens = Annotated[int | None, Option(help="Longest translation in tokens. Default: the model's own.")]
TargetLanguage = Annotated[str | None, Option("--to", help="Target language, of a model that knows several.")]
TokenBudget = Annotated[int, Option(help="Padded source tokens times beams in one batch.")]
Engine = Annotated[
    Literal["auto", "native", "generate", "ctranslate2"],
    Option(help="What decodes: `native` is Heed's own decoder for the CPU; `auto` takes it where it can do it."),
]
Precision = Annotated[
    Literal["float32", "bfloat16", "int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16"],
    Option(help="Of the native decoder's weights (float32, bfloat16, int8), or of CTranslate2's (any)."),
]
Model = Annotated[Path, Argument(metavar="MODEL", help="Folder of a saved model.")]
AnyModel = Annotated[str, Argument(metavar="MODEL", help="Folder of a saved model, or its id on the Hub.")]
Revision = Annotated[str | None, Option(help="Branch, tag or commit of a model on the Hub.")]
RecipeFile = Annotated[Path, Argument(metavar="RECIPE.yaml", help="The recipe.")]
Overrides = Annotated[list[str] | None, Argument(metavar="[KEY=VALUE]…", help="Such as optimization.max_updates=500.")]
AsJson = Annotated[bool, Option("--json", help="Print the results as JSON.")]
NewFolder = Annotated[Path, Argument(metavar="OUT", help="Folder to write; it must not exist.")]


# All but the tab and the end of a line.
CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    """Write the control characters in a text as escapes (and as JSON knows them): a terminal would obey them."""
    return CONTROL_CHARACTER.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class TerminalOutput:
    """Standard output at a terminal, where control characters of models and data are shown and not obeyed."""

    def __init__(self, stream: Any):
        self.stream = stream

    def write(self, text: str) -> int:
        """Write a text."""
        self.stream.write(visible(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def quieten() -> None:
    """Leave the terminal to this program: no progress bars of transformers, no warnings about its own insides."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def print_result(values: dict[str, Any], text: object, as_json: bool) -> None:
    """Print a result for a program, as JSON, or for a person."""
    print(json.dumps(values, indent=2, ensure_ascii=False) if as_json else text)
