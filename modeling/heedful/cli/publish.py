"""For those who publish: `heedful push`, `convert` and `export`."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option, Typer

from heedful.cli import options

export = Typer(help="Write a model for an engine outside Python.", no_args_is_help=True)
Sentences = Annotated[Path | None, Option(help="Text file of sources, one a line. Default: the run's, or built-in.")]
Form = Literal["heed", "transformers"]
Compared = tuple[Path | None, int, bool]  # sentences, how many, and whether the result is printed as JSON
Count = Annotated[int, Option(help="Sentences to compare on, drawn.")]


def push(
    model: options.Model,
    repository: Annotated[str, Argument(metavar="REPO", help="Its id on the Hub, such as name/model.")],
    private: Annotated[bool | None, Option("--private/--public", help="If it is new. Default: its owner's.")] = None,
    revision: Annotated[str | None, Option(help="Branch, made if it is not there.")] = None,
    message: Annotated[str | None, Option(help="Of the commit.")] = None,
    form: Annotated[Form, Option("--as", help="With our code, or as `heedful export transformers` does.")] = "heed",
    dry_run: Annotated[bool, Option("--dry-run", help="Check all, list what is sent, and send nothing.")] = False,
    as_json: options.AsJson = False,
):
    """Push a model to the Hub, with its code, tokenizers and card, in one commit."""
    from heedful.publishing import hub

    in_form: Any = nullcontext
    if form == "transformers":
        from heedful.publishing.exports.transformers_export import stock_form as in_form
    options.quieten()
    with in_form(model) as folder:
        if dry_run:
            files = hub.checked_files(Path(folder), repository)
            return options.print_result({"repository": repository, "files": files}, "\n".join(files), as_json)
        pushed = hub.push(folder, repository, private=private, revision=revision, message=message)
    text = f"{pushed.repository} at revision {pushed.commit}\n{pushed.url}"
    return options.print_result(asdict(pushed), text, as_json)


def card(
    model: options.Model,
    license: Annotated[str, Option(help="Yours, as the Hub calls it: apache-2.0, mit, cc-by-4.0.")],
    dataset: Annotated[list[str], Option(help="What it was trained on: an id on the Hub, a file, a name.")],
    base_model: Annotated[str | None, Option(help="What it began with: an id, a folder. Default: nothing.")] = None,
    source_language: Annotated[str | None, Option(help="Its code, such as ko.")] = None,
    target_language: Annotated[str | None, Option(help="Likewise.")] = None,
    task: Annotated[str | None, Option(help="If it does not translate, what it does: 'answering questions'.")] = None,
    scores: Annotated[list[Path] | None, Option(help="Of `heedful evaluate --json`; a test set's name each.")] = None,
    name: Annotated[str | None, Option(help="Of the model. Default: the folder's.")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace a README.md that is there.")] = False,
):
    """Write the card of a model of a Trainer, which `heedful push` asks for; runs of `heedful train` have one."""
    from heedful.publishing.finetuned_card import write_finetuned_card

    options.quieten()
    facts: dict[str, Any] = {"license": license, "datasets": dataset, "base_model": base_model, "task": task}
    facts |= {"source_language": source_language, "target_language": target_language}
    facts |= {"name": name} if name else {}
    print(write_finetuned_card(model, overwrite=overwrite, scores=scores or (), **facts))


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
):
    """Turn a saved Marian, Pegasus, BART, mBART, M2M100, NLLB or T5 model into a Heed model that computes the same.

    Or give a model one target language more, with `--add-language`.
    """
    from heedful.publishing.conversion.model_conversion import convert as convert_folder

    options.quieten()
    options.check_apart(add_language=add_language, decoder_layers=decoder_layers)
    options.check_apart(add_language=add_language, target_language=target_language)
    details: dict[str, Any] = {"column": column, "like": like, "pieces": pieces, "old": old}
    details = {name: value for name, value in details.items() if value is not None}
    if add_language is None and (pairs is not None or details):
        name = next(iter(details), "pairs")
        raise ValueError(f"`{name}` must be left out without `--add-language`.")
    if add_language is not None:
        if pairs is None:
            raise ValueError("`pairs` must be given with `--add-language`, but is not.")
        from heedful.publishing.conversion.language_addition import NewLanguage
        from heedful.publishing.conversion.language_addition import add_language as add

        result = add(source, target, NewLanguage(add_language, pairs, **details), source_language)
    elif decoder_layers is None:
        result = convert_folder(source, target, source_language, target_language)
    else:
        if source_language or target_language:
            raise ValueError("`--source-language` and `--target-language` must be left out beside `--decoder-layers`.")
        from heedful.publishing.conversion.warm_start import warm_start

        result = warm_start(source, target, decoder_layers)
    compared = "logits" if decoder_layers is None else "states of the encoder"
    found = f"{result.parameters:,} parameters, {compared} differ by {result.difference:.1e} at most"
    lines = [*result.notes, f"{result.model_type}: {found}", f"model: {result.folder}"]
    options.print_result(asdict(result), "\n".join(lines), as_json)


def page(
    models: Annotated[list[str], Argument(metavar="MODEL…", help="Folders of saved models, or their ids on the Hub.")],
    output: Annotated[Path, Option("--output", "-o", help="The page to write; it ends in .html.")],
    example: Annotated[str | None, Option(help="Text to begin with. Default: that of the model's card.")] = None,
):
    """Write a page that translates without any network and shows how: one file, with the models inside."""
    from heedful.publishing.web.page import write_page

    options.quieten()
    print(write_page(models, output, example))


def _export(write: Callable[..., Any], model: str, target: Path, compared: Compared, *settings: Any):
    """Write an export of a model after a comparison on some sentences, and print what was found and written."""
    from heedful.publishing.exports.comparison import sentences_to_compare

    chosen, count, as_json = compared
    sentences = sentences_to_compare(model, chosen, count)
    options.quieten()
    result = write(model, target, sentences, *settings)
    lines = []
    for search, found in result.comparisons.items():
        lines.append(f"{search}: {len(found.differences)} of {found.sentences} sentences differ from generate()'s")
    if result.difference is not None:
        lines.append(f"logits differ by {result.difference:.1e} at most")
    lines += [f"{result.size / 1e6:,.1f} MB in {result.quantization}", f"model: {result.folder}"]
    options.print_result(asdict(result), "\n".join(lines), as_json)


@export.command("onnx")
@options.safe_at_terminals
def export_to_onnx(
    model: options.AnyModel,
    target: options.NewFolder,
    quantization: Annotated[Literal["float32", "int8"], Option(help="Type of the weights.")] = "float32",
    sentences: Sentences = None,
    count: Count = 500,
    as_json: options.AsJson = False,
):
    """Write a model as ONNX files, after onnxruntime has given the same translations as `generate()`."""
    from heedful.publishing.exports.onnx_export import export_onnx

    _export(export_onnx, model, target, (sentences, count, as_json), quantization)


@export.command("ctranslate2")
@options.safe_at_terminals
def export_to_ctranslate2(
    model: options.AnyModel,
    target: options.NewFolder,
    quantization: Annotated[options.WeightType, Option(help="Of the weights; the device must know it.")] = "float32",
    sentences: Sentences = None,
    count: Count = 500,
    as_json: options.AsJson = False,
    device: options.Device = None,
):
    """Write a model for CTranslate2, after it has given the same translations as `generate()`."""
    from heedful.publishing.exports.ctranslate2_export import export_ctranslate2

    _export(export_ctranslate2, model, target, (sentences, count, as_json), quantization, device)


@export.command("transformers")
@options.safe_at_terminals
def export_to_transformers(
    model: options.AnyModel,
    target: options.NewFolder,
    zero_start: Annotated[bool, Option("--zero-start", help="Start from zeros, as CTranslate2 demands.")] = False,
    sentences: Sentences = None,
    count: Count = 500,
    as_json: options.AsJson = False,
):
    """Write a model as a class of transformers' own, which needs no code of ours, after it has computed the same."""
    from heedful.publishing.exports.transformers_export import export_transformers

    _export(export_transformers, model, target, (sentences, count, as_json), zero_start)
