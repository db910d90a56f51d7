"""What several commands share: their options and arguments, and a quiet terminal."""

import json
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
RecipeFile = Annotated[Path, Argument(metavar="RECIPE", help="A YAML file, or a name that `heedful recipes` lists.")]
Overrides = Annotated[list[str] | None, Argument(metavar="[KEY=VALUE]…", help="Such as optimization.max_updates=500.")]
AsJson = Annotated[bool, Option("--json", help="Print the results as JSON.")]
NewFolder = Annotated[Path, Argument(metavar="OUT", help="Folder to write; it must not exist.")]


def quieten() -> None:
    """Leave the terminal to this program: no progress bars of transformers, no warnings about its own insides."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def print_result(values: dict[str, Any], text: object, as_json: bool) -> None:
    """Print a result for a program, as JSON, or for a person."""
    print(json.dumps(values, indent=2, ensure_ascii=False) if as_json else text)
