"""`heedful distill`: pairs with translations by a larger model, or the best of several."""

import sys
from functools import partial
from typing import Annotated, Any, Literal

from typer import Argument, Option

from heedful.cli import options
from heedful.cli.options import PairsFile, write_pairs
from heedful.cli.translate import CHUNK
from heedful.messages_heed import shortened

Choice = Literal["chrf", "reverse", "score"]
RULES = "Choose by likeness to the others (chrf), by --reverse, or by the file's scores. Default: chrf."


def distill(
    output: PairsFile,
    teachers: Annotated[list[str] | None, Argument(metavar="[TEACHER…]", help="Saved models that translate.")] = None,
    data: Annotated[list[str] | None, Option("--data", help="Pairs: file, Hub dataset, builtin:SPLIT:COUNT.")] = None,
    source: options.Source = "source",
    target: options.Target = "target",
    num_beams: Annotated[int | None, Option("--num-beams", help="Beam width of TEACHER. Default: 5.")] = None,
    max_new_tokens: options.MaxNewTokens = None,
    candidates: Annotated[str | None, Option(help="File of translations to choose from, not TEACHER.")] = None,
    choose: Annotated[Choice | None, Option(help=RULES)] = None,
    reverse: Annotated[str | None, Option(help="Model of the reverse direction, to choose by.")] = None,
    reverse_to: Annotated[str | None, Option(help="Source language, for a multilingual --reverse model.")] = None,
    max_ratio: Annotated[float | None, Option(help="Largest ratio of source and candidate length.")] = None,
    language: Annotated[str | None, Option(help="Language whose script candidates must have.")] = None,
    to: options.TargetLanguage = None,
    token_budget: Annotated[int | None, Option(help="Padded tokens per batch. Default: 8192.")] = None,
    device: options.Device = None,
) -> None:
    """Make training pairs with new targets: a larger model's translations, or the best of given translations."""
    search = {"TEACHER": teachers, "--data": data, "--num-beams": num_beams, "--max-new-tokens": max_new_tokens}
    rules = {"--max-ratio": max_ratio, "--language": language, "--reverse-to": reverse_to}
    if candidates is None:
        _check_given("without --candidates", {"TEACHER": teachers, "--data": data}, {"--choose": choose})
        _check_given("without --candidates and --reverse", {}, {} if reverse else rules)
    elif choose == "reverse":
        _check_given("with --choose reverse", {"--reverse": reverse}, search | {"--to": to})
    else:
        others = {"--reverse": reverse, "--reverse-to": reverse_to, "--token-budget": token_budget, "--device": device}
        _check_given(f"with --candidates and --choose {choose or 'chrf'}", {}, search | {"--to": to} | others)
    options.check_pairs_file(output, data or [str(candidates)])
    if source == target:
        raise ValueError(f"`--target` must be another column than `--source`, but both are {source!r}.")
    options.quieten()
    from heedful.distillation.back_translation import SequenceDistillation
    from heedful.distillation.candidates import CandidateChoice, read_candidates
    from heedful.distillation.distillation import load_teachers

    choice = CandidateChoice("reverse" if reverse else choose or "chrf", max_ratio, language)
    place = str(candidates), source, target, choose == "score"
    if candidates is not None:
        choice.check(read_candidates(*place))  # finds mistakes in any row before computing
    budget: Any = {"token_budget": 8192 if token_budget is None else token_budget, "chunk_size": CHUNK}
    backward = reverse and options.load_translator(reverse, device)
    if backward:
        options.check_reverse(backward, reverse_to, "--reverse-to")
    chosen: Any = partial(choice.pairs, reverse=backward, target_language=reverse_to, **budget)
    if candidates is None:
        read = options.read_pairs(data or [], source, source, streaming=True)  # texts without targets suffice
        making = SequenceDistillation(5 if num_beams is None else num_beams)
        own: Any = {"choose": reverse and chosen, "max_new_tokens": max_new_tokens, "target_language": to, **budget}
        made = making.pairs(load_teachers(teachers or [], device), read, **own)
    else:
        making, made = None, chosen(read_candidates(*place))
    pairs = ({source: pair["source"], target: pair["target"]} for pair in made)
    write_pairs(output, pairs, None if reverse else making, "`--data`")
    if reverse or candidates is not None:
        print(choice.summary(), file=sys.stderr)


def _check_given(where: str, needed: dict[str, Any], unread: dict[str, Any]) -> None:
    for name, value in needed.items():
        if not value:
            raise ValueError(f"`{name}` must be given {where}.")
    for name, value in unread.items():
        if value not in (None, []):
            raise ValueError(f"`{name}` must be left out {where}, but is {shortened(value)} instead.")
