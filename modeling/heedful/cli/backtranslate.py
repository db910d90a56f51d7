"""`heedful backtranslate`: sources for target texts."""

from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from heedful.cli import options
from heedful.cli.options import PairsFile, write_pairs
from heedful.cli.translate import CHUNK, lines_of

Method = Literal["greedy", "beam", "sampling"]


def backtranslate(
    model: options.AnyModel,
    texts: Annotated[Path, Argument(metavar="TEXTS", help="Target sentences: a text file, one per line, or a table.")],
    output: PairsFile,
    column: Annotated[str | None, Option("--target", help="Column or language, if TEXTS is a table.")] = None,
    method: Annotated[Method, Option(help="How to make sources.")] = "beam",
    num_beams: Annotated[int | None, Option("--num-beams", help="Beam width for beam. Default: 5.")] = None,
    temperature: Annotated[float | None, Option(help="Sampling temperature. Default: 1.")] = None,
    top_k: Annotated[int | None, Option(help="Sample from the k likeliest tokens. Default: all.")] = None,
    seed: Annotated[int | None, Option(help="Seed of sampling. Default: 1.")] = None,
    max_new_tokens: options.MaxNewTokens = None,
    to: options.TargetLanguage = None,
    token_budget: options.TokenBudget = 8192,
    revision: options.Revision = None,
    device: options.Device = None,
) -> None:
    """Make training pairs from target sentences: a model of the reverse direction translates them into sources."""
    options.check_pairs_file(output, [texts])
    options.check_input(texts, "TEXTS")
    table = options.texts_of(texts, column, "--target")
    with options.quick_start(model):
        from heedful.distillation.back_translation import BackTranslation

        making = BackTranslation(method, num_beams, temperature, top_k, seed)
    translator = options.load_translator(model, device, revision)
    search: Any = {"max_new_tokens": max_new_tokens, "target_language": to, "token_budget": token_budget}
    made = making.pairs(translator, table or chain.from_iterable(lines_of(texts, "line")), chunk_size=CHUNK, **search)
    write_pairs(output, made, making, str(texts))
