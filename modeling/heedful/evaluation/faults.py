"""Faults that a comparison with the source shows: loops, cuts, unusual lengths, lost numbers and addresses."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import regex

from heedful.data.sources import references_of
from heedful.symbols_heed import trimmed

USUAL_RATIOS = "usual_length_ratios"  # in a generation config: `usual_ratios` of the run's validation pairs
# Such a multiple of the usual ratio is an outlier, unless the spread is wide.
OUTLIER_FACTOR, OUTLIER_SPREADS = 3.0, 6.0
SHORT_TEXT = 8  # characters added to both sides: short texts have unreliable ratios
# A word four times in a row, two or three words three times, more words twice, or letters in a word five times.
LOOP = re.compile(r"(?<!\S)(?:(\S+ )\1{3}|((?:\S+ ){2,3})\2\2|((?:\S+ ){4,30})\3)|([^\W\d_]{1,4})\4{4}")
WORD = regex.compile(r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]\p{M}*|\w[\w'’]*")
NUMBER = re.compile(r"\d+(?:[.,:'’/\u00a0\u202f -]\d+)*")
ADDRESS = re.compile(r"\b(?:\w+://|www\.)[!#-;=?-{}~]*[\w/]|(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.\w+)+", re.ASCII)


def find_faults(source: str, output: str, config: Any, is_finished: bool, glossary: Any = None) -> dict[str, str]:
    """Return an output's faults, if its model has this generation config, each with what shows it."""
    source, output = trimmed(source), trimmed(output)
    found = {} if is_finished else {"cut_off": output[-20:]}
    loops = [LOOP.search("".join(f"{word} " for word in WORD.findall(text.lower()))) for text in (source, output)]
    if loops[1] and not loops[0]:
        found["repeated"] = loops[1][0].strip()
    (ratio,), (low, _, high) = length_ratios([source], [output]), getattr(config, USUAL_RATIOS, None) or (0, 1, np.inf)
    if bool(source) != bool(output) or not low <= ratio <= high:
        is_short = source and (not output or ratio < low)
        found["too_short" if is_short else "too_long"] = f"{len(output)} characters for {len(source)}"
    lost = {
        "lost_number": lost_numbers(*(ADDRESS.sub(" ", text) for text in (source, output))),
        "lost_address": [each for each in ADDRESS.findall(source) if each.strip("/").lower() not in output.lower()],
        "lost_term": [
            source[mark.start : mark.end] for mark in (glossary.lacking(source, output) if glossary else ())
        ],
    }
    return found | {name: ", ".join(parts) for name, parts in lost.items() if parts}


def lost_numbers(source: str, output: str) -> list[str]:
    """Return the numbers that the output lacks, with any separators, order and zeros around, in any script's digits.

    One or two digits, apart from those zeros, are often written as words. They count only if the output has another
    number instead, or if they are above 12 and the output writes any number in digits.
    """
    wanted, has = _digits(source), _digits(output)
    known, kept = ({""}.union(*(readings for _, readings in side)) for side in (wanted, has))
    is_replaced = any(digits.strip("0") not in known for digits, _ in has)
    lost = [digits for digits, readings in wanted if not readings & kept]
    return [each for each in lost if len(each.strip("0")) > 2 or is_replaced or (has and float(each) > 12)]


def _digits(text: str) -> list[tuple[str, set[str]]]:
    """Return each group of digits, with its digits and its number's digits without zeros around."""
    found = list[tuple[str, set[str]]]()
    for number in NUMBER.findall(re.sub(r"\d", lambda digit: str(int(digit[0])), text)):
        whole = re.sub(r"\D", "", number).strip("0")
        found += [(digits, {digits.strip("0"), whole}) for digits in re.findall(r"\d+", number)]
    return found


def described(faults: Mapping[str, object]) -> str:
    """Write faults, or counts of them, as text."""
    return "; ".join(f"{name.replace('_', ' ')} ({what})" for name, what in faults.items()) or "none"


def count_faults(
    pairs: Sequence[Mapping[str, Any]], outputs: Sequence[Any], config: Any, glossary: Any = None
) -> dict[str, list[int]]:
    """Count each fault in `Translation`s of pairs' sources and in first references, where they are false alarms."""
    counts: dict[str, list[int]] = {}
    for pair, output, (reference, *_) in zip(pairs, outputs, references_of(pairs), strict=True):
        for side, (text, is_finished) in enumerate(((output.text, output.finished), (reference, True))):
            for name in find_faults(pair["source"], text, config, is_finished, glossary):
                counts.setdefault(name, [0, 0])[side] += 1
    return counts


def length_ratios(sources: Sequence[str], targets: Sequence[str]) -> np.ndarray:
    """Return target characters per source character, `(pairs,)`, closer to 1 for short texts."""
    before, after = (np.array([len(text) + SHORT_TEXT for text in texts]) for texts in (sources, targets))
    return np.asarray(after / before)


def usual_ratios(sources: Sequence[str], targets: Sequence[str]) -> list[float] | None:
    """Return the lowest, median and highest usual `length_ratios`; `None` for fewer than 20 pairs."""
    if len(sources) < 20:
        return None
    ratios = np.log(length_ratios(sources, targets))
    usual = np.median(ratios)  # medians: a few wrong pairs do not move them
    spread = 1.4826 * np.median(np.abs(ratios - usual))  # a normal distribution's standard deviation
    limit = max(np.log(OUTLIER_FACTOR), OUTLIER_SPREADS * spread)
    return [round(float(each), 4) for each in np.exp([usual - limit, usual, usual + limit])]
