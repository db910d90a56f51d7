"""For those who use a model: `heedful translate`, `evaluate` and `attention`."""

import json
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from heedful.cli import options
from heedful.files import write_text
from heedful.training.processes.launcher import world_size

Kind = Literal["cross", "encoder", "decoder"]


def translate(
    model: options.AnyModel,
    text: Annotated[
        list[str] | None, Argument(metavar="[TEXT]…", help="Sentences; those that begin with - after --.")
    ] = None,
    source: Annotated[
        Path | None, Option("--input", help="File of sentences, a line each; else standard input.")
    ] = None,
    output: Annotated[Path | None, Option("-o", "--output", help="File to write; else standard output.")] = None,
    split: Annotated[bool, Option("--split", help="Take apart what is longer than the model has learned.")] = False,
    num_beams: options.Beams = None,
    n_best: Annotated[int, Option("--n-best", help="Translations of each sentence, best first.")] = 1,
    scores: Annotated[bool, Option("--scores", help="Print each translation's score before it.")] = False,
    max_new_tokens: options.MaxNewTokens = None,
    early_stopping: Annotated[bool | None, Option(help="End beam search early. Default: the model's own.")] = None,
    to: options.TargetLanguage = None,
    token_budget: options.TokenBudget = 8192,
    engine: options.Engine = "auto",
    precision: options.Precision = "float32",
    revision: options.Revision = None,
    device: options.Device = None,
):
    """Translate sentences, a file or standard input line by line; the order is kept."""
    if text and source is not None:
        raise ValueError(f"`--input` must be left out where sentences are given, but is {source} instead.")
    if source is not None and not source.is_file():
        raise FileNotFoundError(f"`--input` must be a file of sentences, but {source} is none.")
    if output is not None:
        options.check_output(output, "--output")
    with options.quick_start(model):
        from heedful.inference.translation import Translator

        options.quieten()
        translator = Translator.from_pretrained(model, device, revision, engine, precision)
    lines = iter(text) if text else _lines(source)
    settings: dict[str, Any] = {"num_beams": num_beams, "num_return_sequences": n_best, "target_language": to}
    settings |= {"max_new_tokens": max_new_tokens, "early_stopping": early_stopping, "token_budget": token_budget}
    settings |= {"split": split, "keep_going": not text}
    is_dialogue = not text and source is None and sys.stdin.isatty()
    if is_dialogue:
        print("Sentences, one a line; Ctrl-D ends.", file=sys.stderr)
        found: Iterable[Any] = chain.from_iterable(translator.translate_lines([line], **settings) for line in lines)
    else:
        found = translator.translate_lines(lines, **settings)
        if not text and (output is not None or not sys.stdout.isatty()):
            found = options.with_progress(found, source)
    with options.writing(output) as stream:
        for translations in found:
            for translation in translations:
                score = f"{translation.score:.4f}\t" if scores and translation.score is not None else ""
                print(score + translation.text.replace("\n", " "), file=stream, flush=is_dialogue)


def _lines(path: Path | None) -> Iterator[str]:
    """Yield the lines of a file, or of standard input, without what is not UTF-8 in them, of which it warns."""
    broken = 0
    with path.open("rb") if path is not None else nullcontext(sys.stdin.buffer) as stream:
        for number, line in enumerate(stream, start=1):
            if number == 1 and line.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise ValueError(f"{path or 'Standard input'} must be UTF-8, but begins as UTF-16 does.")
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError as error:
                broken += 1
                if broken <= 3:
                    told = f"byte {line[error.start]:#04x} at position {error.start}"
                    warnings.warn(f"Line {number} must be UTF-8, but has {told}: it is left out.", stacklevel=2)
                yield line.decode("utf-8", errors="ignore")
    if broken > 3:
        warnings.warn(f"{broken - 3} more lines are not UTF-8.", stacklevel=2)


def evaluate(
    model: options.AnyModel,
    data: Annotated[list[str], Option("--data", help="File (or two text files), Hub dataset or builtin:SPLIT:COUNT.")],
    source: Annotated[str, Option(help="Source language or column.")] = "source",
    target: Annotated[str, Option(help="Target language or column.")] = "target",
    num_beams: options.Beams = None,
    max_new_tokens: options.MaxNewTokens = None,
    to: options.TargetLanguage = None,
    tokenize: Annotated[str, Option(help="sacreBLEU's tokenizer for BLEU.")] = "13a",
    lowercase: Annotated[bool, Option("--lowercase", help="Ignore case.")] = False,
    bootstrap: Annotated[int, Option(help="Resamples behind the 95 % intervals; 0 for none.")] = 1000,
    token_budget: options.TokenBudget = 8192,
    predictions: Annotated[Path | None, Option(help="Write the translations here, one a line.")] = None,
    as_json: options.AsJson = False,
    revision: options.Revision = None,
    device: options.Device = None,
):
    """Translate a test set and score it: BLEU and chrF with their signatures, TER, exact match.

    Started by torchrun or accelerate launch, the processes share the sentences.
    """
    from heedful.data.sources import read_pairs
    from heedful.evaluation.metrics import score_translations

    if predictions is not None:
        options.check_output(predictions, "--predictions")
    scoring: dict[str, Any] = {"tokenize": tokenize, "lowercase": lowercase, "bootstrap": bootstrap}
    score_translations([""], [""], **scoring)  # raises now what it would raise when all is translated
    pairs = list(read_pairs(data[0] if len(data) == 1 else data, source=source, target=target, split="test"))
    options.quieten()
    search = {"num_beams": num_beams, "max_new_tokens": max_new_tokens, "target_language": to}
    sources, references = ([pair[side] for pair in pairs] for side in ("source", "target"))
    texts = _translate_all(model, revision, sources, device, token_budget=token_budget, **search)
    if texts is None:
        return
    if predictions is not None:
        write_text(predictions, "".join(text.replace("\n", " ") + "\n" for text in texts))
    scores = score_translations(texts, references, **scoring)
    lines = [f"{scores['count']} pairs"]
    for name, title in {"bleu": "BLEU", "chrf": "chrF", "ter": "TER", "exact_match": "exact match"}.items():
        interval = scores.get(f"{name}_interval")
        spread = f"  (95 %: {interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
        unit = " %" if name == "exact_match" else ""
        lines.append(f"{title:<12}{scores[name]:6.2f}{unit}{spread}  {scores.get(f'{name}_signature', '')}".rstrip())
    options.print_result(scores, "\n".join(lines), as_json)


def _translate_all(folder: str, revision: str | None, sources: list[str], device: str | None, **settings):
    """Return the best translation of each source; if several processes share the work, only in the main one."""
    from heedful.inference.translation import Translator

    if world_size() == 1:
        translator = Translator.from_pretrained(folder, device, revision)
        return [best.text for best, *_ in translator.translate(sources, **settings)]
    from heedful.training.loop.validation import translate_on_ranks
    from heedful.training.processes.devices import join_processes

    accelerator = join_processes(device)
    translator = Translator.from_pretrained(folder, accelerator.device, revision)
    texts = translate_on_ranks(translator, sources, accelerator, **settings)
    is_main = accelerator.is_main_process
    accelerator.end_training()
    return texts if is_main else None


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
    rollout: Annotated[bool, Option("--rollout", help="Follow attention through the layers.")] = False,
    tokens: Annotated[bool, Option("--tokens", help="Show the tokenizer's tokens, not words.")] = False,
    alignment: Annotated[bool, Option("--alignment", help="Print linked words: 0-0 1-2, source first.")] = False,
    gold: Annotated[Path | None, Option(help="Compare with given links: a file, one line a pair: AER.")] = None,
    entropy: Annotated[bool, Option("--entropy", help="Print how widely each head looks.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print all of it, with the weights, as JSON.")] = False,
    to: options.TargetLanguage = None,
    revision: options.Revision = None,
    device: options.Device = None,
):
    """See which words a model looks at: pictures, a page to hover over, alignments, entropy."""
    from heedful.inference.attention.request import Request, answer_lines, pairs_of
    from heedful.inference.translation import Translator

    pairs = pairs_of(text, target, data, source_column, target_column)
    view: dict[str, Any] = {"kind": kind, "layer": layer, "head": head, "grid": grid, "rollout": rollout}
    view["tokens"] = tokens
    wanted: dict[str, Any] = {"alignment": alignment, "gold": gold, "entropy": entropy, "json": as_json}
    request = Request(pairs, data is not None, output, **view, **wanted)
    gold_alignments = request.gold_alignments()
    options.quieten()
    answer = request.answer(Translator.from_pretrained(model, device, revision), gold_alignments, to)
    print(json.dumps(answer, ensure_ascii=False) if as_json else "\n".join(answer_lines(answer)))
