"""`heedful distill`: pairs whose targets a larger model wrote, or that were chosen."""

import sys
from collections import deque
from typing import Annotated, Any, Literal

from typer import Argument, Option

from heedful.cli import options
from heedful.cli.options import PairsFile, write_pairs
from heedful.cli.translate import CHUNK
from heedful.files import shortened

Choice = Literal["chrf", "bleu", "reverse", "score"]


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
    choose: Annotated[Choice | None, Option(help="Most like the others, --reverse, or score. Default: chrf.")] = None,
    reverse: Annotated[str | None, Option(help="Model of the other direction, for --choose reverse.")] = None,
    max_ratio: Annotated[float | None, Option(help="Drop candidates so many times as long or short.")] = None,
    language: Annotated[str | None, Option(help="Drop candidates in another script than this language's.")] = None,
    to: options.TargetLanguage = None,
    token_budget: Annotated[int | None, Option(help="Padded tokens in one batch. Default: 8192.")] = None,
    device: options.Device = None,
) -> None:
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
        from heedful.distillation.back_translation import SequenceDistillation
        from heedful.distillation.distillation import load_teachers

        needed = target if closest else source  # texts alone do as well
        read = options.read_pairs(data or [], source, needed, streaming=True)
        making = SequenceDistillation(5 if num_beams is None else num_beams, closest)
        made = making.pairs(load_teachers(teachers or [], device), read, max_new_tokens=max_new_tokens, **settings)
    else:
        from heedful.distillation.candidates import CandidateChoice, read_candidates

        making, choice = None, CandidateChoice(choose or "chrf", max_ratio, language)
        place = candidates, source, target, choose == "score"
        deque(read_candidates(*place), maxlen=0)  # finds mistakes in the last row before anything is computed
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
