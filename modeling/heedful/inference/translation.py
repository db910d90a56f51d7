"""Text in, translations out: sorted by length and batched by tokens inside, in the given order outside.

What a sentence becomes does not depend on the sentences beside it, nor on `token_budget`: every length limit is a
constant of the model or of the call.
"""

import copy
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import torch

from heedful.configuration_base_heed import position_limit
from heedful.data.tokenization import TokenizerPair
from heedful.files import check_at_least
from heedful.generation_heed import DEFAULT_MAX_NEW_TOKENS
from heedful.inference.attention.labels import token_labels
from heedful.inference.ctranslate2.engine import ComputeType, CTranslate2Engine, ExportedModel, is_exported_folder
from heedful.inference.ctranslate2.engine import check_settings as check_ctranslate2_settings
from heedful.inference.ctranslate2.specification import positions_of_table
from heedful.inference.engines import (
    Engine,
    GenerateEngine,
    Hypothesis,
    NativeEngine,
    Progress,
    evaluation_mode,
    rows_per_sentence,
)
from heedful.inference.loading import STOCK, first_line, load_model, model_folder, resolve_device, tokenizer_folder
from heedful.inference.native.decoder import settings_obstacle
from heedful.inference.native.network import obstacle
from heedful.inference.native.weights import Precision
from heedful.inference.scoring import PairScore, score_rows
from heedful.inference.search_settings import LONGEST_SOURCE, MOST_SOURCE_TOKENS
from heedful.inference.strategies.sampling import SeededSampling
from heedful.symbols_heed import UnknownSymbol, check_are_several, checked_texts, trimmed

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

EngineName = Literal["auto", "native", "generate", "ctranslate2"]


@dataclass(frozen=True)
class Translation(Hypothesis):
    """One translation of one sentence.

    Attributes:
        token_ids: The generated tokens, </s> included; they need not be those that `encode_target(text)` gives.
        score: Log-probability of the tokens, divided by their number to the power of the generation config's
            `length_penalty`, or by GNMT's penalty if that is its `length_penalty_form`; 0.0 for an empty line.
        finished: Whether the model ended the sentence itself; `False` if the length limit did.
        text: The decoded text.
    """

    text: str = ""


@dataclass
class _Request:
    """What one call of `translate` asks for, checked and with its defaults filled in, and what it will warn of."""

    generation_config: "GenerationConfig"
    target_language: str | None
    token_budget: int
    split: bool = False
    keep_going: bool = False
    sampling: SeededSampling | None = None
    progress: Progress = field(default=lambda count: None)
    unfinished: int = 0
    long: list[tuple[int, int]] = field(default_factory=list)  # number and tokens of each that is longer than trained
    skipped: list[tuple[int, int]] = field(default_factory=list)


class Translator:
    """Translates with a sequence-to-sequence model and its tokenizers.

    Args:
        model: A `HeedForConditionalGeneration`, or any other encoder-decoder of transformers with `generate()`. It
            stays on its device; while translating it is in evaluation mode. Or the `ExportedModel` of a folder that
            `heedful export ctranslate2` wrote.
        tokenizers: The pair that the model was trained with.
        engine: `generate` is `model.generate()`; `native` is Heed's own decoder for the CPU, several times as fast,
            with the same tokens in float32; `ctranslate2` copies the weights into CTranslate2, and again when they
            have changed. `auto` takes the native one wherever it can do what is asked for, and CTranslate2 for an
            exported model.
        precision: Of the native decoder: `float32` or `int8`; of CTranslate2 any type that it knows.
        ensemble: Further models with these tokenizers: the mean of all probabilities chooses each token.

    Raises:
        ImportError: If CTranslate2 is asked for and not installed.
        ValueError: If the tokenizers do not fit the model's config, the engine that is asked for cannot take the
            model's place, or a precision would be ignored.
    """

    def __init__(
        self,
        model: "PreTrainedModel | ExportedModel",
        tokenizers: TokenizerPair,
        engine: EngineName = "auto",
        precision: Precision | ComputeType = "float32",
        ensemble: Sequence["PreTrainedModel"] = (),
    ):
        if not isinstance(tokenizers, TokenizerPair):
            raise ValueError(f"`tokenizers` must be a `TokenizerPair`, but is a {type(tokenizers).__name__} instead.")
        tokenizers.check_config(model.config)
        if ensemble:
            if engine not in ("auto", "generate") or any(
                isinstance(each, ExportedModel) for each in (model, *ensemble)
            ):
                raise ValueError("`ensemble` must be of models with `generate()`, and `engine` generate, but is not.")
            engine = "generate"
        if engine not in get_args(EngineName):
            raise ValueError(f"`engine` must be one of {', '.join(get_args(EngineName))}, but is {engine!r} instead.")
        if isinstance(model, ExportedModel):
            if engine not in ("auto", "ctranslate2"):
                raise ValueError(
                    f"`engine` must be ctranslate2 for a model that was exported for it, but is {engine} instead."
                )
            engine = "ctranslate2"
        if engine == "generate" and precision != "float32":
            raise ValueError(
                f"`precision` must be float32 with the engine generate, which computes as the model is, but is "
                f"{precision!r} instead."
            )
        self.model: Any = model
        self.tokenizers = tokenizers
        self.engine = engine
        self.precision = precision
        self.ensemble = ensemble
        self._engines: dict[str, Engine] = {}
        if engine != "auto" or precision != "float32":
            self._current("native" if engine == "auto" else engine)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        device: str | torch.device | None = None,
        revision: str | None = None,
        engine: EngineName = "auto",
        precision: Precision | ComputeType = "float32",
    ) -> Self:
        """Load a model and its tokenizers from a folder or the Hub.

        Args:
            folder: A local folder with config.json, weights and tokenizer files, or with an adapter of peft, which
                is merged into the model it was trained on, or an id on the Hub. A folder that `heedful export
                ctranslate2` wrote is computed with by CTranslate2.
            device: "cpu", "cuda", "cuda:1", "mps"; None takes CUDA where there is one, else the CPU.
            revision: Branch, tag or commit on the Hub.
            engine: As the constructor takes it.
            precision: As the constructor takes it; of an exported folder `float32` means what it was exported with.

        Raises:
            FileNotFoundError: If the folder, its config or its weights are missing.
            ValueError: If one of them cannot be used, weights are missing from or unknown to the model, the device
                does not exist here, or the engine cannot take the model's place.
        """
        target, given = resolve_device(device), folder
        folder = model_folder(folder, revision)
        model: Any
        if is_exported_folder(folder):
            compute_type: Any = None if precision == "float32" else precision
            model = ExportedModel(folder, target, compute_type)
        else:
            model = load_model(folder).to(target)  # type: ignore[arg-type]
        folder = tokenizer_folder(folder)
        try:
            tokenizers = TokenizerPair.from_pretrained(folder)
            tokenizers.check_config(model.config)
        except FileNotFoundError:
            raise
        except (OSError, KeyError, TypeError, ValueError) as error:
            kind = getattr(model.config, "model_type", None)
            if kind in STOCK:
                languages = " --source-language … --target-language …" if kind in ("m2m_100", "mbart") else ""
                raise ValueError(
                    f"The model in {folder} must be one of Heedful's, but is a {kind} model as it was published: "
                    f"`heedful convert {given} NEW_FOLDER{languages}` makes a Heed model of it that computes the same."
                ) from error
            raise ValueError(f"The tokenizers in {folder} cannot be used: {first_line(error)}") from error
        return cls(model, tokenizers, engine, precision)

    def translate(
        self,
        texts: Sequence[str],
        *,
        num_beams: int | None = None,
        num_return_sequences: int = 1,
        target_language: str | None = None,
        max_new_tokens: int | None = None,
        early_stopping: bool | None = None,
        token_budget: int = 8192,
    ) -> list[list[Translation]]:
        """Translate sentences.

        An empty or blank sentence gives empty translations without asking the model. One warning says how many
        sentences reached the length limit before </s>; their `Translation.finished` is False. Another one says how
        many were longer than any source that the model has learned from, as far as its generation config tells it
        (else `max_position_embeddings` does). With `do_sample` in the model's generation config, results are random
        and depend on the batch.

        Args:
            texts: Sentences.
            num_beams: Width of beam search, 1 for greedy search; None takes the model's generation config.
            num_return_sequences: Translations per sentence, best first; at most `num_beams` unless sampling.
            target_language: Language to translate into, where the tokenizers know several.
            max_new_tokens: Longest translation in tokens. None takes the generation config's `max_new_tokens` or
                `max_length`, and 256 where it sets none, within what learned positions allow.
            early_stopping: Whether beam search ends with its `num_beams`-th finished hypothesis; None takes the
                model's generation config.
            token_budget: Padded source tokens × beams of one batch; a sentence longer than that runs alone.

        Returns:
            For every sentence its `num_return_sequences` translations, in the order of `texts`.

        Raises:
            ValueError: If a setting is out of range, or a sentence is longer than the model's learned positions, or
                than 8,192 tokens where the model has not learned from longer ones.
        """
        request = self._request(
            num_beams, num_return_sequences, target_language, max_new_tokens, early_stopping, token_budget
        )
        results = self._translate(checked_texts(texts), request, first_number=1)
        self._warn(request)
        return results

    def translate_lines(
        self,
        lines: Iterable[str],
        *,
        chunk_size: int = 4096,
        split: bool = False,
        keep_going: bool = False,
        sampling: SeededSampling | None = None,
        progress: Progress | None = None,
        **settings: Any,
    ) -> Iterator[list[Translation]]:
        """Translate a stream of lines that need not fit in memory, for example an open file.

        Args:
            lines: Lines, with or without their line ends; a byte order mark before the first one is no part of it.
            chunk_size: Number of lines that are read, sorted and batched together.
            split: Whether a line that is longer than any source of the training is split into its sentences. Their
                translations are joined with spaces, n-th best with n-th best; the score is the mean of theirs.
            keep_going: Whether a sentence that is too long to be translated gives empty translations, and a warning,
                and not an error.
            sampling: Draws one translation of each line, the same in every batch, in place of a search.
            progress: Called while lines are translated, with the number of those that are done since the last call.
            **settings: The keyword arguments of `translate`.

        Returns:
            An iterator with one list of translations per line, in order. Its warnings come once, at its end.

        Raises:
            ValueError: As `translate` does; sentences are numbered through the whole stream.
        """
        check_are_several(lines, "lines")
        check_at_least(1, chunk_size=chunk_size)
        defaults: dict[str, Any] = self.translate.__kwdefaults__ or {}
        for name in settings:
            if name not in defaults:
                raise ValueError(f"`{name}` must be a keyword of `translate`, but is not.")
        if sampling is not None:
            settings["num_beams"] = settings.get("num_beams") or 1
        request = self._request(**defaults | settings)
        request.split, request.keep_going = split, keep_going
        request.progress = progress or request.progress
        if sampling is not None:
            self._draw(request, sampling)
        return self._stream(lines, chunk_size, request)

    def score_pairs(
        self,
        pairs: Iterable[tuple[str, str]],
        *,
        target_language: str | None = None,
        token_budget: int = 8192,
        chunk_size: int = 4096,
        keep_going: bool = False,
    ) -> Iterator[PairScore | None]:
        """Tell how probable the model finds given translations, of pairs that need not fit in memory.

        Padding and the pairs beside it change the last digits of a score, in float32 by less than 1e-5 a token; with a
        `token_budget` of 1 each pair runs alone. The target ends in </s>, which is scored as every token. One warning
        says how many sources were longer than any that the model has learned from.

        Args:
            pairs: Sources and targets.
            target_language: The language of the targets, where the tokenizers know several.
            token_budget: Padded tokens of one batch, sources and targets; a pair of more runs alone.
            chunk_size: Number of pairs that are read, sorted and batched together.
            keep_going: Whether a pair that is too long has no score, and a warning, and is no error.

        Returns:
            An iterator with one score for each pair, in order; `None` for one that is too long.

        Raises:
            ValueError: If a setting is out of range, a pair is not two texts, one of them is longer than `translate`
                takes, or the translator computes with CTranslate2 or in another precision than float32.
        """
        check_are_several(pairs, "pairs")
        check_at_least(1, token_budget=token_budget, chunk_size=chunk_size)
        self.tokenizers.encode_source([""], target_language)  # raises now what it would raise later
        if self.engine == "ctranslate2" or self.precision != "float32" or self.ensemble:
            raise ValueError(
                "`engine` and `precision` must be left out to score pairs, which the model itself does, and `ensemble`"
                f" too, but are {self.engine}, {self.precision} and {len(self.ensemble)} models instead."
            )
        request = _Request(self.model.generation_config, target_language, token_budget, keep_going=keep_going)
        return self._score_stream(pairs, chunk_size, request)

    def __getstate__(self) -> dict[str, Any]:
        # Copied weights cannot be sent to another process, which makes its own copies.
        return self.__dict__ | {"_engines": {}}

    def _stream(self, lines: Iterable[str], chunk_size: int, request: _Request) -> Iterator[list[Translation]]:
        stream, number = iter(lines), 1
        while chunk := checked_texts(islice(stream, chunk_size), "lines", number - 1):
            if number == 1:
                chunk[0] = chunk[0].removeprefix("\ufeff")
            yield from self._translate(chunk, request, first_number=number)
            number += len(chunk)
        self._warn(request)

    def _score_stream(
        self, pairs: Iterable[tuple[str, str]], chunk_size: int, request: _Request
    ) -> Iterator[PairScore | None]:
        stream, first_number = iter(pairs), 1
        while chunk := list(islice(stream, chunk_size)):
            _check_pairs(chunk, first_number)
            with _told_by_line(range(first_number, first_number + len(chunk))):
                sources = self.tokenizers.encode_source([source for source, _ in chunk], request.target_language)
                targets = self.tokenizers.encode_target([trimmed(target) for _, target in chunk])
            kept = [
                index
                for index, row in enumerate(zip(sources, targets, strict=True))
                if self._is_kept(first_number + index, row, request)
            ]
            rows = [{"input_ids": sources[index], "labels": targets[index]} for index in kept]
            with evaluation_mode(self.model), torch.no_grad():
                found = dict(zip(kept, score_rows(self.model, rows, request.token_budget), strict=True))
            for index, ids in enumerate(targets):
                labels = token_labels(self.tokenizers.target, ids)
                yield PairScore(tuple(ids), tuple(labels), tuple(found[index])) if index in found else None
            first_number += len(chunk)
        self._warn(request, "scored")

    def _request(
        self,
        num_beams: int | None,
        num_return_sequences: int,
        target_language: str | None,
        max_new_tokens: int | None,
        early_stopping: bool | None,
        token_budget: int,
    ) -> _Request:
        """Check the settings of a call, and put them into a copy of the model's generation config."""
        config = copy.deepcopy(self.model.generation_config)
        config.num_beams = num_beams if num_beams is not None else (config.num_beams or 1)
        config.num_return_sequences = num_return_sequences
        check_at_least(1, num_beams=config.num_beams, num_return_sequences=num_return_sequences)
        check_at_least(1, token_budget=token_budget, max_new_tokens=max_new_tokens)
        if num_return_sequences > config.num_beams and not config.do_sample:
            raise ValueError(
                f"`num_return_sequences` must be at most `num_beams` ({config.num_beams}),"
                f" but is {num_return_sequences} instead."
            )
        vocabulary = len(self.tokenizers.target)
        if config.num_beams > vocabulary:
            raise ValueError(
                f"`num_beams` must be at most {vocabulary}, the number of tokens in the vocabulary, but is"
                f" {config.num_beams} instead."
            )
        config.max_new_tokens, config.max_length = self._length_bound(max_new_tokens), None
        config.return_dict_in_generate = False
        config.output_scores = config.output_logits = False
        config.output_attentions = config.output_hidden_states = False
        if early_stopping is not None and config.num_beams > 1:
            config.early_stopping = early_stopping
        if self.engine == "ctranslate2":
            check_ctranslate2_settings(config, self.model.config)
        return _Request(config, target_language, token_budget)

    def _draw(self, request: _Request, sampling: SeededSampling) -> None:
        """Let a request draw translations; greedy search takes the largest of the noisy logits."""
        request.sampling, config = sampling, request.generation_config
        if self.engine == "ctranslate2" or request.split or rows_per_sentence(config) > 1:
            raise ValueError(
                "`sampling` must come with one beam, one translation of each line, no `split` and another engine than "
                f"ctranslate2, but comes with {config.num_beams}, {config.num_return_sequences}, {request.split} and "
                f"{self.engine} instead."
            )
        config.do_sample, config.temperature, config.top_k, config.top_p = False, None, None, None

    def _positions(self) -> int | None:
        """Return how many tokens a sequence may have; None is any number."""
        find = positions_of_table if self.engine == "ctranslate2" else position_limit
        return find(self.model.config)

    def _length_bound(self, max_new_tokens: int | None) -> int:
        positions = self._positions()
        if max_new_tokens is not None:
            if positions is not None and max_new_tokens > positions:
                raise ValueError(
                    f"`max_new_tokens` must be at most {positions}, the model's number of positions,"
                    f" but is {max_new_tokens} instead."
                )
            return max_new_tokens
        config = self.model.generation_config
        if config.max_new_tokens is not None:
            bound = config.max_new_tokens
        elif config.max_length is not None:
            bound = config.max_length - 1  # `max_length` counts the decoder's start token too
        else:
            bound = DEFAULT_MAX_NEW_TOKENS
        return bound if positions is None else min(bound, positions)

    def _engine(self, config: "GenerationConfig") -> Engine:
        """Return the engine of this call, with the model's present weights."""
        if self.engine != "auto":
            return self._current(self.engine)
        return self._current("native" if self.precision != "float32" or self._may_be_native(config) else "generate")

    def _may_be_native(self, config: "GenerationConfig") -> bool:
        if self.model.dtype != torch.float32 or settings_obstacle(config) is not None:
            return False
        native = self._engines.get("native")
        return (native is not None and native.is_current) or obstacle(self.model) is None

    def _current(self, name: str) -> Engine:
        engine = self._engines.get(name)
        if engine is None or not engine.is_current:
            self._engines.pop(name, None)
            del engine  # and with it its copy of the weights, before a new one is made
            precision: Any = self.precision  # each engine checks its name
            if name == "native":
                engine = NativeEngine(self.model, precision)
            elif name == "ctranslate2":
                engine = CTranslate2Engine(self.model, self.tokenizers, precision)
            else:
                engine = GenerateEngine(self.model, self.ensemble, self.tokenizers.target)
            self._engines[name] = engine
        return engine

    def _translate(self, texts: list[str], request: _Request, first_number: int) -> list[list[Translation]]:
        config = request.generation_config
        results = [[Translation()] * config.num_return_sequences for _ in texts]
        filled = [index for index, text in enumerate(texts) if trimmed(text)]
        rows = self._rows([(first_number + index, texts[index]) for index in filled], request)
        if not rows:
            return results
        engine: Any = self._engine(config)
        # CTranslate2 batches by itself, and a text that is split is several rows.
        is_counted = self.engine != "ctranslate2" and not request.split
        search: dict[str, Any] = {"progress": request.progress} if is_counted else {}
        if (sampling := request.sampling) is not None:
            search["processors"] = lambda batch: sampling.processors([rows[index][0] for index in batch])
        found = engine.search([row for _, row in rows], config, request.token_budget, **search)
        request.progress(len(texts) - len(rows) * is_counted)
        decoded = iter(self.tokenizers.decode_target([one.token_ids for row in found for one in row]))
        translated = (
            (number, [Translation(one.token_ids, one.score, one.finished, next(decoded)) for one in row])
            for (number, _), row in zip(rows, found, strict=True)
        )
        for number, parts in groupby(translated, key=lambda pair: pair[0]):
            results[number - first_number] = [_joined(each) for each in zip(*(part for _, part in parts), strict=True)]
        request.unfinished += sum(map(_is_unfinished, results))
        return results

    def _rows(self, texts: list[tuple[int, str]], request: _Request) -> list[tuple[int, list[int]]]:
        """Encode numbered texts; each token row has the number of its text, of which one that is split has several."""
        trained = self._longest_trained()
        rows = list(self._encoded(texts, request))
        if request.split and trained is not None:
            from heedful.pipeline_heed import split_sentences

            parts = [
                self._encoded([(number, each) for each, _ in split_sentences(text) if trimmed(each)], request)
                if len(row) > trained
                else [(number, row)]
                for (number, row), (_, text) in zip(rows, texts, strict=True)
            ]
            rows = list(chain.from_iterable(parts))
        return [(number, row) for number, row in rows if self._is_kept(number, [row], request)]

    def _is_kept(self, number: int, sides: Sequence[Sequence[int]], request: _Request) -> bool:
        """Return whether a sentence, or a pair, is short enough, and note its number and tokens if they are many."""
        positions, trained = self._positions(), self._longest_trained()
        most, tokens = positions or max(MOST_SOURCE_TOKENS, trained or 0), max(map(len, sides))
        if tokens > most and not request.keep_going:
            whose = "the model's number of positions" if positions else "more than which takes too much memory"
            raise ValueError(f"Sentence {number} must have at most {most} tokens, {whose}, but has {tokens} instead.")
        if tokens > most:
            request.skipped.append((number, tokens))
        elif trained is not None and len(sides[0]) > trained:
            request.long.append((number, len(sides[0])))
        return tokens <= most

    def _encoded(self, texts: list[tuple[int, str]], request: _Request) -> Iterator[tuple[int, list[int]]]:
        numbers = [number for number, _ in texts]
        with _told_by_line(numbers):
            rows = self.tokenizers.encode_source([text for _, text in texts], request.target_language)
        return zip(numbers, rows, strict=True)

    def _longest_trained(self) -> int | None:
        """Return the tokens of the longest source that the model has learned from, as far as that is known."""
        told = getattr(self.model.generation_config, LONGEST_SOURCE, None)
        return told or getattr(self.model.config, "max_position_embeddings", None)

    def _warn(self, request: _Request, done: str = "translated") -> None:
        """Warn of what the sentences of a call had in common, once."""
        if request.unfinished:
            config = request.generation_config
            beyond = getattr(config, "tokens_beyond_source", None)
            own = f", or {beyond} more than the source has," if beyond is not None else ""
            warnings.warn(
                f"{request.unfinished} {'output was' if request.unfinished == 1 else 'outputs were'} cut off at"
                f" {config.max_new_tokens} tokens{own or ','} before </s>: raise `max_new_tokens`"
                f"{' or `tokens_beyond_source`' if own else ''}, or look whether the model repeats itself.",
                stacklevel=3,
            )
        if request.long:
            result = "scored too low" if done == "scored" else "translated in part or wrongly"
            if done == "translated" and not request.split:
                result += ": `split` (of `translate_lines`, `--split`) takes them apart"
            warnings.warn(
                f"{_counted(request.long)} longer than the {self._longest_trained()} tokens that the model has learned"
                f" from, and may be {result}.",
                stacklevel=3,
            )
        if request.skipped:
            warnings.warn(f"{_counted(request.skipped)} too long to be {done}, and left empty.", stacklevel=3)


@contextmanager
def _told_by_line(numbers: Sequence[int]) -> Iterator[None]:
    """Name the line, by its number, of a symbol that a closed vocabulary lacks."""
    try:
        yield
    except UnknownSymbol as error:
        raise error.at(f"Line {numbers[error.index]}") from None


def _counted(sentences: list[tuple[int, int]]) -> str:
    """Say of sentences, by their numbers and tokens, how many they are and which is the first: "… is" or "… are"."""
    number, tokens = sentences[0]
    count = len({number for number, _ in sentences})
    if count == 1:
        return f"Sentence {number}, of {tokens} tokens, is"
    return f"{count} sentences, the first of them sentence {number} of {tokens} tokens, are"


def _joined(parts: tuple[Translation, ...]) -> Translation:
    """Join the translations of the sentences of a text."""
    if len(parts) == 1:
        return parts[0]
    return Translation(
        token_ids=tuple(chain.from_iterable(part.token_ids for part in parts)),
        score=sum(part.score for part in parts) / len(parts),
        finished=all(part.finished for part in parts),
        text=" ".join(part.text for part in parts),
    )


def _check_pairs(pairs: Sequence[tuple[str, str]], first_number: int) -> None:
    for number, pair in enumerate(pairs, start=first_number):
        is_pair = isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise ValueError(f"Pair {number} must be a source and a target text, but is {pair!r} instead.")
        checked_texts(pair, f"pairs[{number - 1}]")


def _is_unfinished(translations: list[Translation]) -> bool:
    return not all(translation.finished for translation in translations)
