"""CTranslate2's search with the settings of `generate()`, and folders that were exported for it.

Greedy search gives the tokens of `generate()`. So does beam search with `early_stopping=True`: both end a sentence
with its `num_beams`-th finished hypothesis. With `early_stopping=False` `generate()` goes on while the best open
hypothesis has a better score than the worst finished one, which CTranslate2 cannot express. It is then asked for
`PATIENCE` times as many hypotheses, and those that finished after `generate()` would have ended are left out. That
end is computed from the hypotheses that did finish; of one that stays open nothing is known, so that a sentence may
differ, above all one unlike those that the model was trained on, and a warning says so.
"""

import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch

from heedful.configuration_heed import HeedConfig
from heedful.data.tokenization import TokenizerPair
from heedful.inference.ctranslate2.specification import (
    import_ctranslate2,
    obstacle,
    positions_of_table,
    save_model,
    vocabulary,
)
from heedful.inference.fingerprint import Fingerprint
from heedful.inference.loading import first_line, read_object
from heedful.inference.strategies.steps import BEAM_MODES, SEARCH_SETTINGS, end_tokens

ComputeType = Literal[
    "float32", "int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16"
]
METADATA_FILE = "heed.json"
MODEL_FILE = "model.bin"
FORMAT_VERSION = 1
# Of the hypotheses after which a beam search with `early_stopping=False` ends: `generate()` has ended before.
PATIENCE = 2
# In place of a length penalty of 0, with which CTranslate2 stops at the first hypothesis that nothing can beat: it
# divides by 1 all the same.
ALMOST_ZERO = 1e-30
# What changes the next token's scores or the search, and the values that change nothing.
IDLE_SETTINGS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys((*BEAM_MODES, "penalty_alpha", "dola_layers", "prompt_lookup_num_tokens"), (None, 0, 0.0)),
    **SEARCH_SETTINGS,
    "num_beam_groups": (None, 0, 1),
    **dict.fromkeys(("max_time", "stop_strings", "sequence_bias", "exponential_decay_length_penalty"), (None,)),
    **dict.fromkeys(("forced_bos_token_id", "forced_decoder_ids"), (None,)),
    **dict.fromkeys(("begin_suppress_tokens", "watermarking_config", "constraints"), (None, [])),
    "guidance_scale": (None, 1, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1, 1.0),
    "remove_invalid_values": (None, False),
}
# What greedy search takes: in beam search CTranslate2 changes logits, `generate()` log-probabilities.
GREEDY_SETTINGS: dict[str, tuple[Any, ...]] = {
    "min_length": (None, 0, 1),  # the decoder's start token is counted
    "min_new_tokens": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "repetition_penalty": (None, 1, 1.0),
    "bad_words_ids": (None, []),
    "suppress_tokens": (None, []),
}


@dataclass(frozen=True)
class Hypothesis:
    """One translation of one sentence.

    Attributes:
        token_ids: Generated tokens, the end token included.
        score: Log-probability divided by the number of tokens to the power of `length_penalty`.
        finished: False where the search stopped at the length limit.

    """

    token_ids: tuple[int, ...]
    score: float
    finished: bool


class ExportedModel:
    """A folder that `heedful export ctranslate2` wrote, in the place of a model.

    Args:
        folder: Where it lies.
        device: Where to compute: the CPU or a CUDA device.
        compute_type: CTranslate2's name of what to compute in; None takes the type that it was exported with.

    Attributes:
        config: The model's.
        generation_config: The model's.
        quantization: With which it was exported.

    Raises:
        ValueError: If the folder was written in another version of the format, or its files are broken.

    """

    def __init__(self, folder: str | Path, device: torch.device, compute_type: ComputeType | None = None):
        from transformers import GenerationConfig

        self.folder = Path(folder)
        self.device = device
        metadata = _read_metadata(self.folder)
        try:
            self.config: Any = HeedConfig(**metadata["config"])
            self.generation_config = GenerationConfig.from_dict(metadata["generation_config"])
            self.quantization: ComputeType = metadata["quantization"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{self.folder / METADATA_FILE} cannot be used: {first_line(error)}") from error
        self.compute_type: ComputeType = compute_type or self.quantization


class CTranslate2Engine:
    """Greedy and beam search by CTranslate2.

    Args:
        model: A Heed model, whose weights are copied, or an `ExportedModel`.
        tokenizers: The model's.
        compute_type: CTranslate2's name of what to compute in; of an `ExportedModel` its own is taken.

    Attributes:
        positions: How many tokens a source or a translation may have; None is any number.

    Raises:
        ImportError: If CTranslate2 is not installed.
        ValueError: If CTranslate2 cannot express the model, or the device lacks the compute type.

    """

    def __init__(self, model: Any, tokenizers: TokenizerPair, compute_type: ComputeType = "float32"):
        import_ctranslate2()
        reason = None if isinstance(model, ExportedModel) else obstacle(model)
        if reason is not None:  # before its config is read, which may be another model's
            raise ValueError(reason)
        self.model = model
        self.positions = positions_of_table(model.config)
        self._source_tokens = vocabulary(tokenizers.source)
        self._target_tokens = vocabulary(tokenizers.target)
        self._target_ids = {token: number for number, token in enumerate(self._target_tokens)}
        if isinstance(model, ExportedModel):
            self._fingerprint: Fingerprint | None = None
            self._translator = _open(model.folder, model.device, model.compute_type)
            return
        check_compute_type(compute_type, model.device, "precision")
        self._fingerprint = Fingerprint(model)
        with tempfile.TemporaryDirectory() as folder:
            save_model(model, tokenizers, Path(folder), compute_type)
            self._translator = _open(Path(folder), model.device, compute_type)  # reads all of it

    @property
    def is_current(self) -> bool:
        """Whether the model still computes what was copied: with the same weights, and nothing hooked in between."""
        return self._fingerprint is None or (self._fingerprint.is_current and obstacle(self.model) is None)

    def search(self, sources: Sequence[Sequence[int]], config: Any, batch_tokens: int) -> list[list[Hypothesis]]:
        """Translate encoded sentences.

        Args:
            sources: Their tokens, in any order: they are sorted by length inside.
            config: The generation config, with `max_new_tokens`; `check_settings` tells whether it will do.
            batch_tokens: Padded source tokens of one batch.

        Returns:
            For each sentence its `num_return_sequences` hypotheses, best first.

        """
        if not sources:
            return []
        words = [[self._source_tokens[token] for token in source] for source in sources]
        found = self._found(words, config, batch_tokens, PATIENCE if ends_by_score(config) else 1)
        if ends_by_score(config):
            found = self._ended_by_score(words, found, config, batch_tokens)
        is_forced = config.forced_eos_token_id is not None and any(not each.finished for row in found for each in row)
        if is_forced or _changes_scores(config):
            return self._rescored(words, found, config)
        return found

    def _found(self, words: list[list[str]], config: Any, batch_tokens: int, patience: int) -> list[list[Hypothesis]]:
        """Search until `patience` times as many hypotheses as beams have finished, and return what came of it."""
        results = self._translator.translate_batch(
            words,
            max_batch_size=max(batch_tokens, max(map(len, words))),
            batch_type="tokens",
            max_input_length=0,
            return_scores=True,
            return_end_token=True,  # so that it counts in the length, as it does in generate()
            **self._search_options(config, patience),
        )
        ids, ends = self._target_ids, set(end_tokens(config))
        found = []
        for result in results:
            rows = [tuple([ids[word] for word in words]) for words in result.hypotheses]
            pairs = zip(rows, result.scores, strict=True)
            found.append([Hypothesis(row, score, row[-1] in ends) for row, score in pairs])
        return found

    def _search_options(self, config: Any, patience: int) -> dict[str, Any]:
        beams, returned = config.num_beams or 1, config.num_return_sequences or 1
        penalty = 1.0 if config.length_penalty is None else config.length_penalty
        # Where nothing can beat a hypothesis any more, it is the best by whatever rule the search goes on.
        is_any_rule_the_same = penalty == 0.0 and returned == 1 and config.early_stopping is not True
        shortest = max((config.min_length or 0) - 1, config.min_new_tokens or 0, 0)
        # As in generate(), an end token is not a bad word.
        bad = [row for row in config.bad_words_ids or [] if len(row) > 1 or row[0] not in end_tokens(config)]
        banned = [*bad, *([token] for token in config.suppress_tokens or [])]
        return {
            "beam_size": beams,
            "num_hypotheses": beams * patience if patience > 1 else returned,
            "patience": patience,
            "length_penalty": penalty if penalty or is_any_rule_the_same else ALMOST_ZERO,
            # The last place is that of the end token which is forced.
            "max_decoding_length": max(config.max_new_tokens - (config.forced_eos_token_id is not None), 1),
            "min_decoding_length": shortest,
            "end_token": [self._target_tokens[token] for token in end_tokens(config)],
            "repetition_penalty": config.repetition_penalty or 1.0,
            "no_repeat_ngram_size": config.no_repeat_ngram_size or 0,
            "suppress_sequences": [[self._target_tokens[token] for token in row] for row in banned] or None,
        }

    def _ended_by_score(
        self, words: list[list[str]], found: list[list[Hypothesis]], config: Any, batch_tokens: int
    ) -> list[list[Hypothesis]]:
        """Return the best of what `generate()` would have found before its search ends."""
        beams, returned = config.num_beams, config.num_return_sequences or 1
        penalty = 1.0 if config.length_penalty is None else config.length_penalty
        later = {}  # of the sentences whose best hypotheses may have come too late, those that came late
        for number, row in enumerate(found):
            steps = [len(each.token_ids) for each in row]
            if len(row) > beams and max(steps[:returned]) > sorted(steps)[beams - 1]:
                later[number] = [place for place, step in enumerate(steps) if step > sorted(steps)[beams - 1]]
        places = [(number, place) for number, row in later.items() for place in row]
        targets = [
            [self._target_tokens[token] for token in found[number][place].token_ids] for number, place in places
        ]
        size = max(batch_tokens, max(map(len, words)))
        results = self._translator.score_batch(
            [words[number] for number, _ in places],
            targets,
            max_batch_size=size,
            batch_type="tokens",
            max_input_length=0,
        )
        log_probs: dict[int, dict[int, list[float]]] = {number: {} for number in later}
        for (number, place), result in zip(places, results, strict=True):
            log_probs[number][place] = result.log_probs
        best = []
        for number, row in enumerate(found):
            if number in later:
                last = last_step(row, log_probs[number], beams, penalty)
                row = [each for each in row if len(each.token_ids) <= last]
            best.append(row[:returned])
        return best

    def _rescored(self, words: list[list[str]], found: list[list[Hypothesis]], config: Any) -> list[list[Hypothesis]]:
        """Force the end of what was cut off, and give the model's own scores, of which settings have made others."""
        forced = config.forced_eos_token_id
        penalty = 1.0 if config.length_penalty is None else config.length_penalty
        rows = []
        for each in (each for row in found for each in row):
            is_cut = forced is not None and not each.finished
            rows.append((*each.token_ids[: config.max_new_tokens - 1], _first(forced)) if is_cut else each.token_ids)
        sources = [source for source, row in zip(words, found, strict=True) for _ in row]
        targets = [[self._target_tokens[token] for token in row] for row in rows]
        # An end token is scored behind those that were given.
        results = self._translator.score_batch(sources, targets, max_input_length=0)
        scores = [
            sum(result.log_probs[: len(row)]) / len(row) ** penalty for row, result in zip(rows, results, strict=True)
        ]
        pairs = iter(zip(rows, scores, strict=True))
        return [[Hypothesis(*next(pairs), each.finished) for each in row] for row in found]


def is_exported_folder(folder: Path) -> bool:
    """Tell whether a folder holds a model for CTranslate2 and none for transformers."""
    return (folder / MODEL_FILE).is_file() and not read_object(folder / "config.json").get("model_type")


def refusal(config: Any) -> str | None:
    """Return which setting of a generation config CTranslate2 cannot express, and why, or `None`."""
    if config.do_sample:
        return "`do_sample` must be False with CTranslate2, but is True instead."
    for name, idle in IDLE_SETTINGS.items():
        value = getattr(config, name, None)
        if value not in idle:
            return f"`{name}` must not be set with CTranslate2, but is {value!r} instead."
    ends, beams = end_tokens(config), config.num_beams or 1
    if not ends:
        return "`eos_token_id` must be set with CTranslate2, but is None instead."
    if beams == 1:
        return None
    if len(ends) > 1:
        return f"`eos_token_id` must be one token in CTranslate2's beam search, but is {ends} instead."
    if config.early_stopping not in (True, False, None) and config.length_penalty != 0.0:
        return (
            f"`early_stopping` must be True or False in CTranslate2's beam search, but is {config.early_stopping!r} "
            "instead."
        )
    for name, idle in GREEDY_SETTINGS.items():
        value = getattr(config, name, None)
        if value not in idle:
            return f"`{name}` must not be set in CTranslate2's beam search, but is {value!r} instead."
    return None


def _changes_scores(config: Any) -> bool:
    return any(getattr(config, name, None) not in idle for name, idle in GREEDY_SETTINGS.items())


def _first(token: int | list[int]) -> int:
    return token[0] if isinstance(token, list) else token


def ends_by_score(config: Any) -> bool:
    """Tell whether the scores of open hypotheses end a search, as with `early_stopping=False`, and it matters."""
    is_any_rule_the_same = config.length_penalty == 0.0 and (config.num_return_sequences or 1) == 1
    return (config.num_beams or 1) > 1 and config.early_stopping is not True and not is_any_rule_the_same


def last_step(row: Sequence[Hypothesis], log_probs: dict[int, list[float]], beams: int, penalty: float) -> int:
    """Return the step at which `generate()` ends a search with `early_stopping=False`.

    It does so when no open hypothesis has a better score than the worst of the best `beams` finished ones.

    Args:
        row: Hypotheses of a sentence, those that finished later among them.
        log_probs: By their number in `row`, the log-probabilities of the tokens of those that finished later.
        beams: Number of beams.
        penalty: `length_penalty`.

    """
    steps = sorted(len(each.token_ids) for each in row)
    sums = {number: list(accumulate(values)) for number, values in log_probs.items()}
    for step in range(steps[beams - 1], steps[-1]):
        finished = sorted((each.score for each in row if len(each.token_ids) <= step), reverse=True)
        open_ones = [total[step - 1] for number, total in sums.items() if len(row[number].token_ids) > step]
        if max(open_ones) / step**penalty <= finished[beams - 1]:
            return step
    return steps[-1]


def check_settings(config: Any, model_config: Any) -> None:
    """Check that CTranslate2 can express a generation config, and warn where it only comes near.

    Args:
        config: The generation config.
        model_config: The model's, whose start token the exported model has.

    Raises:
        ValueError: If it cannot; the message names the setting.

    """
    reason = refusal(config)
    if reason is not None:
        raise ValueError(reason)
    start, own = config.decoder_start_token_id, model_config.decoder_start_token_id
    if start not in (None, own):
        raise ValueError(
            f"`decoder_start_token_id` must be {own} with CTranslate2, as in the model's config, but is {start} "
            "instead."
        )
    if ends_by_score(config):
        warnings.warn(
            "CTranslate2 only comes near to how a beam search with `early_stopping=False` ends: a few sentences "
            "may differ from generate()'s; with `early_stopping=True` in the generation config none does.",
            stacklevel=4,
        )


def check_compute_type(name: str, device: torch.device, field: str) -> None:
    """Check that a device computes in a type.

    Args:
        name: CTranslate2's name of it.
        device: The CPU or a CUDA device.
        field: What the user calls it, for the message.

    Raises:
        ValueError: If it does not, or CTranslate2 does not run on the device.

    """
    ctranslate2 = import_ctranslate2()
    kind, index = _place(device)
    supported = ctranslate2.get_supported_compute_types(kind, index)
    if name not in supported:
        raise ValueError(
            f"`{field}` must be one of {', '.join(sorted(supported))}, which CTranslate2 can compute with on this "
            f"{kind}, but is {name!r} instead."
        )


def _place(device: torch.device) -> tuple[str, int]:
    """Return CTranslate2's name and number of a device."""
    ctranslate2 = import_ctranslate2()
    if device.type == "cpu":
        return "cpu", 0
    if device.type != "cuda":
        raise ValueError(f"`device` must be cpu or cuda for CTranslate2, but is {str(device)!r} instead.")
    index, count = device.index or 0, ctranslate2.get_cuda_device_count()
    if index >= count:
        raise ValueError(
            f"`device` must be one that CTranslate2 finds, but is {str(device)!r} instead (it finds {count})."
        )
    return "cuda", index


def _open(folder: Path, device: torch.device, compute_type: ComputeType) -> Any:
    ctranslate2 = import_ctranslate2()
    check_compute_type(compute_type, device, "precision")
    kind, index = _place(device)
    try:
        return ctranslate2.Translator(
            str(folder), kind, device_index=index, compute_type=compute_type, intra_threads=torch.get_num_threads()
        )
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"The model in {folder} cannot be loaded by CTranslate2: {first_line(error)}") from error


def _read_metadata(folder: Path) -> dict[str, Any]:
    path = folder / METADATA_FILE
    if not path.is_file():
        raise ValueError(
            f"{folder} must be written by `heedful export ctranslate2`, but has no {path.name} beside its model."
        )
    metadata = read_object(path)
    found = metadata.get("format_version")
    if found != FORMAT_VERSION:
        raise ValueError(
            f"`format_version` of {path} must be {FORMAT_VERSION}, but is {found} instead: the folder was exported by "
            f"Heed {metadata.get('heed_version', 'of another version')}. Export the model again with this one."
        )
    return metadata
