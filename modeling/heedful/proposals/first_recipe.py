"""A first recipe with settings that fit a user's pairs and this machine, and the reasons."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heedful.checking import pairs as looks
from heedful.checking.findings import percent
from heedful.checking.pairs import Pairs, kind_of, roles_of
from heedful.data.cleaning import clean_pairs, read_splits
from heedful.data.data_recipe import CleaningRules, DataRecipe
from heedful.data.languages import lacks_script, language_of, main_script
from heedful.data.sources import first_rows, sample, table_files
from heedful.data.tables import delimiters_of, kind_of_file, layouts_of, name_of, parts_of
from heedful.evaluation.metrics import fitting_tokenizer
from heedful.files import check_is_new, quoted, write_text
from heedful.messages_heed import shortened
from heedful.proposals.proposal import LOOKED_AT, propose, survey, this_machine, with_settings
from heedful.training.recipe_file import commented, meanings, yaml_text

JUDGED = 1000  # rows for choosing columns
HEAD = """# {title}
#   heedful train {file}
# Written by `heedful init` to fit the data. Other keys have their defaults: `heedful recipes keys` lists and explains
# all keys."""
# Comments more specific than the keys' meanings.
NOTES = {
    "data.train": "relative to this file",
    "data.validation": "empty: holds out a twentieth of the pairs, at most 500, the same in every run",
    "data.max_source_tokens": "longer pairs are dropped",
    "model.options": "changes to the paper's base model: the fewer pairs, the smaller, and the more dropout",
    "optimization.schedule": "rises over the warm-up, then falls to 0 at max_updates",
    "checkpoints.publish": "last: the last weights; best: those with the lowest validation loss",
    "decoding.bleu_tokenizer": "for targets without spaces between words; ja-mecab is usual for Japanese",
    "card.license": "your license's Hub name, such as apache-2.0; empty: unknown",
}
REASONS = {
    "bpe": "byte pairs suit sentences",
    "word": "few different symbols between spaces; unknown symbols are errors",
    "character": "single words, also with tags, or texts in which only spaces change",
}


def write_first_recipe(
    data: Path | Sequence[Path], output: Path, source: str | None = None, target: str | None = None
) -> list[str]:
    """Write a recipe that fits pairs in a file, a folder or two aligned files, and return the findings."""
    files = [data] if isinstance(data, Path) else list(data)
    for file in files:
        if not file.exists():
            raise FileNotFoundError(f"`--data` must be an existing file or folder, but {file} does not exist.")
    if (source is None) != (target is None):
        raise ValueError("`--source` and `--target` must be given together, but only one is.")
    location = str(files[0]) if len(files) == 1 else [*map(str, files)]
    source, target, why = find_columns(location, (source, target) if source and target else None)
    splits = read_splits(DataRecipe(location, source, target), LOOKED_AT)
    count, pairs = splits.total or 0, Pairs.of("train", "data.train", splits.train)
    if count < 20:
        raise ValueError(f"`--data` must hold at least 20 pairs, but {files[0]} holds {count}.")
    check_is_new(output, "--output", "file", ": choose another, or delete it first")
    facts = survey(splits.train if "group" in splits.train.column_names else pairs, count)
    machine = this_machine()
    chosen, minutes = propose(facts, machine)
    if (tokenizer := fitting_tokenizer(None, [[text] for text in pairs.targets])) != "13a":
        chosen["decoding.bleu_tokenizer"] = tokenizer
    place = "a GPU" if machine.has_gpu else f"{machine.cores} CPU cores"
    about = f"about {max(1, round(minutes))} minute{'s' * (round(minutes) > 1)}"
    alike = sum(one == other for one, other in zip(pairs.sources, pairs.targets, strict=True)) / len(pairs)
    rules = _cleaning_for(pairs, alike, facts.algorithms[1] == "bpe")
    dropped = clean_pairs(splits.train, rules)[1].dropped
    duplicates, identical = (f"{percent(share)} of the pairs" for share in (dropped["duplicate"] / len(pairs), alike))
    languages = [language_of(*side) for side in ((source, pairs.sources), (target, pairs.targets))]
    paths, title = [os.path.relpath(file, output.parent) for file in files], named(files[0])
    names = {"train": paths[0] if len(paths) == 1 else paths, "validation": None, "source": source, "target": target}
    cleaning = {name: getattr(rules, name) for name in ("drop_duplicates", "drop_identical", "max_ratio")}
    name = re.sub(r"\W+", "-", title.lstrip(".").split(".")[0]).strip("-") or "model"
    tree, _ = with_settings({"name": name, "data": {**names, "cleaning": cleaning}}, chosen)
    sides = {"source_language": languages[0], "target_language": languages[1]}
    tree["card"] = {"license": None, **sides, "dataset": title}
    notes = meanings() | NOTES | _tokenizer_notes(chosen, facts.algorithms)
    notes |= {
        "data.source": why,
        "data.cleaning.drop_duplicates": f"{duplicates} are repeats",
        "data.cleaning.drop_identical": identical,
        "data.cleaning.max_ratio": "drops a pair if one side is more than this many times as long as the other "
        f"({percent(dropped['ratio'] / len(pairs))} of the pairs)",
        "optimization.max_updates": f"estimated: {about} on {place}",
    }
    title = f"{yaml_text(title)}: {count:,} pairs, "
    title += f"from {languages[0] or shortened(source)} to {languages[1] or shortened(target)}."
    written = shlex.quote(output.name) if output.name.isprintable() else yaml_text(output.name)
    write_text(output, "\n".join([HEAD.format(title=title, file=written), *commented(tree, notes)]) + "\n")
    return [
        f"{count:,} pairs in {' and '.join(map(str, files))}, source {source!r}, target {target!r} ({why})",
        f"first pair: {shortened(pairs.sources[0])} → {shortened(pairs.targets[0])}",
        f"limits: {chosen['data.max_source_tokens']} source tokens, {chosen['data.max_target_tokens']} target tokens",
        f"duplicates: {duplicates}; source and target alike: {identical}",
        *[f"warning: only {facts.pairs:,} pairs differ, and they set the sizes"] * (2 * facts.pairs < count),
        f"vocabulary {chosen['tokenizer.vocab_size'] or 'of all symbols'}, d_model "
        f"{chosen['model.options']['d_model']}, {chosen['optimization.max_updates']:,} updates: {about} here",
        f"languages: {' → '.join(code or '?' for code in languages)}"
        + "; if the model translates, name both in the recipe's `card`" * (None in languages),
    ]


def named(data: Path) -> str:
    """Return a file's or folder's name, also for `.` or `..`."""
    return (data.resolve() if data.name in ("", "..") else data).name


def _tokenizer_notes(settings: Mapping[str, Any], algorithms: tuple[str, str]) -> dict[str, str]:
    if algorithms == ("bpe", "bpe"):
        return {"tokenizer.vocab_size": "byte pairs for both sides, for `heedful page` and all exports"}
    source, target = (REASONS[algorithm] for algorithm in algorithms)
    sides = "source" if "tokenizer.target_algorithm" in settings else "source and target"
    joint, separate = "one vocabulary, for all exports", "two vocabularies, for onnx and ctranslate2"
    return {
        "tokenizer.algorithm": f"of the {sides}: {source}",
        "tokenizer.target_algorithm": f"of the target: {target}",
        "tokenizer.vocab_size": "null: all of the texts",
        "tokenizer.target_vocab_size": "null: all of the texts",
        "tokenizer.joint": f"{joint if settings['tokenizer.joint'] else separate}; pages need byte pairs",
    }


def find_text_column(location: str, wanted: str | None, option: str) -> str:
    """Return the name of a corpus' `wanted` or only column; errors name the `option`."""
    if kind_of_file(location) == "txt" and delimiters_of(location, ("1", "1"))[0] == "\n":
        return wanted or "1"  # plain text
    cells, _, names, has_names = _looked_at(location)
    if wanted is None and len(names) != 1:
        row = quoted(column[-1 if has_names else 0] for column in cells.values())
        found = f"{quoted(names.values())}, in one row {row}"
        raise ValueError(f"`{option}` must name a column of {location}, which has {found}.")
    parts = [*names] if wanted is None else parts_of(wanted, names.values())
    return name_of([part if part in names.values() else names.get(part, part) for part in parts])


def _looked_at(location: str | Sequence[str]) -> tuple[Any, ...]:
    """Return the columns' cells, kinds and names by key, and whether a table's first line is names."""
    rows = first_rows(location, LOOKED_AT)
    rows = [rows[0], *sample(rows[1:], JUDGED - 1)]
    cells = {str(key): [row.get(key) for row in rows] for key in rows[0]}
    is_table = list(cells) == [str(number) for number in range(1, len(cells) + 1)]
    kinds = {key: kind_of(column[1:] if is_table and len(rows) > 1 else column) for key, column in cells.items()}
    has_names = _has_names(cells, kinds) if is_table else False
    files = table_files(location)[:3]
    if len(files) > 1 and all(first_rows(file, 1) == rows[:1] for file in files):
        has_names = True
    return cells, kinds, {key: str(column[0]) if has_names else key for key, column in cells.items()}, has_names


def find_columns(location: str | Sequence[str], wanted: tuple[str, str] | None = None) -> tuple[str, str, str]:
    """Return the source and target columns, as `wanted` or by names and cells, and the reason."""
    cells, kinds, names, has_names = _looked_at(location)
    is_table = list(cells) == [str(number) for number in range(1, len(cells) + 1)]
    if is_table and len(cells) == 1:
        must = "a table with two cells or more per line (tabs, commas, semicolons or bars), without comments"
        raise ValueError(f"`--data` must be {must}, but {location} has {shortened(cells['1'][0])} instead.")
    line = "the first line is a header" if has_names else "the table has no header line"
    said = layouts_of(table_files(location))
    line += "; 1 and 2 in the recipe make it a pair" * (has_names is True and not any(kinds.values()))
    if wanted is not None:
        parts = [parts_of(name, names) for name in wanted]
        numbers = {*parts[0], *parts[1]}
        if has_names and numbers <= {*names} and not numbers <= {*names.values()}:
            source, target = (name_of([names[part] for part in side]) for side in parts)
            return source, target, f"columns {' and '.join(wanted)}: {line}"
        return *wanted, "; ".join(["as requested", *said])
    chosen = _chosen(names if has_names or not is_table else {}, kinds)
    tags = [key for key, kind in kinds.items() if kind == "tags" and key not in chosen]
    pairs = {*zip(*(map(str, cells[key]) for key in chosen), strict=True)}
    if tags and len(pairs) > 1.1 * len({source for source, *_ in pairs}):
        chosen = (chosen[0], *tags, chosen[1])
    others = [f"{shortened(names[key])}: {kind or 'texts'}" for key, kind in kinds.items() if key not in chosen]
    listed = ", ".join(others[:8]) + " and more" * (len(others) > 8)
    if not chosen or has_names is None:
        advice = f"because {location} has {listed}"
        if has_names is None:
            first = quoted(column[0] for column in cells.values())
            advice = f"by names if the first line of {location} ({first}) is a header, or else by numbers"
        raise ValueError(f"`--source` and `--target` must name the columns, {advice}.")
    why = [f"{shortened(names[key])}: {kinds[key]}" for key in chosen if kinds[key]] + [f"not {listed}"] * bool(others)
    why = [line] * is_table + said + why
    return name_of([names[key] for key in chosen[:-1]]), names[chosen[-1]], "; ".join(why) or "the only columns"


def _chosen(names: Mapping[str, str], kinds: Mapping[str, str | None]) -> tuple[str, ...]:
    """Return the source and target columns by names and kinds, if one choice is best."""
    roles = {key: roles_of(names.get(key, "")) for key in kinds}
    texts = [key for key, kind in kinds.items() if kind is None or (kind == "labels" and len(kinds) == 2)]
    named = [key for key, kind in kinds.items() if kind in (None, "labels", "numbers", "ids", "tags")]
    sources = [key for key in named if "source" in roles[key] and not roles[key] & {"target", "other"}]
    targets = [key for key in named if "target" in roles[key] and not roles[key] & {"source", "other"}]
    weak = [key for key in texts if roles[key] == {"text"}]
    languages = [key for key in texts if "language" in roles[key]]
    for source in (sources, weak):
        if len(source) == len(targets) == 1:
            return source[0], targets[0]
    for pair in (languages, texts):
        if len(pair) == 2:
            return (pair[1], pair[0]) if pair[0] in targets or pair[1] in sources else (pair[0], pair[1])
    return ()


def _has_names(cells: Mapping[str, Sequence[Any]], kinds: Mapping[str, str | None]) -> bool | None:
    """Return whether a table's first line is a header; `None` if it may be a pair."""
    first = {key: str(column[0]).strip() for key, column in cells.items() if str(column[0]).strip()}
    texts = [key for key in first if kinds[key] is None]
    if len({*first.values()}) < len(first):
        return False
    if texts and [*first.values()] in ([str(n + begin) for n in range(len(cells))] for begin in (0, 1)):
        return True  # row numbers of pandas
    is_short = all(_is_like_a_name(first[key]) or roles_of(first[key]) for key in texts)
    for key, name in first.items():
        kind, rest = kinds[key], {str(cell).strip() for cell in cells[key][1:]}
        if kind in looks.KINDS:
            return not looks.KINDS[kind](name)
        if kind == "one value" or (kind == "labels" and (is_short or name in rest)):
            return name not in rest
    if not texts or not is_short:
        return False
    known = sum(bool(roles_of(name)) for name in first.values())
    scripts = ((key, main_script(cells[key][1:])) for key in texts)
    is_other = any(script and script != "Latin" and lacks_script(first[key], script) for key, script in scripts)
    lines = list(zip(*(map(str, cells[key][1:]) for key in texts), strict=True))
    cased = [place for place, key in enumerate(texts) if len(first[key]) > 1 and first[key] != first[key].lower()]
    is_other |= len(lines) > 19 and any(all(line[place] == line[place].lower() for line in lines) for place in cased)
    alike = sum(all(map(_is_like_a_name, line)) for line in lines)
    has_words = alike > 0.1 * len(lines)
    is_code = has_words and all(len(name) < 4 for name in first.values())  # or a word, such as de
    if is_other or (known >= min(2, len(first)) and not is_code) or (not alike and len(lines) >= 100):
        return True
    return False if has_words and not known else None


def _is_like_a_name(text: str) -> bool:
    return len(text) <= 30 and 0 < len(text.split()) <= 3 and re.search(r"[\d.?!,;:。？！…]", text) is None


def _cleaning_for(pairs: Pairs, alike: float, has_sentences: bool) -> CleaningRules:
    """Choose cleaning rules by the pairs that they drop. `alike` is the share of pairs with identical sides."""
    sizes = (sorted(map(len, sides)) for sides in zip(pairs.sources, pairs.targets, strict=True) if all(sides))
    ratios = sorted(longer / shorter for shorter, longer in sizes) or [1.0]  # an empty side has no ratio
    limit = max(3.0, round(2 * ratios[len(ratios) * 99 // 100], 1))
    # Many identical pairs are intended: a word spelled as it sounds, or with one form.
    return CleaningRules(max_ratio=limit, drop_duplicates=True, drop_identical=has_sentences and alike < 0.1)
