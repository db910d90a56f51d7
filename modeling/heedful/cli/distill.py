"""`heedful distill`: pairs with translations by a larger model, or the best of several."""

import sys
from collections import deque
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
    reverse: Annotated[str | None, Option(help="Model of the reverse direction, for --choose reverse.")] = None,
    max_ratio: Annotated[float | None, Option(help="Largest ratio of source and candidate length.")] = None,
    language: Annotated[str | None, Option(help="Language whose script candidates must have.")] = None,
    to: options.TargetLanguage = None,
    token_budget: Annotated[int | None, Option(help="Padded tokens per batch. Default: 8192.")] = None,
    device: options.Device = None,
) -> None:
    """Make training pairs with new targets: a larger model's translations, or the best of given translations."""
    search = {"TEACHER": teachers, "--data": data, "--num-beams": num_beams, "--max-new-tokens": max_new_tokens}
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
        from heedful.distillation.back_translation import SequenceDistillation
        from heedful.distillation.distillation import load_teachers

        read = options.read_pairs(data or [], source, source, streaming=True)  # texts without targets suffice
        making = SequenceDistillation(5 if num_beams is None else num_beams)
        made = making.pairs(load_teachers(teachers or [], device), read, max_new_tokens=max_new_tokens, **settings)
    else:
        from heedful.distillation.candidates import CandidateChoice, read_candidates

        making, choice = None, CandidateChoice(choose or "chrf", max_ratio, language)
        place = candidates, source, target, choose == "score"
        deque(read_candidates(*place), maxlen=0)  # finds mistakes in any row before computing
        backward = reverse and options.load_translator(reverse, device)
        made = choice.pairs(read_candidates(*place), backward, **settings)
    write_pairs(output, ({source: pair["source"], target: pair["target"]} for pair in made), making, "`--data`")
    if candidates is not None:
        print(choice.summary(), file=sys.stderr)


def _check_given(where: str, needed: dict[str, Any], unread: dict[str, Any]) -> None:
    for name, value in needed.items():
        if not value:
            raise ValueError(f"`{name}` must be given {where}.")
    for name, value in unread.items():
        if value not in (None, []):
            raise ValueError(f"`{name}` must be left out {where}, but is {shortened(value)} instead.")
