"""Settings for data and machine, if a recipe leaves them open."""

import logging
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from heedful import processor_heed
from heedful.data.cleaning import words_without_tags
from heedful.data.data_recipe import DataRecipe
from heedful.data.languages import is_unspaced
from heedful.data.sources import read_parts, sample
from heedful.data.tokenizer_training import Algorithm
from heedful.training.recipe_file import make_section, section_of

logger = logging.getLogger(__name__)

LOOKED_AT = 100_000  # pairs to measure lengths of
# Floating-point operations per second for training small models: on a core with bfloat16 instructions, on others by
# their registers, and on a GPU.
BFLOAT16_CORES, CORE_SPEEDS, OTHER_CORES, GPU_SPEED = 4.5e11, {"AVX512": 2e11}, 1e11, 2e13
# Of Muon, times rate and updates, which are ten times the warm-up, from 600 on: see docs/studies/speedrun.md.
WEIGHT_DECAY = 4.0
SMALL_OPERATIONS = 8e5  # a layer's norms, softmax and the like cost as much as this many weights
WORD = re.compile(r"[^\s!-/:-@[-`{-~]+")  # without ASCII punctuation; `\w` would split at Hindi's vowel signs
# A side with few different words, each repeated often on average, may be symbols: phonemes, commands.
MOST_SYMBOLS, SYMBOL_USES = 200, 10
FEW_SYMBOLS, SYMBOL_BYTES = 20, 4  # symbols are fewer, shorter on average, or all in capitals
LEAST_LIMIT, MOST_TOKENS = 256, 4096  # tokens per side; for more, attention needs too much memory
LONGEST_SPELLING = 40  # characters in a word; longer ones are sentences without spaces


@dataclass(frozen=True)
class DataFacts:
    """Properties of the training pairs that settings depend on."""

    pairs: int  # distinct ones
    pair_bytes: float  # mean UTF-8 bytes, for sides with byte pairs
    longest: tuple[int, int]  # source and target, in bytes, words or characters, without outliers
    algorithms: tuple[Algorithm, Algorithm] = ("bpe", "bpe")  # for source and target
    pair_units: float = 0.0  # mean words or characters, for other sides
    words: int | None = None  # different words that occur twice; `None` without spaces


@dataclass(frozen=True)
class Machine:
    """Properties of the machine that settings depend on."""

    cores: int
    has_gpu: bool
    core_speed: float = BFLOAT16_CORES


def survey(
    pairs: Iterable[Mapping[str, str]], count: int | None = None, algorithms: tuple[Algorithm, Algorithm] | None = None
) -> DataFacts:
    """Measure a corpus with `count` pairs, and choose `algorithms` unless given."""
    rows = [*islice(pairs, LOOKED_AT)]
    read = [(pair["source"], pair["target"]) for pair in rows]
    if not read:
        raise ValueError("The training data must hold at least one pair, but hold none.")
    algorithms = algorithms or _algorithms(read, {*(pair["group"] for pair in rows if "group" in pair)})
    count = round((count or len(read)) * len({*read}) / len(read))
    totals, longest = {True: 0, False: 0}, []
    for side, algorithm in enumerate(algorithms):
        is_bytes = algorithm == "bpe"
        split: Any = {"bpe": str.encode, "word": str.split}.get(algorithm, list)
        lengths = sorted(len(split(pair[side])) for pair in read)
        totals[is_bytes] += sum(lengths)
        longest.append(min(lengths[-1], 2 * lengths[len(read) * 99 // 100]))
    means = totals[True] / len(read), totals[False] / len(read)
    counts = Counter(word for pair in read for text in pair for word in WORD.findall(text))
    words = None if any(map(is_unspaced, zip(*read, strict=True))) else sum(uses >= 2 for uses in counts.values())
    return DataFacts(count, means[0], (longest[0], longest[1]), algorithms, means[1], words)


def _algorithms(pairs: Sequence[tuple[str, str]], groups: Collection[str]) -> tuple[Algorithm, Algorithm]:
    """Choose an algorithm for each side: words for symbols, characters for spelling, or bpe."""
    changed = [["".join(text.split()) for text in pair] for pair in pairs if pair[0] != pair[1]]
    if 2 * sum(source == target for source, target in changed) > len(pairs):  # only in spaces
        return "character", "character"
    # The first of several source columns decides, by its distinct texts.
    return _algorithm([*groups] or [source for source, _ in pairs]), _algorithm([target for _, target in pairs])


def _algorithm(texts: Sequence[str]) -> Algorithm:
    words, bare = Counter(word for text in texts for word in text.split()), words_without_tags(texts)
    are_few = 1 < len(words) <= MOST_SYMBOLS and words.total() >= SYMBOL_USES * len(words)
    if are_few and bare == [*texts] and _are_symbols([*words]):
        return "word"
    # Chinese, Japanese or Thai sentences have no spaces.
    single = sum(len(text) <= LONGEST_SPELLING and len(text.split()) == 1 for text in bare)
    return "character" if single > 0.9 * len(texts) and not is_unspaced(texts) else "bpe"


def _are_symbols(words: Sequence[str]) -> bool:
    """Return whether words are symbols, such as phonemes, commands or labels, without unseen ones in use."""
    if sum(len(word.encode()) for word in words) <= SYMBOL_BYTES * len(words):
        return True
    are_few = len(words) <= FEW_SYMBOLS or all(word.isascii() and word == word.upper() for word in words)
    return are_few and not any(len(word) > 1 and word[-1] in ".,;:?!。？！" for word in words)


def this_machine(device: str = "auto") -> Machine:
    """Return this process' machine, without a GPU if the recipe excludes it."""
    by_registers = CORE_SPEEDS.get(processor_heed.registers(), OTHER_CORES)
    speed = BFLOAT16_CORES if processor_heed.has_bfloat16() else by_registers
    return Machine(processor_heed.usable_cores(), device != "cpu" and torch.cuda.is_available(), speed)


def propose(
    data: DataFacts,
    machine: Machine,
    optimizer: str | None = None,
    schedule: str | None = "linear",
    updates: int | None = None,
) -> tuple[dict[str, Any], float]:
    """Choose settings by dotted key, and estimate the minutes. Fewer pairs get a smaller model and more dropout."""
    largest = 32_000 if machine.has_gpu else 8_000
    # See docs/studies/speedrun.md; one token per word is enough.
    enough = max(min(8000, 66 * data.pairs**0.5), 33 * data.pairs**0.5)
    enough = enough if data.words is None else min(enough, 260 + data.words)
    vocabulary = round(min(largest, max(500 if data.words is None else 300, enough)), -2)
    # Tokens per pair; larger vocabularies have longer ones.
    tokens = max(4.0, data.pair_units + data.pair_bytes / (2.4 + vocabulary / 8000))
    layers, width, updates_tokens, passes = _sizes(data.pairs, machine)
    updates_tokens = max(updates_tokens, 100 * round(tokens * 8 / 100))  # at least eight pairs
    epoch = data.pairs * tokens / updates_tokens  # updates
    fewest = 600 if data.algorithms[1] == "bpe" else 1500  # 600 updates learn much less with letters
    updates = updates or int(min(100_000 if machine.has_gpu else 10_000, max(fewest, passes * epoch)))
    # Two operations per weight and token forward, four backward; attention and softmax double them.
    weights = layers * (28 * width**2 + 4 * width * tokens + SMALL_OPERATIONS)
    weights += (vocabulary if "bpe" in data.algorithms else MOST_SYMBOLS) * width
    speed = GPU_SPEED if machine.has_gpu else machine.core_speed * machine.cores
    # Muon: 15 products for each of 12 square matrices, 45 for 4 wide ones, at half the speed.
    optimizer = optimizer or ("adam" if machine.has_gpu else "muon")
    minutes = updates * (updates_tokens * 6 * weights + (optimizer == "muon") * 1440 * layers * width**3) / speed / 60
    # Most byte pairs per byte in any script: 0.74 measured with 700 tokens, 0.62 with 2,300.
    shares = [min(1.0, 0.45 + 400 / vocabulary) if algorithm == "bpe" else 1.0 for algorithm in data.algorithms]
    most = [min(MOST_TOKENS, 2 + math.ceil(a * b)) for a, b in zip(data.longest, shares, strict=True)]
    longest_tokens = max(40, most[1])
    sizes = {"layers": layers, "attention_heads": width // 32, "ffn_dim": 4 * width}
    sizes = {f"{side}_{name}": size for name, size in sizes.items() for side in ("encoder", "decoder")}
    dropout = 0.3 if passes >= 30 else 0.2 if passes >= 12 else 0.1 if passes >= 4 else 0.0
    every = warmup = max(1, updates // 10)
    settings = {
        "data.max_source_tokens": max(LEAST_LIMIT, most[0]),
        "data.max_target_tokens": max(LEAST_LIMIT, most[1]),
        **_tokenizer(data.algorithms, int(vocabulary)),
        "model.options": {"d_model": width, **sizes, "norm_placement": "pre", "dropout": dropout},
        "optimization.optimizer": optimizer,
        **_rates(optimizer, schedule, width, warmup, machine.has_gpu, passes),
        "optimization.warmup_updates": warmup,
        "optimization.max_updates": updates,
        "optimization.tokens_per_update": updates_tokens,
        "optimization.mixed_precision": "bf16",
        "validation.every_updates": every,
        "validation.sentences": 100,
        "validation.max_new_tokens": longest_tokens,
        "checkpoints.every_updates": every,
        "checkpoints.keep_last": 1,
        # With few pairs the validation loss soon rises, but translations improve until the rate is 0.
        "checkpoints.publish": "last" if data.algorithms[1] == "bpe" and schedule == "linear" else "best",
        "decoding.num_beams": 4,
        "decoding.max_length": longest_tokens,
    }
    return settings, minutes


def _sizes(pairs: int, machine: Machine) -> tuple[int, int, int, float]:
    """Return layers, width, tokens of an update, and passes over the pairs, more over fewer pairs."""
    if not machine.has_gpu:  # see docs/studies/speedrun.md
        return 2 if pairs < 200_000 else 3, 128, 2048, min(50, max(2.7, 320_000 / pairs))
    if pairs >= 300_000:
        return 6, 512, 25_000, 8
    # From 5,000 to 20,000 pairs the model grows from 2 layers of 128 to 3 of 256.
    width = 128 + 32 * int(min(4, max(0, 2 * math.log2(pairs / 5000))))
    layers, tokens = (2, 2048) if width < 192 else (3, 4096 if width < 256 else 6144)
    return layers, width, tokens, 30 if pairs < 10_000 else 20 if pairs < 100_000 else 8


def _rates(
    optimizer: str, schedule: str | None, width: int, warmup: int, has_gpu: bool, passes: float
) -> dict[str, Any]:
    settings: dict[str, Any] = {} if optimizer == "schedule_free" else {"optimization.schedule": "linear"}
    # On CPUs, a user chose another optimizer than Muon, or a model, perhaps a wider one.
    rates = {"learning_rate": 0.384 / width if has_gpu else 0.002}
    if optimizer == "muon":
        rate = (0.512 if passes >= 30 else 0.768) / width
        rates = {"learning_rate": rate, "embedding_learning_rate": 2 * rate}
        settings |= {"optimization.weight_decay": round(WEIGHT_DECAY / (rate * 10 * max(60, warmup)), 2)}
    is_factor = optimizer != "schedule_free" and schedule in (None, "paper")  # the rate is then no peak
    factor = (width * warmup) ** 0.5 if is_factor else 1.0
    return settings | {f"optimization.{name}": round(rate * factor, 4) for name, rate in rates.items()}


def _tokenizer(algorithms: tuple[Algorithm, Algorithm], vocabulary: int) -> dict[str, Any]:
    if algorithms == ("bpe", "bpe"):
        return {"tokenizer.vocab_size": vocabulary}
    source, target = ((algorithm, vocabulary if algorithm == "bpe" else None) for algorithm in algorithms)
    settings = {
        "tokenizer.algorithm": source[0],
        "tokenizer.vocab_size": source[1],
        "tokenizer.joint": source == target,
    }
    own = {"tokenizer.target_algorithm": target[0], "tokenizer.target_vocab_size": target[1]}
    return settings if source == target else settings | own


def complete(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """Fill in a recipe's open settings to fit its data and this machine, and log them."""
    data: DataRecipe = make_section(DataRecipe, tree.get("data"), "data.")
    pairs = read_parts(data.parts, streaming=data.streaming)
    # A recipe with a tokenizer section gets settings for the default, joint byte pairs.
    is_settled = bool(section_of(tree, "tokenizer"))
    count = len(pairs) if isinstance(pairs, Sized) else None
    given = section_of(tree, "optimization")
    machine = this_machine(given.get("device", "auto"))
    cautious = "adamw" if given.get("weight_decay") else "adam"
    # A given model may have much larger matrices, or none for Muon.
    optimizer = cautious if machine.has_gpu or section_of(tree, "model") else "muon"
    pairs = pairs if count is None else pairs.select(sample(range(count), LOOKED_AT))
    facts = survey(pairs, count, ("bpe", "bpe") if is_settled else None)
    updates = given.get("max_updates")
    own = given.get("optimizer", optimizer), given.get("schedule", "linear"), isinstance(updates, int) and updates
    settings, minutes = propose(facts, machine, *own)
    if {"select", "patience"} & section_of(tree, "validation").keys():
        settings["checkpoints.publish"] = "best"  # the last weights would ignore the user's choice
    completed, chosen = with_settings({"name": name} | tree, settings)
    message = "Settings that the recipe leaves open, chosen for the data and this machine (about %.1f min):\n  %s"
    logger.info(message, minutes, "\n  ".join(chosen))
    return completed


def with_settings(tree: dict[str, Any], settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a recipe's tree with settings for its open keys, and these as lines `key: value`."""
    completed, chosen = dict(tree), []
    for key, value in settings.items():
        section, _, last = key.partition(".")
        given = section_of(tree, section)
        is_decided = (key == "tokenizer.vocab_size" and given.get("path")) or (section == "model" and given)
        if last not in given and not is_decided:
            completed[section] = section_of(completed, section) | {last: value}
            chosen.append(f"{key}: {value}")
    return completed, chosen
