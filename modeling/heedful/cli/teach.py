"""For those who make pairs to learn from, by a rule or with a model: `pairs`, `backtranslate` and `distill`."""

import sys
from collections import deque
from collections.abc import Callable, Iterable
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option, Typer

from heedful.cli import options
from heedful.cli.translate import CHUNK, lines_of
from heedful.files import check_at_least, check_is_new, json_line, shortened

pairs = Typer(help="Make pairs (`source`, `target`) for a task that is no translation.", no_args_is_help=True)
Method = Literal["greedy", "beam", "sampling", "noised"]
PairsFile = Annotated[Path, Option("-o", "--output", help="Pairs to write, .jsonl or .jsonl.gz.")]
Texts = Annotated[str, Option(help="Right texts: a file, or whatever `data.train` takes.")]
Column = Annotated[str | None, Option(help="Theirs, or their language. Default: the only one, or whole lines.")]
Typos = Annotated[float, Option(help="Share of the words.")]
Nouns = Annotated[str | None, Option(help="File of Korean nouns to put in the places of the texts'.")]
Actions = Annotated[str | None, Option("--lengths", help="Fewest and most actions, such as 1-25. Default: all.")]
Lengths = Annotated[str, Option(help="Fewest and most symbols.")]
Symbols = Annotated[int, Option(help="How many there are.")]
Language = Annotated[str, Option(help="Of the words, which num2words writes, and of the digits; of dates en or ko.")]
Most = Annotated[int | None, Option("--count", min=1, help="Of pairs. Default: one for each text.")]
Count = Annotated[int, Option(min=1, help="Of pairs.")]
Seed = Annotated[int, Option(min=0, help="Another one gives other pairs.")]
Teachers = Annotated[list[str], Argument(metavar="TEACHER…", help="Saved models; several are an ensemble.")]
Choice = Literal["chrf", "bleu", "reverse", "score"]


def task(command: Callable[..., None]) -> Callable[..., None]:
    """Make a subcommand of `heedful pairs` that writes what the function of its name in `task_pairs` returns."""

    @wraps(command)
    def run(output: Path, **settings: Any) -> None:
        from heedful.data.tasks import task_pairs

        options.check_pairs_file(output)
        if "column" in settings:
            from heedful.proposals.first_recipe import find_text_column

            settings["column"] = find_text_column(settings["texts"], settings["column"], "--column")
        made = getattr(task_pairs, f"{command.__name__.removesuffix('s')}_pairs")(**settings)
        _write_pairs(output, ({"source": source, "target": target} for source, target in made))

    return pairs.command()(options.safe_at_terminals(run))


@task
def spelling(
    output: PairsFile, texts: Texts, column: Column = None, typos: Typos = 0.1, count: Most = None, seed: Seed = 1
):
    """Words with typing mistakes to what was meant."""


@task
def spacing(
    output: PairsFile, texts: Texts, column: Column = None, nouns: Nouns = None, count: Most = None, seed: Seed = 1
):
    """Texts without spaces to texts with them."""


@task
def scan(output: PairsFile, texts: Texts, lengths: Actions = None, count: Most = None):
    """Commands to actions, from SCAN's own files."""


@task
def numbers(output: PairsFile, count: Count, language: Language = "en", seed: Seed = 1):
    """Numbers to words."""


@task
def dates(output: PairsFile, count: Count, language: Language = "en", seed: Seed = 1):
    """Dates to words."""


@task
def reverse(output: PairsFile, count: Count, lengths: Lengths = "1-25", symbols: Symbols = 50, seed: Seed = 1):
    """Symbols to the same from the last to the first."""


def _write_pairs(output: Path, pairs: Iterable[dict[str, str]], making: Any = None, given: str = "") -> None:
    """Write pairs, perhaps those that `making` yields of what is given, and print how many, and what it leaves out."""
    count = 0
    with options.progress_bar() as bar, options.writing(output) as stream:
        for pair in pairs:
            bar.update()
            count += 1
            print(json_line(pair), file=stream)
        if not count and making is not None:
            raise ValueError(f"{given} must hold sentences to translate, but all {making.left_out} are left out.")
    left_out = f"; {making.left_out:,} lines left out: empty, not ended, or repeating themselves" if making else ""
    print(f"{count:,} pairs in {output}{left_out}", file=sys.stderr)


def backtranslate(
    model: options.AnyModel,
    texts: Annotated[Path, Argument(metavar="TEXTS", help="File of target sentences, a line each, or a table.")],
    output: PairsFile,
    column: Annotated[str | None, Option("--target", help="Column or language of TEXTS, of a table.")] = None,
    method: Annotated[Method, Option(help="How sources are made; noised: beams with noise.")] = "beam",
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
    options.check_input(texts, "TEXTS")
    table = options.texts_of(texts, column, "--target")
    with options.quick_start(model):
        from heedful.inference.teaching.back_translation import BackTranslation

        making = BackTranslation(method, num_beams, temperature, top_k, seed)
    translator = options.load_translator(model, device, revision)
    search: Any = {"max_new_tokens": max_new_tokens, "target_language": to, "token_budget": token_budget}
    made = making.pairs(translator, table or chain.from_iterable(lines_of(texts, "line")), chunk_size=CHUNK, **search)
    _write_pairs(output, made, making, str(texts))


def distill(
    output: PairsFile,
    teachers: Annotated[list[str] | None, Argument(metavar="[TEACHER…]", help="Saved models, or an ensemble.")] = None,
    data: Annotated[list[str] | None, Option("--data", help="Pairs for TEACHER: as of `heedful score`.")] = None,
    source: options.Source = "source",
    target: options.Target = "target",
    num_beams: Annotated[int | None, Option("--num-beams", help="Beam width. Default: 5.")] = None,
    closest: Annotated[int | None, Option(help="Of so many translations, take the target's closest by BLEU.")] = None,
    max_new_tokens: options.MaxNewTokens = None,
    candidates: Annotated[str | None, Option(help="In place of TEACHER: file of translations to choose from.")] = None,
    choose: Annotated[
        Choice | None, Option(help="Most like the others, by --reverse, or a score. Default: chrf.")
    ] = None,
    reverse: Annotated[str | None, Option(help="Model of the other direction, for --choose reverse.")] = None,
    max_ratio: Annotated[float | None, Option(help="Drop candidates so many times as long or short.")] = None,
    language: Annotated[str | None, Option(help="Drop candidates in another script than this language's.")] = None,
    to: options.TargetLanguage = None,
    token_budget: Annotated[int | None, Option(help="Padded tokens in one batch. Default: 8192.")] = None,
    device: options.Device = None,
):
    """Put translations of a larger model, or the best of given ones, in the place of targets: pairs to learn from."""
    search = {"TEACHER": teachers, "--data": data, "--num-beams": num_beams, "--closest": closest}
    search |= {"--max-new-tokens": max_new_tokens}
    choices = {"--choose": choose, "--max-ratio": max_ratio, "--language": language, "--reverse": reverse}
    models = {"--reverse": reverse, "--to": to, "--token-budget": token_budget, "--device": device}
    if candidates is None:
        _check_given("without --candidates", {"TEACHER": teachers, "--data": data}, choices)
    elif choose == "reverse":
        _check_given("with --choose reverse", {"--reverse": reverse}, search)
    else:
        _check_given(f"with --candidates and --choose {choose or 'chrf'}", {}, search | models)
    options.check_pairs_file(output, data or [str(candidates)])
    if source == target:
        raise ValueError(f"`--target` must be another column than `--source`, but both are {source!r}.")
    options.quieten()
    budget = 8192 if token_budget is None else token_budget
    settings: Any = {"target_language": to, "token_budget": budget, "chunk_size": CHUNK}
    if candidates is None:
        from heedful.inference.teaching.back_translation import SequenceDistillation
        from heedful.inference.teaching.distillation import load_teachers

        needed = target if closest else source  # texts alone do as well
        read = options.read_pairs(data or [], source, needed, streaming=True)
        making = SequenceDistillation(5 if num_beams is None else num_beams, closest)
        made = making.pairs(load_teachers(teachers or [], device), read, max_new_tokens=max_new_tokens, **settings)
    else:
        from heedful.inference.teaching.candidates import CandidateChoice, read_candidates

        making, choice = None, CandidateChoice(choose or "chrf", max_ratio, language)
        place = candidates, source, target, choose == "score"
        deque(read_candidates(*place), maxlen=0)  # what is wrong in the last row is known before anything is computed
        backward = reverse and options.load_translator(reverse, device)
        made = choice.pairs(read_candidates(*place), backward, **settings)
    # The columns are named as those of the data, so that a recipe reads them as it reads those.
    _write_pairs(output, ({source: pair["source"], target: pair["target"]} for pair in made), making, "`--data`")
    if candidates is not None:
        print(choice.summary(), file=sys.stderr)


def _check_given(where: str, needed: dict[str, Any], unread: dict[str, Any]) -> None:
    """Raise a `ValueError` that names an option that must be given, or would not be read."""
    for name, value in needed.items():
        if not value:
            raise ValueError(f"`{name}` must be given {where}.")
    for name, value in unread.items():
        if value not in (None, []):
            raise ValueError(f"`{name}` must be left out {where}, but is {shortened(value)} instead.")


def distill_tokens(
    teachers: Teachers,
    data: options.Data,
    output: Annotated[Path, Option("-o", "--output", help="Folder to write; it must not exist.")],
    source: options.Source = "source",
    target: options.Target = "target",
    top_k: Annotated[int, Option(help="Tokens to keep at each place.")] = 8,
    token_budget: Annotated[int, Option(help="Padded tokens of pairs in one batch.")] = 8192,
    device: options.Device = None,
):
    """Write what a larger model finds probable at each place of the targets: `optimization.distillation` reads it."""
    from heedful.inference.teaching.distillation import load_teachers, write_teacher_tokens

    options.quieten()
    read = options.read_pairs(data, source, target, streaming=True)
    check_is_new(output, "--output")
    check_at_least(1, top_k=top_k, token_budget=token_budget)
    teacher = load_teachers(teachers, device)
    languages = tuple(name for name in (target, source) if name in teacher.tokenizers.languages)
    count, too_long = write_teacher_tokens(output, teacher, read, languages, top_k, token_budget)
    print(f"{count:,} rows in {output}; {too_long:,} left out: too long for the teacher", file=sys.stderr)
