"""A first recipe for pairs of one's own: what they are, and settings that fit them and this machine, with reasons."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful.data.cleaning import CleaningRules
from heedful.data.sources import columns_of, read_pairs
from heedful.diagnosis.findings import percent
from heedful.diagnosis.recipe_checks.pairs import (
    SCRIPTS_AND_LANGUAGES,
    SCRIPTS_OF_LANGUAGES,
    Pairs,
    cleaned,
    main_script,
)
from heedful.files import check_is_new, write_text
from heedful.training.proposal import LOOKED_AT, look_at, propose, this_machine

# What columns are called where they are not called like languages.
COLUMN_NAMES = {"source", "target", "src", "tgt", "trg", "input", "output", "question", "answer", "command", "actions"}
TEMPLATE = """# {title}
#   heedful train {file}
# Written by `heedful init` after a look at the data. Keys that are not here have their defaults; those of
# `heedful recipes multi30k-de-en` are all there are, each with its meaning.

name: {name}

data:
  train: {train}  # relative to this file
  validation: null  # empty holds out a twentieth of the pairs, at most 500, the same ones in every run
  source: {source}  # {column_note}
  target: {target}
  cleaning:
    drop_duplicates: {drop_duplicates}  # {duplicate_note}
    drop_identical: {drop_identical}  # {identical_note}
    max_ratio: {max_ratio}  # one side more than so many times as long as the other; {ratio_note}

tokenizer:
{tokenizer}
model:
  options:  # changes to the paper's base model: the fewer pairs, the smaller, and the more dropout
{options}
optimization:
  schedule: linear  # rises over the warm-up, then falls to 0 at max_updates
  learning_rate: {learning_rate}
  warmup_updates: {warmup_updates}
  max_updates: {max_updates}  # about {minutes} minutes on this machine ({machine}), as estimated
  max_minutes: {max_minutes}  # whichever comes first
  tokens_per_update: {tokens_per_update}  # padded source and target tokens of one optimizer step
  mixed_precision: {mixed_precision}

validation:
  every_updates: {every_updates}  # how often loss and scores are measured
  sentences: {sentences}  # validation pairs whose targets are generated
  max_new_tokens: {max_new_tokens}

checkpoints:
  every_updates: {checkpoint_updates}
  keep_last: {keep_last}
  publish: {publish}  # the weights with the lowest validation loss

decoding:
  num_beams: {num_beams}
  max_length: {max_length}  # of what is generated, in tokens; one pair in a hundred has a side of {longest} bytes

card:  # what the model card says that no program can know
  license: null  # yours, as the Hub names it, such as apache-2.0; empty: unknown
  source_language: {source_language}  # its code, such as de
  target_language: {target_language}
  dataset: {dataset}  # what the card calls the data
"""


# Of an algorithm that `look_at` finds: what it is, and why.
REASONS = {
    "bpe": "byte pairs suit sentences",
    "word": "between spaces stand few different symbols; another one will be an error",
    "character": "single words, or texts in which only spaces change",
}


@dataclass(frozen=True)
class FirstRecipe:
    """The recipe that was written, and what was seen in the data."""

    path: Path
    told: tuple[str, ...]  # sentences


def write_first_recipe(data: Path, output: Path, source: str | None = None, target: str | None = None) -> FirstRecipe:
    """Look at pairs in a file or folder, and write a recipe that fits them and this machine.

    `source` and `target` are languages or columns, as `read_pairs` takes them; `None` finds them.
    """
    check_is_new(output, "--output", "file")
    if not data.exists():
        raise FileNotFoundError(f"`--data` must be a file or folder that exists, but {data} does not.")
    if (source is None) != (target is None):
        raise ValueError("`--source` and `--target` must be given both or not at all, but only one is.")
    source, target = find_columns(str(data)) if source is None or target is None else (source, target)
    corpus = read_pairs(str(data), source, target)
    pairs = Pairs.first(corpus, LOOKED_AT, "train", "data.train")
    if len(corpus) < 20:
        raise ValueError(f"`--data` must hold at least 20 pairs to learn from, but {data} holds {len(corpus)}.")
    facts, machine = look_at(pairs, len(corpus)), this_machine()
    proposal = propose(facts, machine)
    values = {key.rpartition(".")[2]: value for key, value in proposal.settings.items()}
    values["checkpoint_updates"] = values["every_updates"]
    values["options"] = "".join(f"    {key}: {value}\n" for key, value in values["options"].items())
    values["tokenizer"] = _tokenizer_lines(proposal.settings, facts.algorithms)
    values |= cleaning_for(pairs)
    languages = [language_of(*side) for side in ((source, pairs.sources), (target, pairs.targets))]
    columns = "columns by number: the table has no line of names" if source.isdigit() else "languages or columns"
    text = TEMPLATE.format(
        **values,
        title=f"{data.name}: {len(corpus):,} pairs, from {languages[0] or source} to {languages[1] or target}.",
        file=output.name,
        name=_quoted(re.sub(r"\W+", "-", data.name.split(".")[0]).strip("-") or "model"),
        train=_quoted(os.path.relpath(data, output.parent)),
        source=_quoted(source),
        target=_quoted(target),
        column_note=columns,
        minutes=f"{max(1, proposal.minutes):.0f}",
        machine="a GPU" if machine.has_gpu else f"{machine.cores} CPU cores",
        longest=facts.longest_bytes,
        source_language=_quoted(languages[0]),
        target_language=_quoted(languages[1]),
        dataset=_quoted(data.name),
    )
    write_text(output, text)
    vocabulary, width = values["vocab_size"] or "of all symbols", proposal.settings["model.options"]["d_model"]
    told = (
        f"{len(corpus):,} pairs in {data}, source {source!r}, target {target!r} ({columns})",
        f"duplicates: {values['duplicate_note']}; source and target alike: {values['identical_note']}",
        f"vocabulary {vocabulary}, d_model {width}, "
        f"{values['max_updates']:,} updates: about {max(1, proposal.minutes):.0f} minutes here",
    )
    return FirstRecipe(output, told)


def _tokenizer_lines(settings: dict[str, Any], algorithms: tuple[str, str]) -> str:
    """Write the section of the tokenizer, each key with its reason."""
    if algorithms == ("bpe", "bpe"):
        size = settings["tokenizer.vocab_size"]
        return f"  vocab_size: {size}  # byte-level BPE for both sides; lowered where the texts allow no more\n"
    source, target = (REASONS[algorithm] for algorithm in algorithms)
    sides = "source" if "tokenizer.target_algorithm" in settings else "source and target"
    notes = {
        "algorithm": f"of the {sides}: {source}",
        "target_algorithm": f"of the target: {target}",
        "joint": "false is a vocabulary for each side",
    }
    lines = []
    for key, value in settings.items():
        section, _, name = key.partition(".")
        if section == "tokenizer":
            told, note = json.dumps(value).strip('"'), notes.get(name, "null: all of the texts")
            lines.append(f"  {name}: {told}  # {note}\n")
    return "".join(lines)


def find_columns(location: str) -> tuple[str, str]:
    """Return the two languages or columns of a corpus; of a table without a line of names, the numbers 1 and 2."""
    names = columns_of(location)
    known = [name for name in names if name.lower() in COLUMN_NAMES or _code(name) in SCRIPTS_OF_LANGUAGES]
    if len(known) > 2:  # a code of Indonesian, but more often a number of the row
        known = [name for name in known if name.lower() != "id"]
    if len(known) == 2:
        return known[0], known[1]
    is_table = re.search(r"\.(csv|tsv|txt)(\.gz)?$", location) is not None
    if is_table and not known and len(names) > 1:
        return "1", "2"
    if not is_table and len(names) == 2:
        return names[0], names[1]
    raise ValueError(
        f"`--source` and `--target` must say which columns to take, because {location} has {', '.join(names[:8])}."
    )


def cleaning_for(pairs: Pairs) -> dict[str, str]:
    """Choose cleaning rules by how many pairs they would drop, and say it."""
    notes = {}
    for rule in ("drop_duplicates", "drop_identical"):
        rules = CleaningRules(drop_overlap=False, **{rule: True})
        _, _, reasons = cleaned(pairs, rules)
        notes[rule] = reasons["duplicate" if rule == "drop_duplicates" else "identical"] / len(pairs)
    ratios = sorted(
        max(len(source), len(target)) / max(1, min(len(source), len(target)))
        for source, target in zip(pairs.sources, pairs.targets, strict=True)
    )
    limit = max(3.0, round(2 * ratios[len(ratios) * 99 // 100], 1))
    longer = sum(ratio > limit for ratio in ratios) / len(ratios)
    return {
        "drop_duplicates": "true",
        "duplicate_note": f"{percent(notes['drop_duplicates'])} of the pairs came before",
        # Where many are alike, that is what there is to learn.
        "drop_identical": "true" if notes["drop_identical"] < 0.1 else "false",
        "identical_note": f"{percent(notes['drop_identical'])} of the pairs",
        "max_ratio": str(limit),
        "ratio_note": f"{percent(longer)} of the pairs",
    }


def language_of(column: str, texts: list[str]) -> str | None:
    """Return the code of a language: what its column is called, or the only one that is written in its script."""
    if _code(column) in SCRIPTS_OF_LANGUAGES:
        return _code(column)
    script = main_script(texts)
    codes = SCRIPTS_AND_LANGUAGES[script][1].split() if script else []
    return codes[0] if len(codes) == 1 else None


def _code(name: str) -> str:
    return re.split("[-_]", name.lower())[0]


def _quoted(text: str | None) -> str:
    """Write a text for YAML, in quotes, so that it is not read as anything else: `no` is a language."""
    return "null" if text is None else json.dumps(text, ensure_ascii=False)
