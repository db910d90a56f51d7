"""`heedful distill-tokens`: a larger model's most probable tokens."""

import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from heedful.cli import options
from heedful.files import check_at_least, check_is_new

Teachers = Annotated[list[str], Argument(metavar="TEACHER…", help="Saved models; several form an ensemble.")]


def distill_tokens(
    teachers: Teachers,
    data: options.Data,
    output: Annotated[Path, Option("-o", "--output", help="Folder to write; it must not exist.")],
    source: options.Source = "source",
    target: options.Target = "target",
    top_k: Annotated[int, Option(help="Most probable tokens to store per position.")] = 8,
    token_budget: Annotated[int, Option(help="Padded tokens per batch, sources and targets.")] = 8192,
    device: options.Device = None,
) -> None:
    """Store a larger model's most probable tokens at each target position, for `optimization.distillation`."""
    from heedful.distillation.distillation import load_teachers, write_teacher_tokens

    options.quieten()
    read = options.read_pairs(data, source, target, streaming=True)
    check_is_new(output, "--output")
    check_at_least(1, top_k=top_k, token_budget=token_budget)
    teacher = load_teachers(teachers, device)
    languages = tuple(name for name in (target, source) if name in teacher.tokenizers.languages)
    count, too_long = write_teacher_tokens(output, teacher, read, languages, top_k, token_budget)
    print(f"{count:,} rows in {output}; {too_long:,} left out: too long for the teacher", file=sys.stderr)
