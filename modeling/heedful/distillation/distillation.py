"""A teacher's probabilities for given targets, in the format of `heedful.data.epochs.teacher`."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from heedful.checksums_heed import checksum
from heedful.configuration_base_heed import IGNORED_LABEL, position_limit
from heedful.data.epochs.encoding import EncodedPairs, PairEncoder
from heedful.data.epochs.teacher import ARRAYS, FACTS, key_of
from heedful.decoding.engines import logits_in_parts
from heedful.decoding.scoring import forced_batches
from heedful.decoding.search_settings import MOST_SOURCE_TOKENS
from heedful.decoding.strategies.steps import average
from heedful.decoding.translation import Translator
from heedful.files import new_folder, write_text
from heedful.generation_heed import check_logits


def load_teachers(names: Sequence[str], device: str | None = None) -> Translator:
    """Load a teacher, or an ensemble with one tokenizer."""
    first, *others = (Translator.from_pretrained(name, device) for name in names)
    for name, other in zip(names[1:], others, strict=True):
        if other.tokenizers.fingerprint() != first.tokenizers.fingerprint():
            raise ValueError(f"`TEACHER` must all have one tokenizer, but those of {names[0]} and {name} differ.")
    return Translator(first.model, first.tokenizers, ensemble=[each.model for each in others]) if others else first


def write_teacher_tokens(
    folder: Path,
    translator: Translator,
    pairs: Iterable[Mapping[str, str]],
    languages: tuple[str, ...],
    top_k: int = 8,
    token_budget: int = 8192,
) -> tuple[int, int]:
    """Write the `top_k` most probable tokens at each target position; count the written and omitted pairs."""
    tokenizers, models = translator.tokenizers, [translator.model, *translator.ensemble]
    if top_k > len(tokenizers.target):
        raise ValueError(f"`top_k` must be at most {len(tokenizers.target)}, all tokens, but is {top_k} instead.")
    most = min(position_limit(model.config) or MOST_SOURCE_TOKENS for model in models)
    encoder = PairEncoder(tokenizers, most, most, [tokenizers.head(language) for language in languages])
    rows = EncodedPairs(encoder.rows(_both_ways(pairs) if len(languages) > 1 else pairs))
    if not len(rows):
        raise ValueError(f"`--data` must hold pairs of at most {most} tokens, but all {rows.left_out} are longer.")
    keys = np.array([key_of(**rows[number]) for number in range(len(rows))], np.int64)
    starts, order = np.cumsum(rows.target_lengths) - rows.target_lengths, np.argsort(keys)
    kinds = np.uint16 if len(tokenizers.target) <= 2**16 else np.int32, np.float16
    with new_folder(folder) as partial:
        files = {name: partial / f"{name}.npy" for name in ARRAYS}
        np.save(files["keys"], keys[order])
        np.save(files["starts"], starts[order])
        shape = len(rows.targets), top_k
        known = [np.lib.format.open_memmap(files[ARRAYS[2 + i]], "w+", kinds[i], shape) for i in (0, 1)]
        for number, *found in _most_probable(models, rows, top_k, token_budget):
            for array, values in zip(known, found, strict=True):
                array[starts[number] : starts[number] + len(values)] = values
        for array in known:
            array.flush()
        facts = {"tokenizer": tokenizers.fingerprint(), "checksums": {name: checksum(files[name]) for name in ARRAYS}}
        write_text(partial / FACTS, json.dumps(facts, indent=2) + "\n")
    return len(rows), rows.left_out


def _both_ways(pairs: Iterable[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    """Yield each pair, and then its other direction as part 1."""
    for pair in pairs:
        yield {**pair}
        yield {"source": pair["target"], "target": pair["source"], "part": 1}


def _most_probable(
    models: list[Any], rows: EncodedPairs, top_k: int, token_budget: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield each row's number, with `(length, k)` tokens and the models' mean probabilities."""
    lengths = rows.source_lengths, rows.target_lengths
    batches = forced_batches(models[0], rows, lengths, token_budget)
    for numbers, inputs, decoder_inputs, labels in tqdm(batches, unit=" batches", leave=False, disable=None):
        best = []
        with torch.inference_mode():
            for members in zip(*(logits_in_parts(each, inputs, decoder_inputs) for each in models), strict=True):
                each = [logits[labels[part] != IGNORED_LABEL].log_softmax(-1) for part, logits in members]
                best.append(average(each).topk(top_k))
        found = torch.cat([part.indices for part in best]), torch.cat([part.values for part in best]).exp()
        check_logits(found[1], models[0].dtype)
        ends = np.cumsum(lengths[1][numbers])[:-1]
        yield from zip(numbers, *(np.split(values.cpu().numpy(), ends) for values in found), strict=True)
