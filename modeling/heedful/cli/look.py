"""For those who look into a model: `heedful score`, `attention`, `align`, `attention-numbers` and `embeddings`."""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import tee
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from heedful.cli import options
from heedful.cli.translate import CHUNK
from heedful.files import check_writable, import_extra, json_line

# What is given and what is scored, in each direction.
SIDES = (("source", "target"), ("target", "source"))
Kind = Literal["cross", "encoder", "decoder"]
Pair = tuple[str, str | None]  # a source with its target, or None for the model's own translation
Text = Annotated[str, Argument(metavar="TEXT", help="The source sentence.")]
Translation = Annotated[str | None, Option("--target", help="Its translation. Default: the model's own.")]
Layer = Annotated[int | None, Option(help="Layer, from 0; -1, the default, is the last.")]
Head = Annotated[int | None, Option(help="Head, from 0. Default: the mean over all heads.")]
Rollout = Annotated[bool, Option("--rollout", help="Follow attention through the layers.")]


def score(
    model: options.AnyModel,
    pairs: Annotated[list[str], Argument(metavar="PAIRS", help="File (or two), Hub dataset or builtin:SPLIT:COUNT.")],
    source: options.Source = "source",
    target: options.Target = "target",
    output: options.TextFile = None,
    tokens: Annotated[bool, Option("--tokens", help="Write each token with its score, too.")] = False,
    backward: Annotated[str | None, Option(help="A model of the other direction, to combine both.")] = None,
    to: options.TargetLanguage = None,
    backward_to: Annotated[str | None, Option(help="Language of the sources, of a model that knows several.")] = None,
    token_budget: Annotated[int, Option(help="Padded tokens in one batch, sources and targets.")] = 8192,
    as_json: Annotated[bool, Option("--json", help="Write JSON lines, as for a file that ends in .jsonl.")] = False,
    revision: options.Revision = None,
    device: options.Device = None,
):
    """Score how probable a model finds given translations, in nats; the order is kept.

    Writes a table (tab-separated, with a line of names), or the pairs and their scores as JSON lines.
    """
    options.check_output(output, "--output", pairs)
    rows = options.read_pairs(pairs, source, target, streaming=True)
    directions = [(options.load_translator(model, device, revision), to)]
    if backward is not None or backward_to is not None:
        other = directions[0][0] if backward is None else options.load_translator(backward, device)
        directions.append((other, backward_to))
    found = _scored(rows, directions, token_budget)
    as_json = as_json or (output is not None and ".jsonl" in output.suffixes)
    sums = [[0, 0, 0.0] for _ in directions]  # pairs, tokens and their log-probability
    is_shown = output is not None or not sys.stdout.isatty()
    with options.progress_bar(is_shown=is_shown) as bar, options.writing(output) as stream:
        for number, (pair, scores) in enumerate(found):
            bar.update()
            values = _score_values(scores, tokens)
            line = "\t".join(map(_cell, values.values()))
            if as_json:
                line = json_line(pair | values, ensure_ascii=output is None and not options.writes_unicode())
            elif number == 0:
                print(*values, sep="\t", file=stream)
            print(line, file=stream)
            for sum_, each in zip(sums, scores, strict=True):
                if each is not None:
                    sum_[:] = sum_[0] + 1, sum_[1] + len(each.token_ids), sum_[2] + each.log_probability
    for (_, side), (count, length, total) in zip(SIDES, sums, strict=False):
        nats = -total / max(length, 1)
        mean = f": {nats:.4f} nats a token, perplexity {math.exp(min(nats, 100)):.2f}" if count else ""
        print(f"{count:,} pairs, {length:,} {side} tokens{mean}", file=sys.stderr)


def _scored(rows: Iterable[dict[str, str]], directions: list[tuple[Any, str | None]], token_budget: int) -> Iterator:
    """Yield pairs with their scores by translators into their languages: of targets, and perhaps of sources."""
    pairs, *copies = tee(rows, 1 + len(directions))
    settings: dict[str, Any] = {"token_budget": token_budget, "keep_going": True, "chunk_size": CHUNK}
    found = [
        translator.score_pairs(map(itemgetter(*sides), copy), target_language=language, **settings)
        for (translator, language), copy, sides in zip(directions, copies, SIDES, strict=False)
    ]
    # Strictly, so that each comes to its end, where it warns.
    yield from zip(pairs, zip(*found, strict=True), strict=True)


def _score_values(scores: Sequence[Any], with_tokens: bool) -> dict[str, Any]:
    """Return the columns of a pair's `PairScore`s, one for each direction, `None` where the pair has none."""
    from heedful.inference.scoring import dual_cross_entropy

    values: dict[str, Any] = {}
    for prefix, score in zip(("", "backward_"), scores, strict=False):
        for name in ("log_probability", "per_token"):
            values[prefix + name] = score and round(getattr(score, name), 6)
        values[f"{prefix}tokens"] = score and len(score.token_ids)
        if with_tokens:
            parts = score and zip(score.tokens, score.token_scores, strict=True)
            values[f"{prefix}token_scores"] = parts and [[token, round(value, 6)] for token, value in parts]
    if len(scores) > 1:
        values["dual_cross_entropy"] = round(dual_cross_entropy(*scores), 6) if all(scores) else None
    return values


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(f"{token}:{score:.4f}" for token, score in value)
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def attention(
    model: options.AnyModel,
    text: Text,
    output: Annotated[Path, Option("-o", "--output", help="Picture (.png, .svg, .pdf) or page .html.")],
    target: Translation = None,
    layer: Layer = None,
    head: Head = None,
    kind: Annotated[Kind | None, Option(help="Whose attention. Default: cross.")] = None,
    grid: Annotated[bool, Option("--grid", help="Draw all heads of all layers, or of --layer.")] = False,
    scores: Annotated[bool, Option("--scores", help="Draw raw scores below the weights of --grid, as dots.")] = False,
    rollout: Rollout = False,
    tokens: Annotated[bool, Option("--tokens", help="Show the tokenizer's tokens, not words.")] = False,
    to: options.TargetLanguage = None,
    revision: options.Revision = None,
    device: options.Device = None,
):
    """See which words a model looks at: a picture, or a page to hover over."""
    from heedful.inference.attention import drawing, measures, report

    check_writable(output, (*drawing.PICTURE_SUFFIXES, *report.REPORT_SUFFIXES), "--output")
    is_page = output.suffix.lower() in report.REPORT_SUFFIXES
    options.check_apart(head=head, grid=grid, rollout=rollout)
    if scores and not grid:
        raise ValueError("`--scores` must come with --grid; a page shows them, and attention-numbers prints them.")
    if not is_page:
        import_extra("matplotlib", "plots")
    elif grid or rollout:
        option, suffixes = "grid" if grid else "rollout", ", ".join(drawing.PICTURE_SUFFIXES)
        raise ValueError(f"`--{option}` must come with a picture ({suffixes}): a page has both.")
    one_kind: Kind = kind or "cross"
    (maps,) = _attention_of(model, revision, device, [(text, target)], None if is_page or rollout else one_kind, to)
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


def align(
    model: options.AnyModel,
    text: Annotated[str | None, Argument(metavar="[TEXT]", help="The source sentence; else --data.")] = None,
    target: Translation = None,
    data: Annotated[list[str] | None, Option("--data", help="File of pairs (or two text files), not TEXT.")] = None,
    source_column: Annotated[str | None, Option(help="Source language or column of --data.")] = None,
    target_column: Annotated[str | None, Option(help="Target language or column of --data.")] = None,
    gold: Annotated[Path | None, Option(help="Compare with given links: a file, one line a pair: AER.")] = None,
    layer: Layer = None,
    head: Head = None,
    rollout: Rollout = False,
    as_json: options.AsJson = False,
    to: options.TargetLanguage = None,
    revision: options.Revision = None,
    device: options.Device = None,
):
    """Link the words of translations by attention, and print the links: 0-0 1-2, source first."""
    from heedful.inference.attention import measures

    options.check_apart(head=head, rollout=rollout)
    pairs = _pairs_of(text, target, data, source_column, target_column)
    given = None if gold is None else measures.gold_alignments_of(gold, pairs)
    view = measures.View("cross", layer, head, rollout)
    maps = _attention_of(model, revision, device, pairs, None if rollout else "cross", to)
    links = [measures.word_alignment(each, view.map_of(each)) for each in maps]
    lines = [measures.write_links(each) for each in links]
    found: dict[str, Any] = {"alignments": [*lines]}
    if given is not None:
        found["alignment_errors"] = measures.alignment_errors(links, given)._asdict()
        lines.append(measures.ERROR_LINE.format(**found["alignment_errors"]))
    options.print_result(found, "\n".join(lines), as_json)


def attention_numbers(
    model: options.AnyModel,
    text: Text,
    target: Translation = None,
    layer: Layer = None,
    head: Annotated[int | None, Option(help="Head, from 0. Default: 0 step by step, else the mean.")] = None,
    kind: Annotated[Kind, Option(help="Whose attention.")] = "cross",
    rollout: Rollout = False,
    steps: Annotated[bool, Option("--steps", help="Print a head's numbers step by step, the default.")] = False,
    entropy: Annotated[bool, Option("--entropy", help="Print how widely each head looks.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print the weights, and the entropy, as JSON.")] = False,
    to: options.TargetLanguage = None,
    revision: options.Revision = None,
    device: options.Device = None,
):
    """See attention in numbers: one head step by step, how widely each head looks, the weights as JSON."""
    from heedful.inference.attention import measures

    steps = steps or not (entropy or as_json)
    options.check_apart(head=head, rollout=rollout)
    options.check_apart(steps=steps, rollout=rollout)
    options.check_apart(steps=steps, json=as_json)
    if entropy and not (steps or as_json) and (layer, head, rollout) != (None, None, False):
        raise ValueError("`--layer`, `--head` and `--rollout` must not come with --entropy alone: it is of all heads.")
    (maps,) = _attention_of(model, revision, device, [(text, target)], None if rollout else kind, to)
    view = measures.View(kind, layer, (head or 0) if steps else head, rollout)
    values, lines = dict[str, Any](), list[str]()
    if entropy:
        found = measures.attention_entropy(maps, kind)
        values["entropy"] = {"nats": found.nats.tolist(), "share": found.share.tolist()}
        lines += measures.entropy_lines(found)
    if steps:
        each_step = maps.steps(kind, -1 if layer is None else layer, view.head or 0)
        lines += [view.title_of(maps), *measures.steps_lines(each_step)]
    if as_json:
        one = view.map_of(maps)
        values["maps"] = [{"kind": kind, **vars(one), "weights": one.weights.astype(float).round(6).tolist()}]
    options.print_result(values, "\n".join(lines), as_json)


def _attention_of(
    model: str, revision: str | None, device: str | None, pairs: Sequence[Pair], kind: Kind | None, to: str | None
) -> Iterator[Any]:
    """Yield the attention of pairs: of one kind, or of all that the model has."""
    from heedful.inference.attention.maps import attention_maps

    translator = options.load_translator(model, device, revision)
    for pair in pairs:
        yield attention_maps(translator, translator.tokenizers, *pair, kinds=kind and [kind], target_language=to)


def _pairs_of(
    text: str | None, target: str | None, data: list[str] | None, source: str | None, target_column: str | None
) -> list[Pair]:
    """Return the sentence of the command line, or the pairs of its files."""
    if (text is None) == (data is None):
        raise ValueError("Either TEXT or --data must be given, and not both.")
    if text is not None and (source or target_column):
        raise ValueError("`--source-column` and `--target-column` must come with --data, whose columns they name.")
    if data is None:
        return [(str(text), target)]
    if target is not None:
        raise ValueError("`--target` must come with TEXT: the pairs of --data have targets.")
    pairs = options.read_pairs(data, source or "source", target_column or "target", split="test")
    if not len(pairs):
        raise ValueError("`--data` must hold pairs, but has none.")
    return [(pair["source"], pair["target"]) for pair in pairs]


def embeddings(
    model: options.AnyModel,
    words: Annotated[list[str], Argument(metavar="WORD…", help="Words, or beginnings of words, of the source.")],
    sentence: Annotated[str | None, Option(help="The source in which they are. Default: each word alone.")] = None,
    output: Annotated[Path | None, Option("-o", "--output", help="Picture to draw (.png, .svg, .pdf).")] = None,
    to: options.TargetLanguage = None,
    revision: options.Revision = None,
    device: options.Device = None,
):
    """See which tokens a word's embedding is near to, and what each layer of the encoder makes of it in a sentence."""
    from heedful.inference.attention import embeddings as module
    from heedful.inference.attention.drawing import PICTURE_SUFFIXES

    if output is not None:
        check_writable(output, PICTURE_SUFFIXES, "--output")
        import_extra("matplotlib", "plots")
    translator = options.load_translator(model, device, revision)
    tokenizers = translator.tokenizers
    followed = [module.word_states(translator, tokenizers, word, sentence, to) for word in dict.fromkeys(words)]
    found = module.neighbourhoods(translator, tokenizers, followed)
    for word, near in zip(followed, found, strict=True):
        print(word.word if len(word.pieces) == 1 else f"{word.word} = {' + '.join(word.pieces)}")
        for name, each in zip(module.layer_names(len(near)), near, strict=True):
            tokens = "  ".join(f"{token.text} {token.cosine:.2f}" for token in each.tokens)
            print(f"  {name:<11}itself {each.own:5.2f}  {tokens}")
    if output is not None:
        module.draw_neighbourhoods(followed, found, output)
        print(output)
