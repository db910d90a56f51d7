"""CTranslate2's search with the settings of `generate()`, and folders that were exported for it.

Greedy search gives the tokens of `generate()`. So does beam search with `early_stopping=True`: both end a sentence
with its `num_beams`-th finished hypothesis. With `early_stopping=False` `generate()` goes on while the best open
hypothesis has a better score than the worst finished one. CTranslate2 has no such rule, so this is refused.
"""

import tempfile
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch

from heedful.checksums_heed import changed_files
from heedful.configuration_heed import HeedConfig
from heedful.data.tokenization import TokenizerPair
from heedful.files import check_inside, read_object
from heedful.inference.ctranslate2 import specification
from heedful.inference.engines import Engine, Hypothesis, Progress, Sources, ignored, rows_per_sentence
from heedful.inference.loading import check_unchanged, first_line
from heedful.inference.native.conditions import Fingerprint
from heedful.inference.search_settings import end_tokens
from heedful.inference.strategies.steps import BEAM_SETTINGS, GREEDY_SETTINGS, asked_of, require

Mixed = Literal["int8_float32", "int8_float16", "int8_bfloat16"]
ComputeType = Literal["float32", "int8", "int16", "float16", "bfloat16", Mixed]
METADATA_FILE = "heed.json"
FORMAT_VERSION = 1
# In place of a length penalty of 0, with which CTranslate2 stops at the first hypothesis that no other can beat.
ALMOST_ZERO = 1e-30
# In beam search CTranslate2 changes logits, but `generate()` log-probabilities: there the greedy ones are refused.
CTRANSLATE2_SETTINGS = frozenset((*GREEDY_SETTINGS, *BEAM_SETTINGS, "forced_eos_token_id"))


class ExportedModel:
    """A folder that `heedful export ctranslate2` wrote, in place of a model, with the model's configs.

    It computes on the CPU or a CUDA device, in one of CTranslate2's types; None takes the one it was exported with.
    """

    exported_for = "ctranslate2"

    def __init__(self, folder: str | Path, device: torch.device, compute_type: ComputeType | None = None):
        from transformers import GenerationConfig

        self.folder = Path(folder)
        self.device = device
        check_inside(self.folder)
        metadata = _read_metadata(self.folder)
        for part in ("weights", "engine"):
            check_unchanged(self.folder, changed_files(self.folder, part))
        try:
            self.config: Any = HeedConfig(**metadata["config"])
            self.generation_config = GenerationConfig.from_dict(metadata["generation_config"])
            self.generation_config.early_stopping = True  # the only end of beam search that CTranslate2 has
            quantization: ComputeType = metadata["quantization"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{self.folder / METADATA_FILE} cannot be used: {first_line(error)}") from error
        self.compute_type = compute_type or quantization


class CTranslate2Engine(Engine):
    """Greedy and beam search by CTranslate2, with a copy of a Heed model's weights or an `ExportedModel`."""

    def __init__(self, model: Any, tokenizers: TokenizerPair, compute_type: ComputeType = "float32"):
        specification.import_ctranslate2()
        if not isinstance(model, ExportedModel) and (reason := specification.obstacle(model)):
            raise ValueError(reason)  # before its config is read, which may be another model's
        self.model = model
        self._source_tokens = specification.vocabulary(tokenizers.source)
        self._target_tokens = specification.vocabulary(tokenizers.target)
        self._target_ids = {token: number for number, token in enumerate(self._target_tokens)}
        self._fingerprint: Fingerprint | None = None
        if isinstance(model, ExportedModel):
            self._translator = _open(model.folder, model.device, model.compute_type)
            return
        check_compute_type(compute_type, model.device, "precision")  # before the copies are made
        self._fingerprint = Fingerprint(model)
        with tempfile.TemporaryDirectory() as folder:
            specification.save_model(model, tokenizers, Path(folder), compute_type)
            self._translator = _open(Path(folder), model.device, compute_type)  # reads all of it

    @property
    def is_current(self) -> bool:
        """Whether the model still has the weights that were copied, and no new hooks."""
        return self._fingerprint is None or not (self._fingerprint.has_changed or specification.obstacle(self.model))

    @property
    def positions(self) -> int | None:
        """The positions of the written model, or `None` where they are computed."""
        return specification.positions_of_table(self.model.config)

    def check(self, config: Any) -> None:
        """Raise a `ValueError` as `check_settings`."""
        check_settings(config, self.model.config)

    def search(
        self, sources: Sources, config: Any, token_budget: int, processors: Any = None, progress: Progress = ignored
    ) -> list[list[Hypothesis]]:
        """Translate as `Engine.search` says, without logits processors: CTranslate2 sorts and batches sentences."""
        words = [[self._source_tokens[token] for token in source] for source in sources]
        results = self._translator.translate_batch(
            words,
            max_batch_size=max(token_budget // rows_per_sentence(config), max(map(len, words))),
            batch_type="tokens",
            max_input_length=0,
            return_scores=True,
            return_end_token=True,  # so that it counts in the length, as it does in generate()
            **self._search_options(config),
        )
        ids, ends = self._target_ids, set(end_tokens(config))
        progress(len(sources))
        rows = [[tuple(map(ids.__getitem__, words)) for words in result.hypotheses] for result in results]
        scored = [zip(row, result.scores, strict=True) for row, result in zip(rows, results, strict=True)]
        found = [[Hypothesis(tokens, score, tokens[-1] in ends) for tokens, score in pairs] for pairs in scored]
        is_cut = any(not each.finished for row in found for each in row)
        if (is_cut and config.forced_eos_token_id is not None) or asked_of(config).keys() & GREEDY_SETTINGS:
            return self._rescored(words, found, config)
        return found

    def _search_options(self, config: Any) -> dict[str, Any]:
        penalty = 1.0 if config.length_penalty is None else config.length_penalty
        stops_at_the_best = _any_rule_ends_alike(config) and config.early_stopping is not True
        # An end token that is forced takes the last position.
        longest = max(config.max_new_tokens - (config.forced_eos_token_id is not None), 1)
        shortest = (config.min_length or 1) - 1 if config.min_new_tokens is None else config.min_new_tokens
        # As in generate(), an end token is not a bad word.
        bad = [row for row in config.bad_words_ids or [] if len(row) > 1 or row[0] not in end_tokens(config)]
        banned = [*bad, *([token] for token in config.suppress_tokens or [])]
        return {
            "beam_size": config.num_beams,
            "num_hypotheses": config.num_return_sequences,
            "length_penalty": penalty if penalty or stops_at_the_best else ALMOST_ZERO,
            "max_decoding_length": longest,
            "min_decoding_length": min(shortest, longest),
            "end_token": [self._target_tokens[token] for token in end_tokens(config)],
            "repetition_penalty": config.repetition_penalty or 1.0,
            "no_repeat_ngram_size": config.no_repeat_ngram_size or 0,
            "suppress_sequences": [[self._target_tokens[token] for token in row] for row in banned] or None,
        }

    def _rescored(self, words: list[list[str]], found: list[list[Hypothesis]], config: Any) -> list[list[Hypothesis]]:
        """Force the end of hypotheses that were cut off, and score all by the model itself, without the settings."""
        forced = config.forced_eos_token_id
        end = forced[0] if isinstance(forced, list) else forced
        penalty = 1.0 if config.length_penalty is None else config.length_penalty
        sources = [source for source, hypotheses in zip(words, found, strict=True) for _ in hypotheses]
        rows = [
            each.token_ids if forced is None or each.finished else (*each.token_ids[: config.max_new_tokens - 1], end)
            for each in chain.from_iterable(found)
        ]
        targets = [[self._target_tokens[token] for token in row] for row in rows]
        # CTranslate2 scores one more end token, after those that were given.
        results = self._translator.score_batch(sources, targets, max_input_length=0)
        pairs = zip(rows, results, strict=True)
        scored = ((row, sum(result.log_probs[: len(row)]) / len(row) ** penalty) for row, result in pairs)
        return [[Hypothesis(*next(scored), each.finished) for each in row] for row in found]


def check_settings(config: Any, model_config: Any) -> None:
    """Raise a `ValueError` that names a setting of a generation config which CTranslate2 cannot follow."""
    ends, beams = end_tokens(config), config.num_beams or 1
    start, own = config.decoder_start_token_id, model_config.decoder_start_token_id
    require(not config.do_sample, "do_sample", "be False with CTranslate2", True)
    for name, value in asked_of(config).items():
        require(name in CTRANSLATE2_SETTINGS, name, "not be set with CTranslate2", repr(value))
        is_taken = beams == 1 or name not in GREEDY_SETTINGS
        require(is_taken, name, "not be set in CTranslate2's beam search", repr(value))
    require(bool(ends), "eos_token_id", "be set with CTranslate2", None)
    require(beams == 1 or len(ends) == 1, "eos_token_id", "be one token in CTranslate2's beam search", ends)
    if beams > 1 and config.early_stopping is not True and not _any_rule_ends_alike(config):
        rule = "CTranslate2's beam search, which ends a sentence with its `num_beams`-th finished hypothesis"
        raise ValueError(
            f"`early_stopping` must be True in {rule}, but is {config.early_stopping!r} instead: ask for it "
            "(`translate(…, early_stopping=True)`, `heedful translate --early-stopping`), or take another engine."
        )
    must = f"be {own} with CTranslate2, as in the model's config"
    require(start in (None, own), "decoder_start_token_id", must, start)


make_engine = CTranslate2Engine


def _any_rule_ends_alike(config: Any) -> bool:
    """Return whether the best hypothesis is the same by every rule of ending: without a length penalty it is."""
    return config.length_penalty == 0.0 and config.num_return_sequences in (None, 1)


def check_compute_type(name: str, device: torch.device, field: str) -> None:
    """Raise a `ValueError` that names the user's field if CTranslate2 does not compute in a type on a device."""
    kind, index = _place(device)
    supported = specification.import_ctranslate2().get_supported_compute_types(kind, index)
    must = f"be one of {', '.join(sorted(supported))}, which CTranslate2 can compute with on this {kind}"
    require(name in supported, field, must, repr(name))


def _place(device: torch.device) -> tuple[str, int]:
    """Return CTranslate2's name and number of a device."""
    if device.type == "cpu":
        return "cpu", 0
    require(device.type == "cuda", "device", "be cpu or cuda for CTranslate2", repr(str(device)))
    index, count = device.index or 0, specification.import_ctranslate2().get_cuda_device_count()
    require(index < count, "device", f"be one of the {count} that CTranslate2 finds", repr(str(device)))
    return "cuda", index


def _open(folder: Path, device: torch.device, compute_type: ComputeType) -> Any:
    check_compute_type(compute_type, device, "precision")
    kind, index = _place(device)
    options = {"device_index": index, "compute_type": compute_type, "intra_threads": torch.get_num_threads()}
    try:
        return specification.import_ctranslate2().Translator(str(folder), kind, **options)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"The model in {folder} cannot be loaded by CTranslate2: {first_line(error)}") from error


def _read_metadata(folder: Path) -> dict[str, Any]:
    path = folder / METADATA_FILE
    if not path.is_file():
        raise ValueError(f"{folder} must be written by `heedful export ctranslate2`, but has no {path.name}.")
    metadata = read_object(path)
    found, exporter = metadata.get("format_version"), metadata.get("heed_version", "of another version")
    if found != FORMAT_VERSION:
        must = f"`format_version` of {path} must be {FORMAT_VERSION}, but is {found} instead"
        raise ValueError(f"{must}: the folder was exported by Heed {exporter}. Export the model again with this one.")
    return metadata
