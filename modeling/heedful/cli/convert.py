"""`heedful convert`: a Heed model from a transformers model."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from heedful.cli import options


def convert(
    source: Annotated[str, Argument(metavar="SOURCE", help="Folder of a saved model, or its name on the Hub.")],
    target: Annotated[Path, Argument(metavar="TARGET", help="Folder to write; it must not exist.")],
    source_language: Annotated[str | None, Option(help="Source language, named as in the tokenizer.")] = None,
    target_language: Annotated[str | None, Option(help="Target language, named as in the tokenizer.")] = None,
    decoder_layers: Annotated[int | None, Option(help="Layers of a new decoder for BERT, RoBERTa or XLM-R.")] = None,
    add_language: Annotated[str | None, Option(help="New target language for a Heed or NLLB model.")] = None,
    pairs: Annotated[str | None, Option(help="File or dataset with texts in the new language.")] = None,
    column: Annotated[str | None, Option(help="Column of --pairs with the texts. Default: target.")] = None,
    like: Annotated[str | None, Option(help="Known language to copy. Default: the first.")] = None,
    pieces: Annotated[int | None, Option(help="Most pieces to add to the vocabulary. Default: 500.")] = None,
    old: Annotated[list[str] | None, Option(help="File of texts in old languages, which keep their tokens.")] = None,
    keep_tokens_of: Annotated[list[str] | None, Option(help="File of texts: cut the vocabulary to theirs.")] = None,
    keep: Annotated[int | None, Option(help="Most tokens to keep. Default: those of the texts.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Turn a saved Marian, Pegasus, BART, mBART, M2M100, NLLB or T5 model into a Heed model that computes the same.

    With `--add-language`, add a target language to a model instead. With `--keep-tokens-of`, cut the vocabulary.
    """
    from heedful.conversion.model_conversion import convert as convert_folder
    from heedful.conversion.vocabulary_cut import cut_vocabulary

    options.quieten()
    options.check_apart(add_language=add_language, decoder_layers=decoder_layers, keep_tokens_of=keep_tokens_of)
    options.check_apart(add_language=add_language, target_language=target_language)
    if keep is not None and not keep_tokens_of:
        raise ValueError("`keep` must be left out without `--keep-tokens-of`.")
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
    elif keep_tokens_of:
        result = cut_vocabulary(source, target, keep_tokens_of, keep, (source_language, target_language))
    elif decoder_layers is None:
        result = convert_folder(source, target, source_language, target_language)
    else:
        if source_language or target_language:
            raise ValueError("`--source-language` and `--target-language` must be left out with `--decoder-layers`.")
        from heedful.conversion.warm_start import warm_start

        result = warm_start(source, target, decoder_layers)
    compared = "logits" if decoder_layers is None else "states of the encoder"
    found = f"{result.parameters:,} parameters, {compared} differ by {result.difference:.1e} at most"
    lines = [*result.notes, f"{result.model_type}: {found}", f"model: {result.folder}"]
    options.print_result(asdict(result), "\n".join(lines), as_json)
