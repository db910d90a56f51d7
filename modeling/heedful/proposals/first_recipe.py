"""A first recipe for pairs of one's own: what they are, and settings that fit them and this machine, with reasons."""

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heedful.data.sources import first_rows, read_pairs
from heedful.diagnosis.findings import percent
from heedful.diagnosis.recipe_checks.pairs import (
    KINDS,
    SCRIPTS_AND_LANGUAGES,
    SCRIPTS_OF_LANGUAGES,
    Pairs,
    kind_of,
    lacks_script,
    main_script,
    roles_of,
)
from heedful.files import check_is_new, quoted, shortened, write_text
from heedful.proposals.proposal import LOOKED_AT, look_at, propose, this_machine
from heedful.training.recipe_file import yaml_text

JUDGED = 1000  # rows by which columns are chosen
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
  max_source_tokens: {max_source_tokens}  # longer pairs are dropped
  max_target_tokens: {max_target_tokens}
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
  max_updates: {max_updates}  # about {minutes} on this machine ({machine}), as estimated
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
  max_length: {max_length}  # of what is generated, in tokens

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


def write_first_recipe(
    data: Path | Sequence[Path], output: Path, source: str | None = None, target: str | None = None
) -> list[str]:
    """Look at pairs in a file, a folder or two aligned files, and write a recipe that fits them and this machine.

    `source` and `target` are languages or columns, as `read_pairs` takes them; `None` finds them. Returns what was
    seen in the data and chosen, in sentences.
    """
    check_is_new(output, "--output", "file")
    files = [data] if isinstance(data, Path) else list(data)
    for file in files:
        if not file.exists():
            raise FileNotFoundError(f"`--data` must be a file or folder that exists, but {file} does not.")
    if (source is None) != (target is None):
        raise ValueError("`--source` and `--target` must be given both or not at all, but only one is.")
    location = str(files[0]) if len(files) == 1 else [*map(str, files)]
    source, target, why = find_columns(location, None if source is None or target is None else (source, target))
    corpus = read_pairs(location, source, target)
    pairs = Pairs.first(corpus, LOOKED_AT, "train", "data.train")
    if len(corpus) < 20:
        raise ValueError(f"`--data` must hold at least 20 pairs to learn from, but {files[0]} holds {len(corpus)}.")
    facts, machine = look_at(pairs, len(corpus)), this_machine()
    proposal = propose(facts, machine)
    values = {key.rpartition(".")[2]: value for key, value in proposal.settings.items()}
    values["checkpoint_updates"] = values["every_updates"]
    values["options"] = "".join(f"    {key}: {value}\n" for key, value in values["options"].items())
    values["tokenizer"] = _tokenizer_lines(proposal.settings, facts.algorithms)
    values |= cleaning_for(pairs)
    languages = [language_of(*side) for side in ((source, pairs.sources), (target, pairs.targets))]
    name, rounded = files[0].name, max(1, round(proposal.minutes))
    minutes = f"{rounded} minute{'s' * (rounded > 1)}"
    paths = [yaml_text(os.path.relpath(file, output.parent)) for file in files]
    text = TEMPLATE.format(
        **values,
        title=f"{yaml_text(name)}: {len(corpus):,} pairs, "
        f"from {languages[0] or shortened(source)} to {languages[1] or shortened(target)}.",
        file=shlex.quote(output.name) if output.name.isprintable() else yaml_text(output.name),
        name=yaml_text(re.sub(r"\W+", "-", name.split(".")[0]).strip("-") or "model"),
        train=paths[0] if len(paths) == 1 else f"[{', '.join(paths)}]",
        source=yaml_text(source),
        target=yaml_text(target),
        column_note=why,
        minutes=minutes,
        machine="a GPU" if machine.has_gpu else f"{machine.cores} CPU cores",
        source_language=yaml_text(languages[0]),
        target_language=yaml_text(languages[1]),
        dataset=yaml_text(name),
    )
    write_text(output, text)
    vocabulary, width = values["vocab_size"] or "of all symbols", proposal.settings["model.options"]["d_model"]
    return [
        f"{len(corpus):,} pairs in {' and '.join(map(str, files))}, source {source!r}, target {target!r} ({why})",
        f"first pair: {shortened(pairs.sources[0])} → {shortened(pairs.targets[0])}",
        f"limits: {values['max_source_tokens']} source tokens, {values['max_target_tokens']} target tokens",
        f"duplicates: {values['duplicate_note']}; source and target alike: {values['identical_note']}",
        f"vocabulary {vocabulary}, d_model {width}, {values['max_updates']:,} updates: about {minutes} here",
    ]


def _tokenizer_lines(settings: dict[str, Any], algorithms: tuple[str, str]) -> str:
    """Write the section of the tokenizer, each key with its reason."""
    if algorithms == ("bpe", "bpe"):
        note = "byte pairs of both sides, which `heedful page` and every export take"
        return f"  vocab_size: {settings['tokenizer.vocab_size']}  # {note}\n"
    source, target = (REASONS[algorithm] for algorithm in algorithms)
    sides = "source" if "tokenizer.target_algorithm" in settings else "source and target"
    notes = {
        "algorithm": f"of the {sides}: {source}",
        "target_algorithm": f"of the target: {target}",
        "joint": "one vocabulary, which all exports but web take; pages need byte pairs"
        if settings["tokenizer.joint"]
        else "a vocabulary for each side, which of the exports onnx and ctranslate2 take",
    }
    own = {key.removeprefix("tokenizer."): value for key, value in settings.items() if key.startswith("tokenizer.")}
    values = ((key, json.dumps(value).strip('"')) for key, value in own.items())
    return "".join(f"  {key}: {value}  # {notes.get(key, 'null: all of the texts')}\n" for key, value in values)


def find_columns(location: str | Sequence[str], wanted: tuple[str, str] | None = None) -> tuple[str, str, str]:
    """Choose the columns of source and target by names and cells, and say why; `wanted` may be numbers of named ones.

    A `ValueError` lists the columns where several choices are as good as another, or none is.
    """
    rows = first_rows(location, JUDGED)
    cells = {str(key): [row.get(key) for row in rows] for key in rows[0]}
    is_table = list(cells) == [str(number) for number in range(1, len(cells) + 1)]
    kinds = {key: kind_of(column[1:] if is_table and len(rows) > 1 else column) for key, column in cells.items()}
    has_names = _has_names(cells, kinds) if is_table else False
    names = {key: str(column[0]) if has_names else key for key, column in cells.items()}
    line = "the first line has the names" if has_names else "the table has no line of names"
    if wanted is not None:
        if has_names and {*wanted} <= {*names}:
            return names[wanted[0]], names[wanted[1]], f"columns {' and '.join(wanted)}: {line}"
        return *wanted, "as asked for"
    chosen = _chosen(names if has_names or not is_table else {}, kinds)
    told = [f"{shortened(names[key])}: {kind or 'texts'}" for key, kind in kinds.items() if key not in (chosen or ())]
    listed = ", ".join(told[:8]) + " and more" * (len(told) > 8)
    if chosen is None or has_names is None:
        advice = f"because {location} has {listed}"
        if has_names is None:
            first = quoted(column[0] for column in cells.values())
            advice = f"by names where the first line of {location}, {first}, has these, or else by numbers"
        raise ValueError(f"`--source` and `--target` must say which columns to take, {advice}.")
    why = [f"{shortened(names[key])}: {kinds[key]}" for key in chosen if kinds[key]] + [f"not {listed}"] * bool(told)
    return names[chosen[0]], names[chosen[1]], "; ".join([line] * is_table + why) or "the only columns"


def _chosen(names: Mapping[str, str], kinds: Mapping[str, str | None]) -> tuple[str, str] | None:
    """Return the columns of source and target by what they are called and what is in them, if one choice is best."""
    roles = {key: roles_of(names.get(key, "")) for key in kinds}
    texts = [key for key, kind in kinds.items() if kind is None or (kind == "labels" and len(kinds) == 2)]
    named = [key for key, kind in kinds.items() if kind in (None, "labels", "numbers", "ids")]
    sources = [key for key in named if "source" in roles[key] and not roles[key] & {"target", "other"}]
    targets = [key for key in named if "target" in roles[key] and not roles[key] & {"source", "other"}]
    weak = [key for key in texts if roles[key] == {"text"}]
    languages = [key for key in texts if "language" in roles[key]]
    for source, target in ((sources, targets), (weak, targets)):
        if len(source) == len(target) == 1:
            return source[0], target[0]
    for pair in (languages, texts):
        if len(pair) == 2:
            return (pair[1], pair[0]) if pair[0] in targets or pair[1] in sources else (pair[0], pair[1])
    return None


def _has_names(cells: Mapping[str, Sequence[Any]], kinds: Mapping[str, str | None]) -> bool | None:
    """Tell whether the first line of a table has the names of its columns; `None` where it may as well be a pair."""
    first = {key: str(column[0]).strip() for key, column in cells.items() if str(column[0]).strip()}
    texts = [key for key in first if kinds[key] is None]
    is_short = all(_is_like_a_name(first[key]) or roles_of(first[key]) for key in texts)
    for key, name in first.items():
        kind, rest = kinds[key], {str(cell).strip() for cell in cells[key][1:]}
        if kind in KINDS:
            return not KINDS[kind](name)
        if kind == "one value" or (kind == "labels" and (is_short or name in rest)):
            return name not in rest
    if not texts or not is_short:
        return False
    known = sum(bool(roles_of(name)) for name in first.values())
    lines = list(zip(*(cells[key][1:] for key in texts), strict=True))
    alike = sum(all(map(_is_like_a_name, line)) for line in lines)
    scripts = ((key, main_script(cells[key][1:])) for key in texts)
    is_other = any(script and script != "Latin" and lacks_script(first[key], script) for key, script in scripts)
    if is_other or (known > 1 and not (alike and all(len(first[key]) < 4 for key in texts))):
        return True
    return False if alike > 0.1 * len(lines) and not known else None


def _is_like_a_name(text: str) -> bool:
    return len(text) <= 30 and 0 < len(text.split()) <= 3 and re.search(r"[\d.?!,;:。？！…]", text) is None


def cleaning_for(pairs: Pairs) -> dict[str, str]:
    """Choose cleaning rules by how many pairs they would drop, and say it."""
    sides = list(zip(pairs.sources, pairs.targets, strict=True))
    repeated, alike = 1 - len({*sides}) / len(sides), sum(one == other for one, other in sides) / len(sides)
    ratios = sorted(max(map(len, side)) / max(1, min(map(len, side))) for side in sides)
    limit = max(3.0, round(2 * ratios[len(ratios) * 99 // 100], 1))
    longer = sum(ratio > limit for ratio in ratios) / len(ratios)
    return {
        "drop_duplicates": "true",
        "duplicate_note": f"{percent(repeated)} of the pairs came before",
        # Where many are alike, that is what there is to learn.
        "drop_identical": "true" if alike < 0.1 else "false",
        "identical_note": f"{percent(alike)} of the pairs",
        "max_ratio": str(limit),
        "ratio_note": f"{percent(longer)} of the pairs",
    }


def language_of(column: str, texts: list[str]) -> str | None:
    """Return the code of a language: what its column is called, or the only one that is written in its script."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    code = re.split("[-_]", column.lower())[0]
    if code in SCRIPTS_OF_LANGUAGES or code in TO_LANGUAGE_CODE:
        return TO_LANGUAGE_CODE.get(code, code)
    script = main_script(texts)
    codes = SCRIPTS_AND_LANGUAGES[script][1].split() if script else []
    return codes[0] if len(codes) == 1 else None
