"""`heedful attention`: attention as a picture or a page."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from heedful.cli import options
from heedful.files import check_writable, import_extra

Kind = Literal["cross", "encoder", "decoder"]
Pair = tuple[str, str | None]  # a source and its target; None if the model translates
Text = Annotated[str, Argument(metavar="TEXT", help="The source sentence.")]
Translation = Annotated[str | None, Option("--target", help="The translation. Default: the model makes one.")]
Layer = Annotated[int | None, Option(help="Layer, counted from 0. Default: -1, the last.")]
Head = Annotated[int | None, Option(help="Head, counted from 0. Default: the mean of all heads.")]
Rollout = Annotated[bool, Option("--rollout", help="Combine the attention of all layers (rollout).")]


def attention(
    model: options.AnyModel,
    text: Text,
    output: Annotated[Path, Option("-o", "--output", help="Picture (.png, .svg, .pdf) or page (.html).")],
    target: Translation = None,
    layer: Layer = None,
    head: Head = None,
    kind: Annotated[Kind | None, Option(help="Attention to draw. Default: cross.")] = None,
    grid: Annotated[bool, Option("--grid", help="Draw all heads of all layers, or of --layer.")] = False,
    scores: Annotated[bool, Option("--scores", help="Add raw scores to --grid, as dots below the weights.")] = False,
    rollout: Rollout = False,
    tokens: Annotated[bool, Option("--tokens", help="Show tokens instead of words.")] = False,
    to: options.TargetLanguage = None,
    revision: options.Revision = None,
    device: options.Device = None,
) -> None:
    """Draw the words that a model attends to, as a picture or an interactive page."""
    from heedful.attention import drawing, measures, report

    check_writable(output, (*drawing.PICTURE_SUFFIXES, *report.REPORT_SUFFIXES), "--output")
    is_page = output.suffix.lower() in report.REPORT_SUFFIXES
    options.check_apart(head=head, grid=grid, rollout=rollout)
    if scores and not grid:
        raise ValueError("`--scores` must come with --grid. A page shows scores, and attention-numbers prints them.")
    if not is_page:
        import_extra("matplotlib", "plots")
    elif grid or rollout:
        option, suffixes = "grid" if grid else "rollout", ", ".join(drawing.PICTURE_SUFFIXES)
        raise ValueError(f"`--{option}` must come with a picture ({suffixes}). A page always has both.")
    one_kind: Kind = kind or "cross"
    (maps,) = attention_of(model, revision, device, [(text, target)], None if is_page or rollout else one_kind, to)
    if is_page:
        shown = -1 if layer is None else layer
        report.write_attention_report(maps, output, text, tokens=tokens, kind=kind, layer=shown, head=head)
    elif grid:
        title = f"{one_kind} attention of each head"
        drawing.draw_attention_grid(maps, output, one_kind, layer, title, tokens, scores)
    else:
        view = measures.View(one_kind, layer, head, rollout)
        one = view.map_of(maps)
        drawing.draw_attention(one if tokens else measures.word_attention(maps, one), output, view.title_of(maps))
    print(output)


def attention_of(
    model: str, revision: str | None, device: str | None, pairs: Sequence[Pair], kind: Kind | None, to: str | None
) -> Iterator[Any]:
    """Yield the pairs' attention, of one kind or all."""
    from heedful.attention.maps import attention_maps

    translator = options.load_translator(model, device, revision)
    for pair in pairs:
        yield attention_maps(translator, translator.tokenizers, *pair, kinds=kind and [kind], target_language=to)
