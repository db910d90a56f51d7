"""For those who use a model: `heedful translate`, `evaluate`, `score`, `backtranslate`, `attention` and the like."""

import gzip
import json
import math
import os
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from itertools import chain, tee
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from heedful.cli import options
from heedful.files import (
    bounded_lines,
    check_at_least,
    check_is_new,
    check_matplotlib,
    check_writable,
    one_line,
    other_encoding,
    write_text,
)
from heedful.training.processes.launcher import world_size

if TYPE_CHECKING:
    from heedful.inference.scoring import PairScore

# What is given and what is scored, in each direction.
SIDES = (("source", "target"), ("target", "source"))
Kind = Literal["cross", "encoder", "decoder"]
CHUNK = 1024  # lines by which a bar moves
OF_PAIRS = {".jsonl", ".json", ".csv", ".tsv", ".parquet"}  # files whose lines are no sentences


def translate(
    model: options.AnyModel,
    text: Annotated[
        list[str] | None, Argument(metavar="[TEXT]…", help="Texts; those that begin with - after --.")
    ] = None,
    source: Annotated[Path | None, Option("--input", help="File of texts, a line each; else standard input.")] = None,
    output: Annotated[Path | None, Option("-o", "--output", help="File to write; else standard output.")] = None,
    split: Annotated[bool, Option("--split", help="Take apart what is longer than the model has learned.")] = False,
    num_beams: options.Beams = None,
    n_best: Annotated[int, Option("--n-best", help="Outputs for each text, best first.")] = 1,
    scores: Annotated[bool, Option("--scores", help="Print each output's score before it.")] = False,
    max_new_tokens: options.MaxNewTokens = None,
    early_stopping: Annotated[bool | None, Option(help="End beam search early. Default: the model's own.")] = None,
    to: options.TargetLanguage = None,
    token_budget: options.TokenBudget = 8192,
    engine: options.Engine = "auto",
    precision: options.Precision = "float32",
    revision: options.Revision = None,
    device: options.Device = None,
):
    """Turn texts into texts, such as translations: a file or standard input line by line; the order is kept."""
    if text and source is not None:
        raise ValueError(f"`--input` must be left out where sentences are given, but is {source} instead.")
    if source is not None and not source.is_file():
        raise FileNotFoundError(f"`--input` must be a file of sentences, but {source} is none.")
    for name in filter(os.path.isfile, text or ()):
        warnings.warn(f"{name} is taken as a text; the lines of that file are read by `--input {name}`.", stacklevel=2)
    options.check_output(output, "--output", filter(None, [source]))
    with options.quick_start(model):
        from heedful.inference.translation import Translator

        options.quieten()
        translator = Translator.from_pretrained(model, device, revision, engine, precision)
    lines = iter(text) if text else _lines(source)
    settings: dict[str, Any] = {"num_beams": num_beams, "num_return_sequences": n_best, "target_language": to}
    settings |= {"max_new_tokens": max_new_tokens, "early_stopping": early_stopping, "token_budget": token_budget}
    settings |= {"split": split, "keep_going": not text}
    is_dialogue = not text and source is None and sys.stdin.isatty()
    is_shown = not (text or is_dialogue) and (output is not None or not sys.stdout.isatty())
    with options.progress_bar(source, is_shown=is_shown) as bar, options.writing(output) as stream:
        if is_dialogue:
            print("Sentences, one a line; Ctrl-D ends.", file=sys.stderr)
            one_by_one = (translator.translate_lines([line], **settings) for line in lines)
            found: Iterable[Any] = chain.from_iterable(one_by_one)
        else:
            found = translator.translate_lines(lines, progress=bar.update, **settings)
        for translations in found:
            for translation in translations:
                score = f"{translation.score:.4f}\t" if scores and translation.score is not None else ""
                print(score + one_line(translation.text), file=stream, flush=is_dialogue)


def _lines(path: Path | None, left_out: Literal["byte", "line"] = "byte") -> Iterator[str]:
    """Yield the lines of a file, or of standard input; of what is not UTF-8 it warns, and leaves it or its line out.

    An empty line stands for one that is left out.
    """
    broken = number = 0
    name = path or "Standard input"
    open_file = gzip.open if path is not None and path.suffix == ".gz" else open
    try:
        with open_file(path, "rb") if path is not None else nullcontext(sys.stdin.buffer) as stream:
            for number, line in enumerate(bounded_lines(stream, name), start=1):
                try:
                    yield line.decode("utf-8")
                except UnicodeDecodeError as error:
                    if told := other_encoding(line):
                        raise ValueError(f"{name} must be UTF-8, but line {number} is not: {told}.") from None
                    broken += 1
                    if broken <= 3:
                        told = f"byte {line[error.start]:#04x} at position {error.start}: the {left_out} is left out"
                        warnings.warn(f"Line {number} must be UTF-8, but has {told}.", stacklevel=2)
                    yield line.decode("utf-8", errors="ignore") if left_out == "byte" else "\n"
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} must be a whole gzip file, but breaks after line {number}: {error}.") from error
    if broken > 3:
        warnings.warn(f"{broken - 3} more lines are not UTF-8.", stacklevel=2)


def evaluate(
    model: options.AnyModel,
    data: options.Data,
    source: options.Source = "source",
    target: options.Target = "target",
    num_beams: options.Beams = None,
    max_new_tokens: options.MaxNewTokens = None,
    to: options.TargetLanguage = None,
    tokenize: options.BleuTokenizer = "13a",
    lowercase: options.Lowercase = False,
    references: options.References = None,
    ignore: options.Ignore = None,
    ter: options.Ter = None,
    bootstrap: Annotated[int, Option(help="Resamples behind the 95 % intervals; 0 for none.")] = 1000,
    confusions: Annotated[int, Option(help="Show so many of the commonest confusions of tokens.")] = 0,
    token_budget: options.TokenBudget = 8192,
    predictions: Annotated[Path | None, Option(help="Write the outputs here, one a line.")] = None,
    as_json: options.AsJson = False,
    revision: options.Revision = None,
    device: options.Device = None,
):
    """Generate a test set's targets and score them: BLEU and chrF with signatures, TER, exact match, error rates.

    Started by torchrun or accelerate launch, the processes share the sentences.
    """
    from heedful.data.sources import read_pairs, references_of
    from heedful.evaluation import metrics
    from heedful.evaluation.error_rates import commonest_confusions, confusions_table

    options.check_output(predictions, "--predictions", data)
    check_at_least(0, confusions=confusions)
    scoring: dict[str, Any] = {"tokenize": tokenize, "lowercase": lowercase, "bootstrap": bootstrap, "ignore": ignore}
    metrics.score_translations([""], [""], **scoring)  # raises now what it would raise when all is translated
    where = data[0] if len(data) == 1 else data
    pairs = list(read_pairs(where, source=source, target=target, split="test", references=references))
    accepted = references_of(pairs)
    left = metrics.references_left(ignore, accepted)
    _warn_of_direction(Path(model), source, target)
    options.quieten()
    search = {"num_beams": num_beams, "max_new_tokens": max_new_tokens, "target_language": to}
    sources = [pair["source"] for pair in pairs]

    def check(translator: Any) -> None:
        translator.tokenizers.check_symbols(pairs, "`--data`", ignore)

    texts = _translate_all(model, revision, sources, device, check, token_budget=token_budget, **search)
    if texts is None:
        return
    if predictions is not None:
        write_text(predictions, "".join(one_line(text) + "\n" for text in texts))
    scoring["metrics"] = metrics.affordable_metrics(ter, texts, accepted)
    scores = metrics.score_translations(texts, accepted, **scoring)
    lines = [metrics.scores_table(scores)]
    if confusions:
        texts = metrics.comparable(texts, ignore)
        scores["confusions"] = commonest_confusions(texts, left, sources, confusions, lowercase)
        lines.append(confusions_table(scores["confusions"]))
    options.print_result(scores, "\n".join(lines), as_json)


def _warn_of_direction(model: Path, source: str, target: str) -> None:
    """Warn where the recipe beside a model says that it was trained in the other direction alone."""
    from heedful.training.recipe_file import read_recipe

    with suppress(OSError, ValueError):
        directions = {(part.source, part.target) for part in read_recipe(model / "recipe.yaml").data.parts.values()}
        if (target, source) in directions and (source, target) not in directions:
            told = f"`--source` and `--target` should be {target} and {source}, as {model} was trained, but are"
            warnings.warn(f"{told} {source} and {target} instead.", stacklevel=3)


def _translate_all(
    folder: str,
    revision: str | None,
    sources: list[str],
    device: str | None,
    check: Callable[[Any], None],
    **settings: Any,
) -> list[str] | None:
    """Return the best translation of each source; if several processes share the work, only in the main one.

    `check` sees the translator before it begins.
    """
    from heedful.inference.translation import Translator

    if world_size() == 1:
        translator = Translator.from_pretrained(folder, device, revision)
        check(translator)
        with options.progress_bar(total=len(sources)) as bar:
            return [best.text for best, *_ in translator.translate_lines(sources, progress=bar.update, **settings)]
    from heedful.training.loop.validation import translate_on_ranks
    from heedful.training.processes.devices import join_processes

    accelerator = join_processes(device)
    translator = Translator.from_pretrained(folder, accelerator.device, revision)
    check(translator)
    texts = translate_on_ranks(translator, sources, accelerator, **settings)
    is_main = accelerator.is_main_process
    accelerator.end_training()
    return texts if is_main else None


def score(
    model: options.AnyModel,
    pairs: Annotated[
        list[str], Argument(metavar="PAIRS", help="File (or two text files), Hub dataset or builtin:SPLIT:COUNT.")
    ],
    source: options.Source = "source",
    target: options.Target = "target",
    output: Annotated[Path | None, Option("-o", "--output", help="File to write; else standard output.")] = None,
    tokens: Annotated[bool, Option("--tokens", help="Write each token with its score, too.")] = False,
    backward: Annotated[str | None, Option(help="A model of the other direction, to combine both.")] = None,
    to: options.TargetLanguage = None,
    backward_to: Annotated[str | None, Option(help="Language of the sources, of a model that knows several.")] = None,
    token_budget: Annotated[int, Option(help="Padded tokens in one batch, sources and targets.")] = 8192,
    as_json: Annotated[bool, Option("--json", help="Write JSON lines, as for a file that ends in .jsonl.")] = False,
    revision: options.Revision = None,
    device: options.Device = None,
):
    """Tell how probable a model finds given translations, in nats; the order is kept.

    Writes a table (tab-separated, with a line of names), or the pairs and their scores as JSON lines.
    """
    from heedful.data.sources import read_pairs

    options.check_output(output, "--output", pairs)
    rows = read_pairs(pairs[0] if len(pairs) == 1 else pairs, source=source, target=target, streaming=True)
    from heedful.inference.translation import Translator

    options.quieten()
    directions = [(Translator.from_pretrained(model, device, revision), to)]
    if backward is not None or backward_to is not None:
        other = directions[0][0] if backward is None else Translator.from_pretrained(backward, device)
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
                line = json.dumps(pair | values, ensure_ascii=output is None and not options.writes_unicode())
            if number == 0 and not as_json:
                print(*values, sep="\t", file=stream)
            print(line, file=stream)
            for sum_, each in zip(sums, scores, strict=True):
                if each is not None:
                    sum_[:] = sum_[0] + 1, sum_[1] + len(each.token_ids), sum_[2] + each.log_probability
    for side, (count, length, total) in zip(("target", "source"), sums, strict=False):
        told = f"{count:,} pairs, {length:,} {side} tokens"
        if count:
            nats = -total / length
            told += f": {nats:.4f} nats a token, perplexity {math.exp(min(nats, 100)):.2f}"
        print(told, file=sys.stderr)


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


def _score_values(scores: Sequence["PairScore | None"], with_tokens: bool) -> dict[str, Any]:
    from heedful.inference.scoring import dual_cross_entropy

    values: dict[str, Any] = {}
    for prefix, score in zip(("", "backward_"), scores, strict=False):
        values[f"{prefix}log_probability"] = score and round(score.log_probability, 6)
        values[f"{prefix}per_token"] = score and round(score.per_token, 6)
        values[f"{prefix}tokens"] = score and len(score.token_ids)
        if with_tokens:
            parts = score and zip(score.tokens, score.token_scores, strict=True)
            values[f"{prefix}token_scores"] = parts and [[token, round(value, 6)] for token, value in parts]
    if len(scores) > 1:
        one, other = scores
        values["dual_cross_entropy"] = round(dual_cross_entropy(one, other), 6) if one and other else None
    return values


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(f"{token}:{score:.4f}" for token, score in value)
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def backtranslate(
    model: options.AnyModel,
    texts: Annotated[Path, Argument(metavar="TEXTS", help="File of target sentences, a line each.")],
    output: Annotated[Path, Option("-o", "--output", help="File of pairs to write, .jsonl or .jsonl.gz.")],
    method: Annotated[
        Literal["greedy", "beam", "sampling", "noised"], Option(help="How sources are made; noised: beams with noise.")
    ] = "beam",
    num_beams: Annotated[int | None, Option("--num-beams", help="Beam width of beam and noised. Default: 5.")] = None,
    temperature: Annotated[float | None, Option(help="Of sampling. Default: 1.")] = None,
    top_k: Annotated[int | None, Option(help="Tokens that sampling draws from. Default: all.")] = None,
    seed: Annotated[int | None, Option(help="Of sampling and noise. Default: 1.")] = None,
    max_new_tokens: options.MaxNewTokens = None,
    to: options.TargetLanguage = None,
    token_budget: options.TokenBudget = 8192,
    revision: options.Revision = None,
    device: options.Device = None,
):
    """Make source sentences for target sentences with a model of the other direction: pairs to train on."""
    options.check_pairs_file(output, [texts])
    if not texts.is_file():
        raise FileNotFoundError(f"`TEXTS` must be a file of sentences, but {texts} is none.")
    if {*texts.suffixes} & OF_PAIRS:
        raise ValueError(f"`TEXTS` must be a file of target sentences, a line each, but {texts} is one of pairs.")
    with options.quick_start(model):
        from heedful.inference.teaching.back_translation import BackTranslation
        from heedful.inference.translation import Translator

        making = BackTranslation(method, num_beams, temperature, top_k, seed)
        options.quieten()
        translator = Translator.from_pretrained(model, device, revision)
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "target_language": to, "token_budget": token_budget}
    settings["chunk_size"] = CHUNK
    _write_pairs(output, making.pairs(translator, _lines(texts, "line"), **settings), making, str(texts))


def _write_pairs(output: Path, pairs: Iterable[dict[str, str]], making: Any, given: str) -> None:
    written = 0
    with options.progress_bar() as bar, options.writing(output) as stream:
        for pair in pairs:
            bar.update()
            written += 1
            print(json.dumps(pair, ensure_ascii=False), file=stream)
        if not written:
            raise ValueError(f"{given} must hold sentences to translate, but all {making.left_out} are left out.")
    left_out = f"{making.left_out:,} lines left out: empty, not ended, or repeating themselves"
    print(f"{written:,} pairs in {output}; {left_out}", file=sys.stderr)


def distill(
    teachers: Annotated[list[str], Argument(metavar="TEACHER…", help="Saved models; several are an ensemble.")],
    data: options.Data,
    output: Annotated[Path, Option("-o", "--output", help="Pairs to write, .jsonl or .jsonl.gz; for token a folder.")],
    source: options.Source = "source",
    target: options.Target = "target",
    level: Annotated[
        Literal["sequence", "token"], Option(help="What a student learns: translations, or each token's alternatives.")
    ] = "sequence",
    num_beams: Annotated[int | None, Option("--num-beams", help="Beam width of sequence. Default: 5.")] = None,
    closest: Annotated[
        int | None, Option(help="Of so many translations, take the one closest to the target by BLEU.")
    ] = None,
    max_new_tokens: options.MaxNewTokens = None,
    to: options.TargetLanguage = None,
    top_k: Annotated[int | None, Option(help="Tokens that token keeps at each place. Default: 8.")] = None,
    token_budget: Annotated[int, Option(help="Padded tokens in one batch: sources times beams, or pairs.")] = 8192,
    device: options.Device = None,
):
    """Make of pairs what a smaller model learns from a larger one: its translations, or its probabilities."""
    search = {"num_beams": num_beams, "closest": closest, "max_new_tokens": max_new_tokens, "to": to}
    for name, value in (search if level == "token" else {"top_k": top_k}).items():
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"`{option}` must be left out of the level {level}, but is {value} instead.")
    from heedful.data.sources import read_pairs
    from heedful.inference.teaching.back_translation import SequenceDistillation
    from heedful.inference.teaching.distillation import load_teachers, write_teacher_tokens

    options.quieten()
    pairs = read_pairs(data[0] if len(data) == 1 else data, source=source, target=target, streaming=True)
    if level == "token":
        check_is_new(output, "--output")
        check_at_least(1, top_k=top_k, token_budget=token_budget)
        teacher = load_teachers(teachers, device)
        languages = tuple(name for name in (target, source) if name in teacher.tokenizers.languages)
        count, too_long = write_teacher_tokens(output, teacher, pairs, languages, top_k or 8, token_budget)
        print(f"{count:,} rows in {output}; {too_long:,} left out: too long for the teacher", file=sys.stderr)
        return
    options.check_pairs_file(output, data)
    making = SequenceDistillation(5 if num_beams is None else num_beams, closest)
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "target_language": to, "token_budget": token_budget}
    settings["chunk_size"] = CHUNK
    made = making.pairs(load_teachers(teachers, device), pairs, **settings)
    # By the names of the data, so that a recipe reads them as it reads those.
    named = ({source: pair["source"], target: pair["target"]} for pair in made)
    _write_pairs(output, named, making, "`--data`")


def attention(
    model: options.AnyModel,
    text: Annotated[str | None, Argument(metavar="[TEXT]", help="The source sentence; else --data.")] = None,
    output: Annotated[Path | None, Option("-o", "--output", help="Picture (.png, .svg, .pdf) or page .html.")] = None,
    target: Annotated[str | None, Option(help="Its translation. Default: the model's own.")] = None,
    data: Annotated[list[str] | None, Option("--data", help="File of pairs (or two text files), not TEXT.")] = None,
    source_column: Annotated[str | None, Option(help="Source language or column of --data.")] = None,
    target_column: Annotated[str | None, Option(help="Target language or column of --data.")] = None,
    layer: Annotated[int | None, Option(help="Layer, from 0; -1, the default, is the last.")] = None,
    head: Annotated[int | None, Option(help="Head, from 0. Default: the mean over all heads.")] = None,
    kind: Annotated[Kind | None, Option(help="Whose attention. Default: cross.")] = None,
    grid: Annotated[bool, Option("--grid", help="Draw all heads of all layers, or of --layer.")] = False,
    scores: Annotated[bool, Option("--scores", help="Draw raw scores below the weights of --grid, as dots.")] = False,
    rollout: Annotated[bool, Option("--rollout", help="Follow attention through the layers.")] = False,
    tokens: Annotated[bool, Option("--tokens", help="Show the tokenizer's tokens, not words.")] = False,
    alignment: Annotated[bool, Option("--alignment", help="Print linked words: 0-0 1-2, source first.")] = False,
    gold: Annotated[Path | None, Option(help="Compare with given links: a file, one line a pair: AER.")] = None,
    entropy: Annotated[bool, Option("--entropy", help="Print how widely each head looks.")] = False,
    steps: Annotated[bool, Option("--steps", help="Print a head's numbers step by step. Default: head 0.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print all of it, with the weights, as JSON.")] = False,
    to: options.TargetLanguage = None,
    revision: options.Revision = None,
    device: options.Device = None,
):
    """See which words a model looks at: pictures, a page to hover over, numbers step by step, alignments, entropy."""
    from heedful.inference.attention.request import Request, answer_lines, pairs_of
    from heedful.inference.translation import Translator

    pairs = pairs_of(text, target, data, source_column, target_column)
    view: dict[str, Any] = {"kind": kind, "layer": layer, "head": head, "grid": grid, "rollout": rollout}
    view |= {"tokens": tokens, "scores": scores}
    wanted: dict[str, Any] = {"alignment": alignment, "gold": gold, "entropy": entropy, "json": as_json}
    wanted["steps"] = steps
    request = Request(pairs, data is not None, output, **view, **wanted)
    gold_alignments = request.gold_alignments()
    options.quieten()
    answer = request.answer(Translator.from_pretrained(model, device, revision), gold_alignments, to)
    lines = [json.dumps(answer, ensure_ascii=not options.writes_unicode())] if as_json else answer_lines(answer)
    print(*lines, sep="\n")


def embeddings(
    model: options.AnyModel,
    words: Annotated[list[str], Argument(metavar="WORD…", help="Words, or beginnings of words, of the source.")],
    sentence: Annotated[str | None, Option(help="The source in which they stand. Default: each word alone.")] = None,
    output: Annotated[Path | None, Option("-o", "--output", help="Picture to draw (.png, .svg, .pdf).")] = None,
    to: options.TargetLanguage = None,
    revision: options.Revision = None,
    device: options.Device = None,
):
    """See which tokens a word's embedding is near to, and what each layer of the encoder makes of it in a sentence."""
    from heedful.inference.attention.drawing import PICTURE_SUFFIXES
    from heedful.inference.attention.embeddings import draw_neighbourhoods, layer_names, neighbourhoods, word_states
    from heedful.inference.translation import Translator

    if output is not None:
        check_writable(output, PICTURE_SUFFIXES, "--output")
        check_matplotlib()
    options.quieten()
    translator = Translator.from_pretrained(model, device, revision)
    followed = [word_states(translator, translator.tokenizers, word, sentence, to) for word in dict.fromkeys(words)]
    found = neighbourhoods(translator, translator.tokenizers, followed)
    for word, near in zip(followed, found, strict=True):
        print(word.word if len(word.pieces) == 1 else f"{word.word} = {' + '.join(word.pieces)}")
        for name, each in zip(layer_names(len(near)), near, strict=True):
            tokens = "  ".join(f"{token.text} {token.cosine:.2f}" for token in each.tokens)
            print(f"  {name:<11}itself {each.own:5.2f}  {tokens}")
    if output is not None:
        draw_neighbourhoods(followed, found, output)
        print(output)
