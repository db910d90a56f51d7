"""Text in, translations out: sorted by length and batched by tokens inside, in the given order outside.

What a sentence becomes does not depend on the sentences beside it, nor on `token_budget`: every length limit is a
constant of the model or of the call.
"""

import copy
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import torch

from heedful.configuration_base_heed import position_limit
from heedful.data.tokenization import TokenizerPair
from heedful.files import check_at_least
from heedful.generation_heed import DEFAULT_MAX_NEW_TOKENS, TRANSFORMERS_DEFAULT_LENGTH
from heedful.inference.ctranslate2.engine import ComputeType, CTranslate2Engine, ExportedModel, is_exported_folder
from heedful.inference.ctranslate2.engine import check_settings as check_ctranslate2_settings
from heedful.inference.ctranslate2.specification import positions_of_table
from heedful.inference.engines import Engine, GenerateEngine, Hypothesis, NativeEngine
from heedful.inference.loading import adapted_model, first_line, is_adapter, load_model, model_folder, resolve_device
from heedful.inference.native.decoder import settings_obstacle
from heedful.inference.native.network import obstacle
from heedful.inference.native.weights import Precision

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


@dataclass(frozen=True)
class _Request:
    """What one call of `translate` asks for, checked and with its defaults filled in."""

    generation_config: "GenerationConfig"
    target_language: str | None
    token_budget: int


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
        precision: Of the native decoder: `float32`, `bfloat16` or `int8`; of CTranslate2 any type that it knows.

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
    ):
        tokenizers.check_config(model.config)
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
        target = resolve_device(device)
        folder = model_folder(folder, revision)
        model: Any
        if is_exported_folder(folder):
            compute_type: Any = None if precision == "float32" else precision
            model = ExportedModel(folder, target, compute_type)
        else:
            model = load_model(folder).to(target)  # type: ignore[arg-type]
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
        early_stopping: bool | None = None,
        token_budget: int = 8192,
    ) -> list[list[Translation]]:
        """Translate sentences.

        An empty or blank sentence gives empty translations without asking the model. One warning says how many
        sentences reached the length limit before </s>; their `Translation.finished` is False. With `do_sample` in the
        model's generation config, results are random and depend on the batch.

        Args:
            texts: Sentences.
            num_beams: Width of beam search, 1 for greedy search; None takes the model's generation config.
            num_return_sequences: Translations per sentence, best first; at most `num_beams` unless sampling.
            target_language: Language to translate into, where the tokenizers know several.
            max_new_tokens: Longest translation in tokens. None takes the generation config's `max_new_tokens` or
                `max_length`, and 256 where it sets none (or transformers' 20), within what learned positions allow.
            early_stopping: Whether beam search ends with its `num_beams`-th finished hypothesis; None takes the
                model's generation config.
            token_budget: Padded source tokens × beams of one batch; a sentence longer than that runs alone.

        Returns:
            For every sentence its `num_return_sequences` translations, in the order of `texts`.

        Raises:
            ValueError: If a setting is out of range, or a sentence is longer than the model's learned positions.
        """
        request = self._request(
            num_beams, num_return_sequences, target_language, max_new_tokens, early_stopping, token_budget
        )
        results = self._translate(_checked_texts(texts), request, first_number=1)
        self._warn_of_unfinished(sum(map(_is_unfinished, results)), request)
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
            An iterator with one list of translations per line, in order. The warning about the length limit comes
            once, at its end.

        Raises:
            ValueError: As `translate` does; sentences are numbered through the whole stream.
        """
        check_at_least(1, chunk_size=chunk_size)
        defaults: dict[str, Any] = self.translate.__kwdefaults__ or {}
        for name in settings:
            if name not in defaults:
                raise ValueError(f"`{name}` must be a keyword of `translate`, but is not.")
        return self._stream(lines, chunk_size, self._request(**defaults | settings))

    def __getstate__(self) -> dict[str, Any]:
        # Copied weights cannot be sent to another process, which makes its own copies.
        return self.__dict__ | {"_engines": {}}

    def _stream(self, lines: Iterable[str], chunk_size: int, request: _Request) -> Iterator[list[Translation]]:
        stream, number, unfinished = iter(lines), 1, 0
        try:
            while chunk := [line.rstrip("\r\n") for line in islice(stream, chunk_size)]:
                results = self._translate(chunk, request, first_number=number)
                unfinished += sum(map(_is_unfinished, results))
                number += len(chunk)
                yield from results
        finally:
            self._warn_of_unfinished(unfinished, request)

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
        config.max_new_tokens, config.max_length = self._length_bound(max_new_tokens), None
        config.return_dict_in_generate = False
        config.output_scores = config.output_attentions = config.output_hidden_states = False
        if early_stopping is not None and config.num_beams > 1:
            config.early_stopping = early_stopping
        if self.engine == "ctranslate2":
            check_ctranslate2_settings(config, self.model.config)
        return _Request(config, target_language, token_budget)

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
        elif config.max_length is not None and config.max_length != TRANSFORMERS_DEFAULT_LENGTH:
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
                engine = GenerateEngine(self.model)
            self._engines[name] = engine
        return engine

    def _translate(self, texts: list[str], request: _Request, first_number: int) -> list[list[Translation]]:
        config = request.generation_config
        results = [[Translation()] * config.num_return_sequences for _ in texts]
        filled = [index for index, text in enumerate(texts) if text.strip()]
        sources = self.tokenizers.encode_source([texts[index] for index in filled], request.target_language)
        positions = self._positions()
        for index, source in zip(filled, sources, strict=True):
            if positions is not None and len(source) > positions:
                raise ValueError(
                    f"Sentence {first_number + index} must have at most {positions} tokens, the model's number of"
                    f" positions, but has {len(source)} instead."
                )
        if not sources:
            return results
        found = self._engine(config).search(sources, config, request.token_budget)
        decoded = iter(self.tokenizers.decode_target([one.token_ids for row in found for one in row]))
        for index, row in zip(filled, found, strict=True):
            results[index] = [Translation(one.token_ids, one.score, one.finished, next(decoded)) for one in row]
        return results

    def _warn_of_unfinished(self, unfinished: int, request: _Request) -> None:
        if unfinished:
            config = request.generation_config
            beyond = getattr(config, "tokens_beyond_source", None)
            own = f", or {beyond} more than the source has," if beyond is not None else ""
            warnings.warn(
                f"{unfinished} {'sentence was' if unfinished == 1 else 'sentences were'} cut off at"
                f" {config.max_new_tokens} tokens{own or ','} before </s>: raise `max_new_tokens`"
                f"{' or `tokens_beyond_source`' if own else ''}, or look whether the model repeats itself.",
                stacklevel=3,
            )


def _checked_texts(texts: Sequence[str]) -> list[str]:
    if isinstance(texts, str):
        raise ValueError(f"`texts` must be a list of sentences, but is the string {texts!r} instead.")
    texts = list(texts)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"`texts[{index}]` must be a string, but is {type(text).__name__} instead.")
    return texts


def _is_unfinished(translations: list[Translation]) -> bool:
    return not all(translation.finished for translation in translations)
