"""`heedful evaluate`: a test set translated and scored, by one process or several."""

import warnings
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from heedful.cli import options
from heedful.files import check_at_least, one_line, write_text
from heedful.training.processes.launcher import world_size


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
    metric: Annotated[str | None, Option(help="comet:FOLDER, a saved COMET model, besides.")] = None,
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
    from heedful.data.sources import references_of
    from heedful.evaluation import metrics

    options.check_output(predictions, "--predictions", data)
    check_at_least(0, confusions=confusions)
    scoring: dict[str, Any] = {"tokenize": tokenize, "lowercase": lowercase, "bootstrap": bootstrap, "ignore": ignore}
    metrics.score_translations([""], [""], **scoring)  # raises now what it would raise when all is translated
    pairs = list(options.read_pairs(data, source, target, split="test", references=references))
    accepted = references_of(pairs)
    left = metrics.references_left(ignore, accepted)
    _warn_of_direction(Path(model), source, target)
    learned = None if metric is None else import_module("heedful.diagnosis.comet").learned_metric(metric, device)
    options.quieten()
    search: dict[str, Any] = {"num_beams": num_beams, "max_new_tokens": max_new_tokens, "target_language": to}
    texts = _translate_all(model, revision, device, pairs, ignore, token_budget=token_budget, **search)
    if texts is None:
        return
    if predictions is not None:
        write_text(predictions, "".join(one_line(text) + "\n" for text in texts))
    scoring["metrics"] = metrics.affordable_metrics(ter, texts, accepted)
    scores = metrics.score_translations(texts, accepted, **scoring)
    lines = [metrics.scores_table(scores)]
    sources, seen = [pair["source"] for pair in pairs], metrics.comparable(texts, ignore)
    if learned is not None:
        lines.append(learned.added_to(scores, sources, seen, left))
    if confusions:
        found = import_module("heedful.evaluation.confusions")
        scores["confusions"] = found.commonest_confusions(seen, left, sources, confusions, lowercase)
        lines.append(found.confusions_table(scores["confusions"]))
    options.print_result(scores, "\n".join(lines), as_json)


def _warn_of_direction(model: Path, source: str, target: str) -> None:
    """Warn if the recipe in a model's folder says that it was trained in the other direction alone."""
    with suppress(OSError, ValueError):
        directions = import_module("heedful.training.stages").directions_of(model)
        if (target, source) in directions and (source, target) not in directions:
            should = f"`--source` and `--target` should be {target} and {source}, as {model} was trained"
            warnings.warn(f"{should}, but are {source} and {target} instead.", stacklevel=3)


def _translate_all(
    folder: str, revision: str | None, device: Any, pairs: list[Any], ignore: str | None, **settings: Any
) -> list[str] | None:
    """Return the best translation of each source; if several processes share the work, only in the main one."""
    from heedful.inference.translation import Translator

    accelerator = None
    if world_size() > 1:
        from heedful.training.launch.join import join_processes
        from heedful.training.loop.validation import translate_on_ranks

        accelerator = join_processes(device)
        device = accelerator.device
    translator, sources = Translator.from_pretrained(folder, device, revision), [pair["source"] for pair in pairs]
    translator.tokenizers.check_symbols(pairs, "`--data`", ignore)
    if accelerator is None:
        with options.progress_bar(total=len(sources)) as bar:
            return [best.text for best, *_ in translator.translate_lines(sources, progress=bar.update, **settings)]
    texts = translate_on_ranks(translator, sources, accelerator, **settings)
    accelerator.end_training()
    return texts if accelerator.is_main_process else None
