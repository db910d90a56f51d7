"""Text in, translations out: sorted by length and batched by tokens inside, in the given order outside.

What a sentence becomes does not depend on the sentences beside it, nor on `token_budget`: every length
limit is a constant of the model or of the call, and padding is masked.
"""

import copy
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args
from weakref import WeakKeyDictionary

import torch

from heedful.configuration_base_heed import position_limit
from heedful.data.tokenization import TokenizerPair
from heedful.generation_heed import DEFAULT_MAX_NEW_TOKENS, TRANSFORMERS_DEFAULT_LENGTH
from heedful.inference.loading import adapted_model, first_line, is_adapter, load_model, model_folder, resolve_device
from heedful.inference.strategies.beam_search import BeamSearch
from heedful.inference.strategies.penalties import length_penalty
from heedful.inference.strategies.steps import asks_for_beam_search, end_tokens

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

    from heedful.inference.ctranslate2.engine import ComputeType, CTranslate2Engine
    from heedful.inference.native.decoder import NativeDecoder
    from heedful.inference.native.packing import Precision

Engine = Literal["auto", "native", "generate", "ctranslate2"]

# Logits held at once while scores are computed: 2**25 float32 numbers are 128 MiB.
LOGITS_BUDGET = 2**25
# Of each model: while one thread translates, the generation config on it is that call's own.
_LOCKS: "WeakKeyDictionary[Any, threading.RLock]" = WeakKeyDictionary()


@dataclass(frozen=True)
class Translation:
    """One translation of one sentence.

    Attributes:
        text: The decoded text.
        score: Log-probability of the tokens, </s> included, divided by their number to the power of the
            generation config's `length_penalty`, or by GNMT's penalty where that is its `length_penalty_form`:
            what `generate()` calls `sequences_scores` for beams. Computed for greedy search and samples too. 0.0 for
            an empty line.
        token_ids: The generated tokens, </s> included; they need not be those that `encode_target(text)` gives.
        finished: False where generation stopped at the length limit.

    """

    text: str
    score: float
    token_ids: tuple[int, ...] = ()
    finished: bool = True

    @property
    def token_count(self) -> int:
        """Number of generated tokens, </s> included."""
        return len(self.token_ids)


@dataclass(frozen=True)
class _Settings:
    """What one call of `translate` asks for, checked and with its defaults filled in."""

    generation_config: "GenerationConfig"
    target_language: str | None
    token_budget: int

    @property
    def returned(self) -> int:
        return self.generation_config.num_return_sequences

    @property
    def rows_per_sentence(self) -> int:
        return max(self.generation_config.num_beams, self.returned)


class Translator:
    """Translates with a sequence-to-sequence model and its tokenizers.

    Args:
        model: A `HeedForConditionalGeneration`, or any other encoder-decoder of transformers with
            `generate()`. It stays on its device; while translating it is in evaluation mode. Or the `ExportedModel` of
            a folder that `heedful export ctranslate2` wrote.
        tokenizers: The pair that the model was trained with.
        engine: `generate` is `model.generate()`; `native` is Heed's own decoder for the CPU, several times as fast,
            with the same tokens in float32; `ctranslate2` copies the weights into CTranslate2, and anew where they
            have changed. `auto` takes the native one wherever it can do what is asked for, and CTranslate2 for an
            exported model.
        precision: Of the native decoder: `float32`, `bfloat16` or `int8`; of CTranslate2 any type that it knows.

    Raises:
        ImportError: When CTranslate2 is asked for and not installed.
        ValueError: When the tokenizers do not fit the model's config, the engine that is asked for cannot take the
            model's place, or a precision would be ignored.

    """

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizers: TokenizerPair,
        engine: Engine = "auto",
        precision: "Precision | ComputeType" = "float32",
    ):
        from heedful.inference.ctranslate2.engine import ExportedModel

        tokenizers.check_config(model.config)
        if engine not in get_args(Engine):
            raise ValueError(f"`engine` must be one of {', '.join(get_args(Engine))}, but is {engine!r} instead.")
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
        self._native: NativeDecoder | None = None
        self._ctranslate2: CTranslate2Engine | None = None
        if engine == "ctranslate2":
            self._ctranslate2 = self._current_ctranslate2()
        elif engine == "native" or precision != "float32":
            self._native = self._make_native()

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        device: str | torch.device | None = None,
        revision: str | None = None,
        engine: Engine = "auto",
        precision: "Precision | ComputeType" = "float32",
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
            FileNotFoundError: When the folder, its config or its weights are missing.
            ValueError: When one of them cannot be used, weights are missing from or unknown to the model,
                the device does not exist here, or the engine cannot take the model's place.

        """
        from heedful.inference.ctranslate2.engine import ExportedModel, is_exported_folder

        target = resolve_device(device)
        folder = model_folder(folder, revision)
        is_exported = is_exported_folder(folder)
        compute_type: Any = None if precision == "float32" else precision
        loaded: Any = ExportedModel(folder, target, compute_type) if is_exported else load_model(folder)
        model = loaded if is_exported else loaded.to(target)
        if is_adapter(folder) and not (folder / "tokenizer.json").is_file():
            folder = adapted_model(folder)
        try:
            tokenizers = TokenizerPair.from_pretrained(folder)
            tokenizers.check_config(model.config)
        except FileNotFoundError:
            raise
        except (OSError, KeyError, TypeError, ValueError) as error:
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
        token_budget: int = 8192,
    ) -> list[list[Translation]]:
        """Translate sentences.

        An empty or blank sentence gives empty translations without asking the model. Where generation stops
        at the length limit before </s>, `Translation.finished` is False and one warning tells how many
        sentences that befell. With `do_sample` in the model's generation config, results are random and
        depend on the batch.

        Args:
            texts: Sentences.
            num_beams: Width of beam search, 1 for greedy search; None takes the model's generation config.
            num_return_sequences: Translations per sentence, best first; at most `num_beams` unless sampling.
            target_language: Language to translate into, where the tokenizers know several.
            max_new_tokens: Longest translation in tokens. None takes the generation config's
                `max_new_tokens` or `max_length`, and 256 where it sets none (or transformers' 20), within
                what learned positions allow.
            token_budget: Padded source tokens × beams of one batch; a sentence longer than that runs alone.

        Returns:
            For every sentence its `num_return_sequences` translations, in the order of `texts`.

        Raises:
            ValueError: For a setting out of range, or a sentence longer than the model's learned positions.

        """
        settings = self._settings(
            num_beams, num_return_sequences, target_language, max_new_tokens, token_budget=token_budget
        )
        results = self._translate(_checked_texts(texts), settings, first_number=1)
        self._warn_of_unfinished(sum(_is_unfinished(result) for result in results), settings)
        return results

    def translate_lines(
        self, lines: Iterable[str], *, chunk_size: int = 4096, **settings: Any
    ) -> Iterator[list[Translation]]:
        """Translate a stream of lines that need not fit in memory, for example an open file.

        Args:
            lines: Lines, with or without their line ends.
            chunk_size: Number of lines that are read, sorted and batched together.
            **settings: The keyword arguments of `translate`.

        Returns:
            An iterator with one list of translations per line, in order. The warning about the length limit
            comes once, at its end.

        Raises:
            ValueError: As `translate`; sentences are numbered through the whole stream.

        """
        _check_positive("chunk_size", chunk_size)
        token_budget = settings.pop("token_budget", 8192)
        given = {
            "num_beams": None,
            "num_return_sequences": 1,
            "target_language": None,
            "max_new_tokens": None,
        }
        unknown = sorted(set(settings) - set(given))
        if unknown:
            raise ValueError(f"`{unknown[0]}` must be a keyword of `translate`, but is not.")
        checked = self._settings(**(given | settings), token_budget=token_budget)
        return self._stream(lines, chunk_size, checked)

    def __getstate__(self) -> dict[str, Any]:
        # Packed weights cannot be sent to another process, which packs its own.
        return self.__dict__ | {"_native": None, "_ctranslate2": None}

    def _make_native(self) -> "NativeDecoder":
        from heedful.inference.native.decoder import NativeDecoder

        return NativeDecoder(self.model, self.precision)  # type: ignore[arg-type]  # it checks the name

    def _current_ctranslate2(self) -> "CTranslate2Engine":
        """Return CTranslate2 with the model's present weights."""
        from heedful.inference.ctranslate2.engine import CTranslate2Engine

        if self._ctranslate2 is None or not self._ctranslate2.is_current:
            self._ctranslate2 = CTranslate2Engine(self.model, self.tokenizers, self.precision)
        return self._ctranslate2

    def _decoder(self, config: "GenerationConfig") -> "NativeDecoder | None":
        """Return the native decoder, with the model's present weights, if this call is for it."""
        from heedful.inference.native.decoder import refusal
        from heedful.inference.native.network import obstacle

        if self.engine == "generate":
            return None
        if self._native is not None and not self._native.is_current:
            self._native = None
        is_optional = self.engine == "auto" and self.precision == "float32"
        if is_optional and (self.model.dtype != torch.float32 or refusal(config) is not None):
            return None
        if is_optional and self._native is None and obstacle(self.model) is not None:
            return None
        if self._native is None:
            self._native = self._make_native()
        return self._native

    def _stream(self, lines: Iterable[str], chunk_size: int, settings: _Settings) -> Iterator[list[Translation]]:
        stream, number, unfinished = iter(lines), 1, 0
        try:
            while chunk := [line.rstrip("\r\n") for line in islice(stream, chunk_size)]:
                results = self._translate(chunk, settings, first_number=number)
                unfinished += sum(_is_unfinished(result) for result in results)
                number += len(chunk)
                yield from results
        finally:
            self._warn_of_unfinished(unfinished, settings)

    def _settings(
        self,
        num_beams: int | None,
        num_return_sequences: int,
        target_language: str | None,
        max_new_tokens: int | None,
        token_budget: int,
    ) -> _Settings:
        # A copy: the model's own generation config is the user's.
        config = copy.deepcopy(self.model.generation_config)
        config.num_beams = num_beams if num_beams is not None else (config.num_beams or 1)
        config.num_return_sequences = num_return_sequences
        _check_positive("num_beams", config.num_beams)
        _check_positive("num_return_sequences", num_return_sequences)
        _check_positive("token_budget", token_budget)
        if num_return_sequences > config.num_beams and not config.do_sample:
            raise ValueError(
                f"`num_return_sequences` must be at most `num_beams` ({config.num_beams}),"
                f" but is {num_return_sequences} instead."
            )
        config.max_new_tokens = self._length_bound(max_new_tokens)
        config.max_length = None
        config.return_dict_in_generate = False
        config.output_scores = config.output_attentions = config.output_hidden_states = False
        if self.engine == "ctranslate2":
            from heedful.inference.ctranslate2.engine import check_settings

            check_settings(config, self.model.config)
        return _Settings(config, target_language, token_budget)

    def _positions(self) -> int | None:
        """Return how many tokens a sequence may have; None is any number."""
        if self.engine != "ctranslate2":
            return position_limit(self.model.config)
        from heedful.inference.ctranslate2.specification import positions_of_table

        return positions_of_table(self.model.config)

    def _length_bound(self, max_new_tokens: int | None) -> int:
        positions = self._positions()
        if max_new_tokens is not None:
            _check_positive("max_new_tokens", max_new_tokens)
            if positions is not None and max_new_tokens > positions:
                raise ValueError(
                    f"`max_new_tokens` must be at most {positions}, the model's number of positions,"
                    f" but is {max_new_tokens} instead."
                )
            return max_new_tokens
        config = self.model.generation_config
        if config.max_new_tokens is not None:
            bound = config.max_new_tokens
        elif config.max_length is not None and config.max_length != TRANSFORMERS_DEFAULT_LENGTH:
            bound = config.max_length - 1  # `max_length` counts the decoder's start token too
        else:
            bound = DEFAULT_MAX_NEW_TOKENS
        return bound if positions is None else min(bound, positions)

    def _translate(self, texts: list[str], settings: _Settings, first_number: int) -> list[list[Translation]]:
        empty = [Translation("", 0.0)] * settings.returned
        results = [empty[:] for _ in texts]
        filled = [index for index, text in enumerate(texts) if text.strip()]
        encoded = self.tokenizers.encode_source([texts[index] for index in filled], settings.target_language)
        sources = dict(zip(filled, encoded, strict=True))
        self._check_source_lengths(sources, first_number)
        if self.engine == "ctranslate2":
            whole = self._translate_by_ctranslate2(list(sources.values()), settings)
            for index, translations in zip(sources, whole, strict=True):
                results[index] = translations
            return results
        lengths = {index: len(source) * settings.rows_per_sentence for index, source in sources.items()}
        with self._prepared_model(settings):
            decoder = self._decoder(settings.generation_config)
            for batch in token_batches(lengths, settings.token_budget):
                translated = self._translate_batch([sources[index] for index in batch], settings, decoder)
                for index, translations in zip(batch, translated, strict=True):
                    results[index] = translations
        return results

    def _translate_by_ctranslate2(self, sources: list[list[int]], settings: _Settings) -> Iterator[list[Translation]]:
        """Hand all sentences over at once: CTranslate2 sorts and batches them, and works on batches side by side."""
        batch_tokens = settings.token_budget // settings.rows_per_sentence
        found = self._current_ctranslate2().search(sources, settings.generation_config, batch_tokens)
        texts = iter(self.tokenizers.decode_target([one.token_ids for row in found for one in row]))
        for row in found:
            yield [Translation(next(texts), one.score, one.token_ids, one.finished) for one in row]

    @contextmanager
    def _prepared_model(self, settings: _Settings) -> Iterator[None]:
        """Put the model into evaluation mode with our generation config, and back.

        Given to `generate()` instead, a generation config whose `max_length` is None gets the model's filled in, and
        with it a warning at every batch.
        """
        with _LOCKS.setdefault(self.model, threading.RLock()):
            was_training, generation_config = self.model.training, self.model.generation_config
            self.model.eval()
            self.model.generation_config = settings.generation_config
            try:
                with torch.inference_mode():
                    yield
            finally:
                self.model.generation_config = generation_config
                self.model.train(was_training)

    def _check_source_lengths(self, sources: dict[int, list[int]], first_number: int) -> None:
        positions = self._positions()
        for index, source in sources.items():
            if positions is not None and len(source) > positions:
                raise ValueError(
                    f"Sentence {first_number + index} must have at most {positions} tokens, the model's number of"
                    f" positions, but has {len(source)} instead."
                )

    def _translate_batch(
        self, sources: list[list[int]], settings: _Settings, decoder: "NativeDecoder | None"
    ) -> list[list[Translation]]:
        inputs = pad_sources(sources, self.model.config.pad_token_id, self.model.device)
        config = settings.generation_config
        if decoder is None:
            search = {"custom_generate": BeamSearch()} if asks_for_beam_search(config) else {}
            sequences, known_scores = self.model.generate(**inputs, **search), None
        else:
            sequences, known_scores = self._decode(inputs, decoder)
        counts, finished = self._token_counts(sequences, config, inputs["attention_mask"])
        scores = self._scores(inputs, sequences, counts, settings) if known_scores is None else known_scores
        # The first token is the decoder's start, and what follows </s> is padding.
        generated = [tuple(row[1 : count + 1]) for row, count in zip(sequences.tolist(), counts.tolist(), strict=True)]
        texts = self.tokenizers.decode_target(generated)
        translations = [Translation(*fields) for fields in zip(texts, scores, generated, finished, strict=True)]
        return [
            translations[start : start + settings.returned] for start in range(0, len(translations), settings.returned)
        ]

    def _decode(
        self, inputs: dict[str, torch.Tensor], decoder: "NativeDecoder"
    ) -> tuple[torch.Tensor, list[float] | None]:
        """Return the native decoder's tokens, and their scores unless logits processors changed them."""
        is_processed = False

        def decode(model: Any, input_ids: torch.Tensor, logits_processor: Any, **rest: Any) -> Any:
            nonlocal is_processed
            is_processed = len(logits_processor) > 0
            return decoder(model, input_ids, logits_processor=logits_processor, **rest)

        output = self.model.generate(**decoder.encoded(**inputs), custom_generate=decode, return_dict_in_generate=True)
        return output.sequences, None if is_processed else output.sequences_scores.tolist()

    def _token_counts(
        self, sequences: torch.Tensor, config: "GenerationConfig", source_mask: torch.Tensor
    ) -> tuple[torch.Tensor, list[bool]]:
        """Count every sequence's generated tokens, </s> included, and tell whether it ended by itself."""
        generated = sequences[:, 1:]
        ends = torch.isin(generated, torch.tensor(end_tokens(config), dtype=torch.long, device=generated.device))
        # argmax finds the first </s>; a sequence without one is as long as the longest.
        counts = torch.where(ends.any(dim=1), ends.int().argmax(dim=1) + 1, generated.shape[1])
        ended = ends.any(dim=1)
        if config.forced_eos_token_id is not None:
            # An </s> in the last possible place was put there by force.
            ended &= counts < config.max_new_tokens
        beyond = getattr(config, "tokens_beyond_source", None)
        if beyond is not None:  # each sentence has a limit of its own, with padding behind it
            limits = source_mask.sum(dim=1) + beyond
            counts = torch.minimum(counts, limits.repeat_interleave(config.num_return_sequences))
        return counts, ended.tolist()

    def _scores(
        self, inputs: dict[str, torch.Tensor], sequences: torch.Tensor, counts: torch.Tensor, settings: _Settings
    ) -> list[float]:
        """Score finished sequences with one pass of the model.

        `generate()` would return beam scores only together with every step's scores of the whole
        vocabulary, which take more memory than the model does, and none at all for greedy search.
        """
        returned = settings.returned
        alpha = settings.generation_config.length_penalty
        form: Any = getattr(settings.generation_config, "length_penalty_form", None) or "power"
        inputs = {name: tensor.repeat_interleave(returned, dim=0) for name, tensor in inputs.items()}
        decoder_inputs, labels = sequences[:, :-1], sequences[:, 1:]
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        rows = max(1, LOGITS_BUDGET // (labels.shape[1] * vocabulary))
        totals = []
        for start in range(0, len(sequences), rows):
            part = slice(start, start + rows)
            encoder_inputs = {name: tensor[part] for name, tensor in inputs.items()}
            logits = self.model(**encoder_inputs, decoder_input_ids=decoder_inputs[part], use_cache=False).logits
            log_probabilities = -torch.nn.functional.cross_entropy(
                logits.float().transpose(1, 2), labels[part], reduction="none"
            )
            places = torch.arange(labels.shape[1], device=labels.device)
            totals.append(log_probabilities.masked_fill(places >= counts[part, None], 0.0).sum(dim=1))
        scores = torch.cat(totals) / length_penalty(counts, 1.0 if alpha is None else alpha, form)
        return scores.tolist()

    def _warn_of_unfinished(self, unfinished: int, settings: _Settings) -> None:
        if unfinished:
            config = settings.generation_config
            beyond = getattr(config, "tokens_beyond_source", None)
            own = f", or {beyond} more than the source has," if beyond is not None else ""
            warnings.warn(
                f"{unfinished} {'sentence was' if unfinished == 1 else 'sentences were'} cut off at"
                f" {config.max_new_tokens} tokens{own or ','} before </s>: raise `max_new_tokens`"
                f"{' or `tokens_beyond_source`' if own else ''}, or look whether the model repeats itself.",
                stacklevel=3,
            )


def token_batches(lengths: dict[int, int], token_budget: int) -> Iterator[list[int]]:
    """Group sentences of similar length so that no group costs more than a budget.

    Args:
        lengths: For every sentence's number what one row of it costs: its tokens × its beams.
        token_budget: Largest sentences × longest of a group; a sentence above that gets a group of its own.

    Returns:
        An iterator of groups of numbers, the longest sentences first: what doesn't fit in memory fails at
        once.

    """
    batch: list[int] = []
    longest = 0
    for number in sorted(lengths, key=lambda number: -lengths[number]):
        if batch and longest * (len(batch) + 1) > token_budget:
            yield batch
            batch = []
        longest = longest if batch else lengths[number]
        batch.append(number)
    if batch:
        yield batch


def pad_sources(sources: Sequence[Sequence[int]], pad_token_id: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Make the input tensors of a batch, padded on the right.

    Args:
        sources: Token ids of every sentence.
        pad_token_id: What to fill up with.
        device: Where the tensors are to be.

    Returns:
        `input_ids` and `attention_mask`, both (batch, longest source).

    """
    longest = max(map(len, sources))
    filled = [[*source, *[pad_token_id] * (longest - len(source))] for source in sources]
    mask = [[1] * len(source) + [0] * (longest - len(source)) for source in sources]
    return {
        "input_ids": torch.tensor(filled, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }


def _checked_texts(texts: Sequence[str]) -> list[str]:
    if isinstance(texts, str):
        raise ValueError(f"`texts` must be a list of sentences, but is the string {texts!r} instead.")
    texts = list(texts)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"`texts[{index}]` must be a string, but is {type(text).__name__} instead.")
    return texts


def _check_positive(field: str, number: int) -> None:
    if number < 1:
        raise ValueError(f"`{field}` must be at least 1, but is {number} instead.")


def _is_unfinished(translations: list[Translation]) -> bool:
    return not all(translation.finished for translation in translations)
