"""`heedful convert`: a Heed model made from one of transformers."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from heedful.cli import options


def convert(
    source: Annotated[str, Argument(metavar="SOURCE", help="Folder of a saved model, or its name on the Hub.")],
    target: Annotated[Path, Argument(metavar="TARGET", help="Folder to write; it must not exist.")],
    source_language: Annotated[str | None, Option(help="As mBART's, M2M100's, NLLB's tokenizer calls it.")] = None,
    target_language: Annotated[str | None, Option(help="Language to translate into, likewise.")] = None,
    decoder_layers: Annotated[int | None, Option(help="Of a new decoder, for a BERT, RoBERTa or XLM-R.")] = None,
    add_language: Annotated[str | None, Option(help="Target language that Heed or NLLB learns to name.")] = None,
    pairs: Annotated[str | None, Option(help="Texts of that language, as recipes name pairs.")] = None,
    column: Annotated[str | None, Option(help="Of the texts in --pairs. Default: target.")] = None,
    like: Annotated[str | None, Option(help="Known language to begin with. Default: the first.")] = None,
    pieces: Annotated[int | None, Option(help="New pieces of the vocabulary, at most. Default: 500.")] = None,
    old: Annotated[list[str] | None, Option(help="Texts that keep their tokens, beside the run's own data.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Turn a saved Marian, Pegasus, BART, mBART, M2M100, NLLB or T5 model into a Heed model that computes the same.

    Or give a model one target language more, with `--add-language`.
    """
    from heedful.conversion.model_conversion import convert as convert_folder

    options.quieten()
    options.check_apart(add_language=add_language, decoder_layers=decoder_layers)
    options.check_apart(add_language=add_language, target_language=target_language)
    details: dict[str, Any] = {"column": column, "like": like, "pieces": pieces, "old": old, "pairs": pairs}
    details = {name: value for name, value in details.items() if value is not None}
    if add_language is None and details:
        raise ValueError(f"`{next(iter(details))}` must be left out without `--add-language`.")
    if add_language is not None:
        if pairs is None:
            raise ValueError("`pairs` must be given with `--add-language`, but is not.")
        from heedful.conversion.language_addition import NewLanguage
        from heedful.conversion.language_addition import add_language as add

        result = add(source, target, NewLanguage(add_language, **details), source_language)
    elif decoder_layers is None:
        result = convert_folder(source, target, source_language, target_language)
    else:
        if source_language or target_language:
            raise ValueError("`--source-language` and `--target-language` must be left out beside `--decoder-layers`.")
        from heedful.conversion.warm_start import warm_start

        result = warm_start(source, target, decoder_layers)
    compared = "logits" if decoder_layers is None else "states of the encoder"
    found = f"{result.parameters:,} parameters, {compared} differ by {result.difference:.1e} at most"
    lines = [*result.notes, f"{result.model_type}: {found}", f"model: {result.folder}"]
    options.print_result(asdict(result), "\n".join(lines), as_json)
