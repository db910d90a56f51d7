"""`heedful align`: word alignments from attention."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from heedful.cli import options
from heedful.cli.attention import Head, Layer, Pair, Rollout, Translation, attention_of


def align(
    model: options.AnyModel,
    text: Annotated[str | None, Argument(metavar="[TEXT]", help="The source sentence. Otherwise give --data.")] = None,
    target: Translation = None,
    data: Annotated[list[str] | None, Option("--data", help="Pairs to align: a file, or two text files.")] = None,
    source_column: Annotated[str | None, Option(help="Source language or column of --data.")] = None,
    target_column: Annotated[str | None, Option(help="Target language or column of --data.")] = None,
    gold: Annotated[Path | None, Option(help="File of correct links, a line per pair: compute AER.")] = None,
    layer: Layer = None,
    head: Head = None,
    rollout: Rollout = False,
    as_json: options.AsJson = False,
    to: options.TargetLanguage = None,
    revision: options.Revision = None,
    device: options.Device = None,
) -> None:
    """Align source and target words by attention, and print the links, such as 0-0 1-2 (source first)."""
    from heedful.attention import measures

    options.check_apart(head=head, rollout=rollout)
    pairs = _pairs_of(text, target, data, source_column, target_column)
    given = None if gold is None else measures.read_gold_alignments(gold, pairs)
    view = measures.View("cross", layer, head, rollout)
    maps = attention_of(model, revision, device, pairs, None if rollout else "cross", to)
    links = [measures.word_alignment(each, view.map_of(each)) for each in maps]
    lines = [measures.write_links(each) for each in links]
    found: dict[str, Any] = {"alignments": [*lines]}
    if given is not None:
        found["alignment_errors"] = measures.alignment_errors(links, given)._asdict()
        lines.append(measures.ERROR_LINE.format(**found["alignment_errors"]))
    options.print_result(found, "\n".join(lines), as_json)


def _pairs_of(
    text: str | None, target: str | None, data: list[str] | None, source: str | None, target_column: str | None
) -> list[Pair]:
    if (text is None) == (data is None):
        raise ValueError("Either TEXT or --data must be given, but not both.")
    if text is not None and (source or target_column):
        raise ValueError("`--source-column` and `--target-column` must come with --data.")
    if data is None:
        return [(str(text), target)]
    if target is not None:
        raise ValueError("`--target` must come with TEXT: the pairs of --data have targets.")
    pairs = options.read_pairs(data, source or "source", target_column or "target", split="test")
    if not len(pairs):
        raise ValueError("`--data` must hold pairs, but has none.")
    return [(pair["source"], pair["target"]) for pair in pairs]
