"""Faults that would ruin a training run, found before it starts, by training's own steps."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from heedful import processor_heed
from heedful.checking import pairs as texts
from heedful.checking import tokens
from heedful.checking.estimate import Rehearsal, plan_batches
from heedful.checking.findings import Level, RecipeFinding
from heedful.checking.pairs import Pairs
from heedful.checking.run_length import check_run_length
from heedful.configuration_base_heed import position_limit
from heedful.data.cleaning import Splits, check_references, check_symbols, clean, read_splits
from heedful.data.data_recipe import DataRecipe
from heedful.data.epochs.corpus import Corpus, StoredRows, encode
from heedful.data.sources import table_files
from heedful.data.tables import layouts_of, table_rows
from heedful.files import check_at_least, first_line
from heedful.packed_rows_heed import why_padded
from heedful.training.model_of_recipe import check_model, make_model
from heedful.training.preparation import earlier_tokenizers, tokenizers_of
from heedful.training.processes.devices import make_accelerator, runs_on_cpu
from heedful.training.publication import UNDETERMINED, language_codes
from heedful.training.recipe import OptimizationRecipe, Recipe
from heedful.training.run_folder.folder import check_output_folder
from heedful.training.start_checks import check_installed, faults, tokenizer_key

TIMED = 3  # updates
LEVELS: tuple[Level, ...] = ("error", "warning", "note")
KEY = re.compile(r"`((?:data|decoding|logging|model|optimization|tokenizer|validation)\.[a-z_]+(?:\.\w+)*)`")
# Keys whose check and refusing step have different names.
CHECKS = {"data.max_source_tokens": "lengths", "optimization.distillation": "distillation"}


@dataclass
class Diagnosis:
    """A recipe's findings, the worst first."""

    findings: list[RecipeFinding]
    looked_at: int  # training pairs
    total: int | None  # all training pairs; None for a stream with more

    def __post_init__(self) -> None:
        self.findings = sorted(self.findings, key=lambda finding: LEVELS.index(finding.level))

    @property
    def has_errors(self) -> bool:
        """Whether a finding would ruin the run."""
        return any(finding.level == "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain data."""
        names = ("check", "where", "message", "advice", "examples")
        findings = [{"severity": f.level, **{name: getattr(f, name) for name in names}} for f in self.findings]
        return {**vars(self), "findings": findings, "has_errors": self.has_errors}

    def __str__(self) -> str:
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.level:<8} {finding.where}  [{finding.check}]")
            lines += [f"         {part}" for part in (finding.message, finding.advice) if part]
            lines += [f"           {example}" for example in finding.examples]
        counts = Counter(finding.level for finding in self.findings)
        found = ", ".join(f"{counts[level]} {level}{'' if counts[level] == 1 else 's'}" for level in LEVELS)
        scope = "all" if self.looked_at == self.total else "only the first" if self.total is None else "a sample of"
        of_all = "" if self.total in (None, self.looked_at) else f" of {self.total:,}"
        return "\n".join([*lines, f"{found}; checked {scope} {self.looked_at:,}{of_all} training pairs"])


class RefusalError(Exception):
    """Training refuses the recipe. The argument is the finding."""


@contextmanager
def refusal(check: str, where: str, level: Level = "error", advice: str = "") -> Iterator[None]:
    """Turn a step's `ValueError` into a `RefusalError`; a key in its message replaces `where`."""
    try:
        yield
    except ValueError as error:
        key = named[1] if (named := KEY.search(str(error))) else where
        message, *rest = str(error).splitlines()
        advice = f"{advice} Later steps could not be checked.".lstrip()
        finding = RecipeFinding(CHECKS.get(key, check), level, message, key, advice, tuple(rest))
        raise RefusalError(finding) from error


def diagnose(recipe: Recipe, limit: int = 100_000) -> Diagnosis:
    """Run all checks on a recipe, with `limit` drawn training pairs."""
    check_at_least(1, **{"--pairs": limit})
    splits, findings = read_splits(recipe.data, limit), list[RecipeFinding]()
    try:
        findings.extend(_Examination(recipe, splits).found())  # keeps findings before an error
    except RefusalError as refused:
        findings.append(refused.args[0])
    return Diagnosis(findings, len(splits.train), splits.total)


def lines_of(data: DataRecipe, count: int) -> list[int]:
    """Return the first `count` training pairs' line numbers, if all pairs are in one table."""
    files = table_files(data.located.train) if len(data.parts) == 1 else []
    rows = table_rows(files[0], (data.source, data.target)) if len(files) == 1 else iter(())
    return [line for line, _ in islice(rows, count)]


@dataclass(frozen=True)
class _Examination:
    """Checks of a recipe and of drawn pairs."""

    recipe: Recipe
    splits: Splits

    def found(self) -> Iterator[RecipeFinding]:
        """Yield all findings, in the order of training's steps."""
        recipe, splits, card = self.recipe, self.splits, self.recipe.card
        try:
            check_output_folder(recipe)
        except ValueError as error:
            yield RecipeFinding("output", "warning", str(error), "output")
        if card.license is None and "builtin:" not in recipe.data.train:
            message = "The model card will name no license, and without a license nobody may use the model."
            advice = "Give the Hub's name for it, such as apache-2.0."
            yield RecipeFinding("card", "note", message, "card.license", advice)
        for key, part in recipe.data.parts.items():
            for said in layouts_of(table_files(part.train)):
                yield RecipeFinding("layout", "note", f"{said[0].upper()}{said[1:]}.", key)
        lines = lines_of(recipe.data, max(splits.train["row"][:], default=0))
        read = Pairs.of("train", "data.train", splits.train, lines)
        if pairs := read.without(recipe.data.denoised):
            yield from texts.check_pointless_pairs(pairs, recipe.data.cleaning)
            yield from texts.check_sides(pairs)
        with refusal("references", "decoding.ignore"):
            check_references(splits, recipe.decoding.ignore, recipe.decoding.bleu_tokenizer)
        with refusal("cleaning", "data.cleaning"):
            kept = clean(splits, recipe.data)
        yield from texts.check_cleaning(read, kept)
        train = Pairs.of("train", "data.train", kept.train, lines)
        place = "data.train" if kept.is_held_out else "data.validation"
        held_out = [Pairs.of("validation", place, kept.validation, lines if kept.is_held_out else ())]
        held_out += [Pairs.of(key.removeprefix("data.test."), key, pairs) for key, pairs in kept.tests.items()]
        yield from texts.check_overlap(read, recipe.data.cleaning, held_out)
        for split in held_out:
            yield from texts.check_pointless_pairs(split, None)
        pairs = train.without(recipe.data.denoised)
        yield from texts.check_targets(pairs)
        for split in (pairs, *held_out):
            yield from texts.check_length_ratios(split)
        for split in (train, *held_out):
            yield from texts.check_text(split)
        languages = card.source_language or recipe.data.source, card.target_language or recipe.data.target
        yield from texts.check_scripts(pairs, held_out, languages) if pairs else ()
        if UNDETERMINED in language_codes(card, recipe.data, kept.validation):
            message = "Neither names nor texts show both languages: the model will not count as a translation model."
            yield RecipeFinding("card", "note", message, "card.source_language", "If it translates, name both.")
        with refusal("installed", "decoding.bleu_tokenizer"):
            check_installed(recipe.optimization, recipe.decoding.bleu_tokenizer, recipe.logging.trackers)
        learned = train.without([0]) if recipe.data.denoise else train  # only the tokenizer uses these pairs
        yield from self._of_tokens(kept, [learned, *held_out])

    def _of_tokens(self, kept: Splits, pairs: list[Pairs]) -> Iterator[RecipeFinding]:
        """Check tokens, model and run. `pairs` begin with the training pairs."""
        recipe, splits = self.recipe, self.splits
        key, looked_at = tokenizer_key(recipe.tokenizer, recipe.model), len(splits.train)
        is_whole = looked_at == splits.total
        model_key = "model" if recipe.model.start_from is None else "model.start_from"
        with refusal("tokenizer", key):
            given = earlier_tokenizers(recipe)
        with refusal("model", model_key):
            check_model(recipe, given)
        with refusal("tokenizer", key):
            tokenizers = given or tokenizers_of(recipe.tokenizer, recipe.data, kept)
        wanted, size = recipe.tokenizer.vocab_size, len(tokenizers.source)
        if given is None and wanted is not None and size < wanted:
            message = f"The checked pairs allow only {size:,} tokens, fewer than the {wanted:,} requested."
            level: Level = "warning" if is_whole else "note"
            yield RecipeFinding("tokenizer", level, message, key, f"Set it to about {size // 2:,}.")
        with refusal("unknown_tokens", key, "error" if is_whole or given else "warning"):
            check_symbols(tokenizers, kept, recipe.decoding.ignore)
        yield from tokens.check_tokenizer_ids(tokenizers, key)
        yield from tokens.check_normalization(pairs[0], tokenizers, key)
        for split in pairs:
            yield from tokens.check_unknown_tokens(split, tokenizers, key)
        with refusal("model", model_key, advice="Give the model its own tokenizer."):
            check_model(recipe, tokenizers)
        with refusal("tokenizer", key, advice="Choose a tokenizer for these languages, or let training make one."):
            corpus = encode(recipe.data, recipe.batching, kept, tokenizers, recipe.optimization.distillation)
        assert isinstance(corpus.training, StoredRows)  # a stream's beginning was stored
        yield from tokens.check_vocabulary_use(corpus.training.rows, tokenizers, key, None if is_whole else looked_at)
        with refusal("model", model_key), torch.device("meta") if model_key == "model" else nullcontext():
            model = make_model(recipe.model, tokenizers)  # fresh weights take no memory
            recipe.data.check_room(position_limit(model.config))
        findings = [*tokens.check_special_ids(model.config, model.generation_config, model_key)]
        findings += self._of_rows(corpus, model.config, pairs)
        yield from findings
        if all(finding.level != "error" or finding.check == "decoding_lengths" for finding in findings):
            # With an error the model cannot run. Pairs that were not loaded count like the others.
            share = None if splits.total is None else splits.total / looked_at
            yield from self._of_run(corpus, model.config, share)

    def _of_rows(self, corpus: Corpus, config: Any, pairs: list[Pairs]) -> Iterator[RecipeFinding]:
        """Report the faults that training finds at its start, with examples."""
        splits = dict(zip(("data.train", "data.validation", *corpus.tests), pairs, strict=True))
        encoded = {**corpus.tests}
        if isinstance(corpus.training, StoredRows):
            encoded["data.train"] = corpus.training.rows
        for fault in faults(self.recipe, corpus, config):
            if fault.check == "unknown_tokens":  # `check_unknown_tokens` names the words
                continue
            split, rows = splits.get(fault.key, pairs[1]), encoded.get(fault.key, corpus.validation)
            examples = split.examples(dict.fromkeys(rows.numbers[row] for row in fault.rows))
            yield RecipeFinding(fault.check, fault.level, fault.message, fault.key, examples=examples)

    def _of_run(self, corpus: Corpus, config: Any, share: float | None) -> Iterator[RecipeFinding]:
        """Check the run's speed and length; its data are `share` times the corpus."""
        recipe, settings = self.recipe, self.recipe.optimization
        yield from check_speed(settings, recipe.model.attn_implementation, config)
        plan, seconds = plan_batches(corpus, settings.micro_batch_tokens), None
        if settings.max_minutes is not None:
            try:
                model = make_model(recipe.model, corpus.tokenizers)
                rehearsal = Rehearsal(make_accelerator(settings), model, settings)
                seconds = rehearsal.speed(plan.first[:TIMED]).seconds(plan.padded_tokens)
            except (ValueError, torch.OutOfMemoryError) as error:  # the recipe may be for another machine
                message = f"The number of updates in `max_minutes` could not be measured here: {first_line(error)}"
                yield RecipeFinding("speed", "note", message, "optimization.max_minutes")
        per_epoch = None if share is None or plan.updates_per_epoch is None else plan.updates_per_epoch * share
        measured = config.d_model, per_epoch, seconds
        yield from check_run_length(settings, recipe.validation, recipe.checkpoints, *measured)


def check_speed(settings: OptimizationRecipe, kernel: str | None, config: Any) -> Iterator[RecipeFinding]:
    """Find slow settings. The figures are for an H200 at base size (docs/benchmarks.md)."""
    on_cpu = not torch.cuda.is_available() or runs_on_cpu(settings.device)
    if on_cpu and settings.mixed_precision == "bf16" and not processor_heed.has_bfloat16():
        message = "This processor has no instructions for bf16: training here computes in float32."
        yield RecipeFinding("speed", "note", message, "optimization.mixed_precision")
    if on_cpu or config.model_type != "heed":
        return
    reason = why_padded(config, kernel or "sdpa")
    if kernel == "eager":
        message = "On a GPU `eager` attention takes a quarter more time per update than `sdpa`, and more memory."
        yield RecipeFinding("speed", "warning", message, "model.attn_implementation", "Leave it empty.")
    elif reason is not None and settings.mixed_precision == "bf16":
        message = f"Rows are padded to one length, because {reason}: a GPU computes padding too."
        yield RecipeFinding("speed", "note", message, "model.options")
    if settings.mixed_precision == "no":
        message = "On a GPU float32 products take four times as long as bf16 products."
        advice = "Set it to bf16; or to tf32: products then keep three digits, all else stays float32."
        yield RecipeFinding("speed", "warning", message, "optimization.mixed_precision", advice)
