"""`heedful export`: a model for other engines."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option, Typer

from heedful.cli import options

export = Typer(help="Write a model for an engine outside Python.", no_args_is_help=True)
Sentences = Annotated[Path | None, Option(help="Text file to compare on. Default: validation data or built-in.")]
Compared = tuple[Path | None, int, bool]  # sentence file, number of sentences, --json
Count = Annotated[int, Option(help="Number of sentences to compare on, drawn at random.")]


def _export(write: Callable[..., Any], model: str, target: Path, compared: Compared, *settings: Any) -> None:
    from heedful.export.comparison import sentences_to_compare

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
) -> None:
    """Write a model as ONNX files, if onnxruntime gives the same translations as `generate()`."""
    from heedful.export.onnx.onnx_export import export_onnx

    _export(export_onnx, model, target, (sentences, count, as_json), quantization)


@export.command("ctranslate2")
@options.safe_at_terminals
def export_to_ctranslate2(
    model: options.AnyModel,
    target: options.NewFolder,
    quantization: Annotated[options.WeightType, Option(help="Weight type that the device supports.")] = "float32",
    sentences: Sentences = None,
    count: Count = 500,
    as_json: options.AsJson = False,
    device: options.Device = None,
) -> None:
    """Write a model for CTranslate2, if CTranslate2 gives the same translations as `generate()`."""
    from heedful.export.ctranslate2_export import export_ctranslate2

    _export(export_ctranslate2, model, target, (sentences, count, as_json), quantization, device)


@export.command("transformers")
@options.safe_at_terminals
def export_to_transformers(
    model: options.AnyModel,
    target: options.NewFolder,
    sentences: Sentences = None,
    count: Count = 500,
    as_json: options.AsJson = False,
) -> None:
    """Write a model for transformers alone, without Heed's code, if it computes the same."""
    from heedful.export.transformers_export import export_transformers

    _export(export_transformers, model, target, (sentences, count, as_json))
