"""Pipelines for translation and other text-to-text tasks: texts of any length, whose layout is kept.

After `import heedful`, call `pipeline("heed-translation", model=...)` or `pipeline("heed-text2text", model=...)`.
Without Heedful, call `pipeline(model=..., trust_remote_code=True)`: this file travels with every model. Marian, BART,
mBART, M2M100, NLLB (see `Languages`), and T5 with a `prefix` work too.

Letters in shape comments: B sentences in a batch, N translations of each, T tokens of the longest.
"""

import re
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import AutoTokenizer, GenerationConfig, GenerationMixin, PreTrainedTokenizerFast, TextStreamer
from transformers.dynamic_module_utils import custom_object_save
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.pipelines.base import ChunkPipeline

from .checksums_heed import TARGET_FOLDER, check_no_target, load_tokenizer, settle_target, write_checksums
from .configuration_base_heed import HEED_TYPES, TASK, TEXT_TASK, position_limit
from .generation_heed import DEFAULT_MAX_NEW_TOKENS, check_logits, check_strategy, check_weights, counted, with_check
from .sentences_heed import LINE_BREAK, joined_sentences, split_sentences
from .symbols_heed import UNKNOWN, check_are_several, checked_texts, decoded, trimmed, unknown_id, unknown_symbol

# A call's arguments for the source; generation needs the target's language too.
SOURCE_ARGUMENTS = ("src_lang", "tgt_lang", "prefix", "split_sentences", "max_source_tokens")
# Arguments that depend on the order of rows, so that a list is not sorted.
ROW_ARGUMENTS = {"streamer", "prefix_allowed_tokens_fn", "custom_generate", "logits_processor", "stopping_criteria"}
# Arguments of `generate()` besides its config's fields; the pipeline sets the others, and `OWN_FIELDS`.
GENERATE_ARGUMENTS = set(signature(GenerationMixin.generate).parameters) - {"self", "inputs", "synced_gpus", "kwargs"}
OWN_FIELDS = {"output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate"}

CODE = r"([a-z]{2,3}_[A-Z][A-Za-z]{1,3})"  # language and script or country


@dataclass(frozen=True)
class Piece:
    """A separately translated part of a text, and the white space after it."""

    text: str
    space: str = ""


class Languages:
    """How a checkpoint selects its languages, if it has several: by tags or by codes; both are token ids.

    A target language's tag precedes the source: Heed's `<2de>`, Marian's `>>deu<<`. With codes the tokenizer marks the
    source's language, and the decoder begins with the target's code: M2M100, NLLB, mBART.
    """

    def __init__(self, tokenizer: Any, model: Any):
        added = {str(token): number for token, number in tokenizer.added_tokens_encoder.items()}
        tags = _languages_in(added, r"<2([A-Za-z0-9_-]+)>") or _languages_in(tokenizer.get_vocab(), r">>(.+)<<")
        self.tags = dict(sorted(tags.items(), key=lambda tag: tag[1]))
        self.codes: dict[str, int] = {}
        if not tags and isinstance(getattr(tokenizer, "src_lang", None), str):
            self.codes = getattr(tokenizer, "lang_code_to_id", None) or _languages_in(added, CODE)
        self.known = tuple(self.tags or self.codes)  # languages that a call may name
        self._names = ", ".join(self.known)
        codes = {*self.codes.values()}
        # mBART25 starts the decoder with the language itself.
        starts = getattr(model.config, "decoder_start_token_id", None) in codes
        self.option = "decoder_start_token_id" if starts else "forced_bos_token_id"
        self.has_default = getattr(model.generation_config, self.option) in codes
        # The source's first or last id is its language.
        self.place = 0 if codes and tokenizer("")["input_ids"][0] in codes else -1

    def check(self, src_lang: str | None, tgt_lang: str | None) -> None:
        """Raise a `ValueError` for a language that is unknown or would be ignored."""
        if src_lang is not None and self.tags:
            must = f"`src_lang` must be None for this model, which selects only its target language ({self._names})"
            raise ValueError(f"{must}, but is {src_lang!r} instead.")
        for name, language in (("src_lang", src_lang), ("tgt_lang", tgt_lang)):
            if language is not None and language not in self.known:
                known = self._names or "none: it has one direction"
                raise ValueError(f"`{name}` must be a language of the model ({known}), but is {language!r} instead.")

    def encode(self, tokenizer: Any, text: str, src_lang: str | None, tgt_lang: str | None) -> list[int]:
        """Encode a source text, without truncation; a missing target language is a `ValueError`."""
        if tgt_lang is None and len(self.known) > 1 and not self.has_default:
            raise ValueError(f"`tgt_lang` must be one of {self._names}, but is None instead.")
        try:
            ids = tokenizer(text, truncation=False, verbose=False)["input_ids"]
        except Exception as error:  # the error from `tokenizers` does not name the symbol
            unknown = unknown_symbol(tokenizer, "text", [text])
            raise unknown.at(repr(text[:40])) if unknown else error from None
        if src_lang is not None:  # other threads use the tokenizer, so its language stays
            ids[self.place] = self.codes[src_lang]
        return [self.tags[tgt_lang], *ids] if self.tags and tgt_lang else ids  # in a text, a tag is plain text


def _languages_in(vocabulary: dict[str, int], pattern: str) -> dict[str, int]:
    """Return token ids by language, the first group of a pattern that the token matches."""
    return {match[1]: number for token, number in vocabulary.items() if (match := re.fullmatch(pattern, token))}


class HeedTranslationPipeline(ChunkPipeline):
    """Translates texts with any encoder-decoder of transformers.

    Line breaks, empty lines and the space between sentences stay. A line that is too long for the model is translated
    sentence by sentence; a sentence that is too long is an error. A translation that is cut off gives a warning.

    Args:
        model: The model, or for `pipeline()` its folder or its id on the Hub.
        tokenizer: The source's tokenizer.
        target_tokenizer: The target's; by default the saved one (`target_tokenizer`), else `tokenizer`.
        kwargs: Arguments of `transformers.pipeline`, and defaults for a call's arguments.

    Raises:
        ValueError: If the model is no encoder-decoder that generates, or its weights or tokenizers are wrong.
        OSError: If the source's tokenizer belongs to a pair whose target tokenizer is missing.
    """

    task_id, text_key, unit = TASK, "translation_text", "sentence"
    _load_tokenizer = True
    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False

    def __init__(self, model: Any, tokenizer: Any = None, target_tokenizer: Any = None, **kwargs: Any):
        if tokenizer is None:
            raise ValueError("`tokenizer` must be given with a model that is already loaded, but is None.")
        if not (model.config.is_encoder_decoder and model.can_generate()):
            must = "`model` must be an encoder-decoder with `generate()`"
            raise ValueError(f"{must}, but is {type(model).__name__} instead.")
        check_weights(model)
        self.target_tokenizer = _target_tokenizer(model, tokenizer, target_tokenizer)
        _check_tokenizers(model, tokenizer, self.target_tokenizer)
        self.languages = Languages(tokenizer, model)
        self.defaults = frozenset(kwargs)
        super().__init__(model=model, tokenizer=tokenizer, **kwargs)
        self.model.eval()

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        """Translate one text, or a list, iterator or dataset of texts.

        Args:
            inputs: One text, a list, or an iterable (generator, file, `KeyDataset`), used at most one batch ahead.
            kwargs:
                src_lang, tgt_lang: Languages, if the model has several, in its own codes: `de` (Heed), `deu_Latn`
                    (NLLB), `de_DE` (mBART), `deu` (Marian).
                prefix: Text put before every source.
                split_sentences: Whether each sentence is translated separately. By default only lines longer than
                    `max_source_tokens` are split. False gives the model the whole text, with line breaks.
                max_source_tokens: Longest source in tokens; by default the model's number of positions.
                return_scores: Whether every translation has a `score`.
                batch_size: Number of sentences translated at once; in float32 results do not depend on it.
                num_beams, max_new_tokens, …: As in `generate()`. A `streamer` gets a text's sentences as one stream.

        Returns:
            For a text a list of `num_return_sequences` dictionaries, best first, with `translation_text` and, with
            `return_scores`, `score`: the `sequences_scores` of `generate()` over all tokens (`None` for blank texts).
            The second translation joins each sentence's second. For a list a list of dictionaries, or of such lists if
            `num_return_sequences` is above 1; for other inputs an iterator of the same.

        Raises:
            ValueError: For an unknown language, setting or symbol, or a sentence longer than the model takes.
        """
        if isinstance(inputs, str):
            return super().__call__(inputs, **kwargs)
        if isinstance(inputs, list | tuple):
            texts, order = checked_texts(inputs, "inputs"), list(range(len(inputs)))
            if not ROW_ARGUMENTS & {*self.defaults, *kwargs}:  # texts of similar length share a batch
                order.sort(key=lambda number: -len(texts[number]))
            translated = super().__call__([texts[number] for number in order], **kwargs) if texts else []
            results = dict(zip(order, map(_one_or_all, translated), strict=True))
            return [results[number] for number in range(len(texts))]
        # transformers consumes generators lazily, but not other iterators.
        check_are_several(inputs, "inputs")
        stream = inputs if isinstance(inputs, Dataset) else (text for text in inputs)
        return map(_one_or_all, super().__call__(stream, **kwargs))

    def _sanitize_parameters(self, **parameters: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Sort a call's arguments into those for the source, for `generate()` and for the results."""
        self.languages.check(parameters.get("src_lang"), parameters.get("tgt_lang"))
        limit = parameters.get("max_source_tokens")
        if limit is not None and limit < 1:
            raise ValueError(f"`max_source_tokens` must be at least 1, but is {limit} instead.")
        fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
        known = {*SOURCE_ARGUMENTS, "return_scores", *GENERATE_ARGUMENTS, *fields} - OWN_FIELDS
        for name in (name for name in parameters if name not in known):
            nearest = get_close_matches(name, known, n=1)
            hint = f"; did you mean `{nearest[0]}`?" if nearest else "."
            raise ValueError(f"`{name}` must be a setting of the pipeline or of `generate()`, but is not{hint}")
        check_strategy(parameters)
        source = {name: value for name, value in parameters.items() if name in SOURCE_ARGUMENTS}
        target = {name: value for name, value in parameters.items() if name == "tgt_lang" or name not in source}
        return source, target, {name: value for name, value in parameters.items() if name == "return_scores"}

    def preprocess(
        self,
        text: str,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        prefix: str | None = None,
        split_sentences: bool | None = None,
        max_source_tokens: int | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Yield a text's pieces as model inputs, `(1, T)`."""

        def encode(sentence: str) -> list[int]:
            return self.languages.encode(self.tokenizer, (prefix or "") + sentence, src_lang, tgt_lang)

        hard = min(filter(None, (max_source_tokens, position_limit(self.model.config))), default=None)
        # Few models were trained on longer texts, even if their positions have no limit.
        soft = hard or getattr(self.model.config, "max_position_embeddings", None) or self.tokenizer.model_max_length
        whole = [Piece(*map(trimmed, checked_texts([text], "inputs")))]
        pieces = whole if split_sentences is False else self._pieces(text, encode, split_sentences, soft)
        for number, piece in enumerate(pieces):
            ids = encode(piece.text)
            if hard is not None and len(ids) > hard and piece.text:
                must = f"A {self.unit} must have at most {hard} tokens"
                raise ValueError(f"{must}, but {piece.text[:40]!r}… has {len(ids)} instead: shorten it, or split it.")
            inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
            yield {**inputs, "piece": piece, "is_last": number == len(pieces) - 1}

    def _pieces(self, text: str, encode: Callable[[str], list[int]], split: bool | None, limit: int) -> list[Piece]:
        """Split a text at line breaks, and between sentences if requested or needed."""
        found: list[list[str]] = [[""]]  # a sentence, and the parts of the space after it
        parts = LINE_BREAK.split(text)
        for line, line_break in zip(parts[::2], [*parts[1::2], ""], strict=True):
            sentences = split_sentences(line, keeps_markup=bool(split))
            stripped = line.strip()
            if not split and len(sentences) > 1 and len(encode(stripped)) <= limit:
                start = line.index(stripped)
                sentences = [("", line[:start]), (stripped, line[start + len(stripped) :])]
            for sentence, space in [*sentences, ("", line_break)]:
                if trimmed(sentence):
                    found.append([sentence, space])
                else:  # without text it belongs to the white space before
                    found[-1] += sentence, space
        pieces = [Piece(sentence, "".join(spaces)) for sentence, *spaces in found]
        return pieces if pieces[0].space or len(pieces) == 1 else pieces[1:]

    def _forward(
        self, model_inputs: Any, tgt_lang: str | None = None, return_scores: bool = False, **options: Any
    ) -> dict[str, Any]:
        """Generate `sequences` (B, N, T) without the decoder's start, and each row's length, score and end."""
        passed = {name: model_inputs.pop(name) for name in ("piece", "is_last")}
        is_batch = isinstance(passed["piece"], list)
        pieces, is_last = passed.values() if is_batch else ([value] for value in passed.values())
        if self.languages.codes and tgt_lang:
            options = {self.languages.option: self.languages.codes[tgt_lang], **options}
        if all(self._setting(options, name) is None for name in ("max_new_tokens", "max_length")):
            options["max_new_tokens"] = min(filter(None, (DEFAULT_MAX_NEW_TOKENS, position_limit(self.model.config))))
        penalty, stops = self._setting(options, "length_penalty"), self._setting(options, "stop_strings")
        penalty = 1.0 if penalty is None else float(penalty)
        is_streamed = options.get("streamer") is not None
        if is_streamed:
            if is_batch:
                raise ValueError("`batch_size` must be 1 with a `streamer`, but is more instead.")
            options["streamer"] = _OneStream(options["streamer"], pieces[0].space, is_last[0])
        rows = [number for number, piece in enumerate(pieces) if piece.text]
        blank = [number for number, piece in enumerate(pieces) if not piece.text]
        if not is_streamed and ROW_ARGUMENTS & options.keys():
            rows = [*range(len(pieces))]  # or a blank text would change later rows' numbers
        if stops is not None:  # a strategy gets no `tokenizer`
            criteria = [*(options.get("stopping_criteria") or ()), StopStringCriteria(self.target_tokenizer, stops)]
            options |= {"stop_strings": None, "stopping_criteria": StoppingCriteriaList(criteria)}
        size, filled = (len(pieces), self._setting(options, "num_return_sequences") or 1, 0), {}
        if rows:
            inputs = {name: tensor[rows] for name, tensor in model_inputs.items()}
            # Heedful's strategies always return sequence scores, and some keep no step scores.
            is_ours = str(getattr(options.get("custom_generate"), "__module__", None)).startswith("heedful.")
            options |= {"return_dict_in_generate": True, "output_scores": return_scores and not is_ours}
            options["logits_processor"] = with_check(self.model, options.get("logits_processor"))
            output: Any = self.model.generate(**inputs, **options)  # type: ignore[operator]
            generated = output.sequences[:, 1:]  # (B·N, T)
            ends = self._setting(options, "eos_token_id")
            counts, finished = counted(generated, ends, stops, self.target_tokenizer)
            filled = {"sequences": generated, "counts": counts, "finished": finished}
            if return_scores:
                filled["scores"] = _log_probabilities(output, counts, penalty)
                check_logits(filled["scores"], self.model.dtype)
            size = (len(pieces), len(generated) // len(rows), generated.shape[1])  # a strategy may choose among them
        elif is_streamed:
            options["streamer"].end()
        result = {"sequences": torch.zeros(size, dtype=torch.long), "counts": torch.zeros(size[:2], dtype=torch.long)}
        result |= {"finished": torch.ones(size[:2], dtype=torch.bool), "scores": torch.zeros(size[:2])}
        for name, tensor in filled.items():
            result[name][rows] = tensor.view(len(rows), *size[1:2], *tensor.shape[1:]).to(result[name])
        result["counts"][blank], result["scores"][blank], result["finished"][blank] = 0, 0.0, True
        return result | passed | {"penalty": torch.full((len(pieces),), penalty)}

    def _setting(self, options: dict[str, Any], name: str) -> Any:
        """Return a setting as `generate()` chooses it: from the call, its generation config, or the model."""
        own = options[name] if name in options else getattr(options.get("generation_config"), name, None)
        return getattr(self.model.generation_config, name, None) if own is None and name not in options else own

    def postprocess(self, model_outputs: Any, return_scores: bool = False) -> list[dict[str, Any]]:
        """Join the pieces' translations."""
        results, unknown = [], 0
        for rank in range(min(output["counts"].shape[1] for output in model_outputs)):
            text = between = ""
            for output in model_outputs:
                ids = output["sequences"][0, rank, : output["counts"][0, rank]].tolist()
                found = unicodedata.normalize("NFC", decoded(self.target_tokenizer, ids))  # composes jamo
                found = found.strip() if len(model_outputs) > 1 else found
                text, between = joined_sentences(text, found, between) + output["piece"].space, output["piece"].space
                unknown += unknown_id(self.target_tokenizer) in ids
            results.append({self.text_key: text})
            if return_scores:
                tokens = sum(int(output["counts"][0, rank]) for output in model_outputs)
                total = sum(float(output["scores"][0, rank]) for output in model_outputs)
                results[-1]["score"] = total / tokens ** float(model_outputs[0]["penalty"]) if tokens else None
        if unknown:
            warnings.warn(f"{unknown} of this text's outputs have {UNKNOWN}.", stacklevel=2)
        unfinished = sum(not bool(output["finished"].all()) for output in model_outputs)
        if unfinished:
            longest = max(int(output["counts"].max()) for output in model_outputs)
            count = f"{unfinished} {self.unit}{' was' if unfinished == 1 else 's were'}"
            cure = "raise `max_new_tokens`, or check whether the model repeats itself"
            warnings.warn(f"{count} cut off at {longest} tokens: {cure}.", stacklevel=2)
        return results

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Save the model (`kwargs` are for its `save_pretrained`), both tokenizers and this file."""
        folder, is_joint = Path(save_directory), self.target_tokenizer is self.tokenizer
        folder.mkdir(parents=True, exist_ok=True)
        self.model.config.custom_pipelines = pipelines_of_folder(self.task_id)
        custom_object_save(self, folder)
        self.model.save_pretrained(folder, **kwargs)
        self.tokenizer.save_pretrained(folder)
        if not is_joint:
            self.target_tokenizer.save_pretrained(folder / TARGET_FOLDER)
        settle_target(folder, is_joint)
        write_checksums(folder, "tokenizer")


class HeedText2TextPipeline(HeedTranslationPipeline):
    """A `HeedTranslationPipeline` for other tasks than translation: spelling to pronunciation, commands to actions.

    Each text is one input, with its line breaks, unless `split_sentences` is given.
    """

    task_id, text_key, unit = TEXT_TASK, "generated_text", "text"

    def preprocess(self, text: str, split_sentences: bool = False, **options: Any) -> Iterator[dict[str, Any]]:
        """Yield a text, or its pieces, as model inputs, `(1, T)`."""
        return super().preprocess(text, split_sentences=split_sentences, **options)


def pipelines_of_folder(task: str | None) -> dict[str, Any]:
    """Return the `custom_pipelines` in a folder's config.json, by default for translation."""
    pipeline = HeedText2TextPipeline if task == TEXT_TASK else HeedTranslationPipeline
    return {pipeline.task_id: {"impl": f"pipeline_heed.{pipeline.__name__}", "pt": ["AutoModelForSeq2SeqLM"]}}


class _OneStream:
    """Gives a streamer one text's sentences as one stream, with the white space between them."""

    def __init__(self, streamer: Any, space: str, is_last: bool):
        self.streamer, self.space, self.is_last = streamer, space, is_last
        self.put = streamer.put

    def end(self) -> None:
        """End the stream after the last sentence; after another one, flush a `TextStreamer`."""
        streamer = self.streamer
        if self.is_last:
            streamer.end()
        elif isinstance(streamer, TextStreamer):
            # As in its own `end`, but the text goes on.
            held = str(streamer.tokenizer.decode(streamer.token_cache, **streamer.decode_kwargs))[streamer.print_len :]
            streamer.token_cache, streamer.print_len, streamer.next_tokens_are_prompt = [], 0, True
            streamer.on_finalized_text(held + self.space)


def _log_probabilities(output: Any, counts: torch.Tensor, penalty: float) -> torch.Tensor:
    """Return the log-probability of each sequence with its end, (B·N)."""
    if getattr(output, "sequences_scores", None) is not None:
        return torch.as_tensor(output.sequences_scores * counts**penalty)
    total = torch.zeros(len(counts), device=counts.device)
    # Step by step: together they would be the largest tensor.
    for step, scores in enumerate(output.scores):
        chosen = output.sequences[:, -len(output.scores) :][:, step, None]
        step_scores = scores.float().log_softmax(dim=-1).gather(1, chosen)[:, 0]
        total += step_scores.masked_fill(step >= counts, 0.0)
    return total


def _one_or_all(result: list[dict[str, Any]]) -> Any:
    return result[0] if len(result) == 1 else result


def _target_tokenizer(model: Any, tokenizer: Any, given: Any) -> Any:
    """Return the target's tokenizer: the given one, the one in the model's folder or repository, or the source's."""
    way = "with `AutoTokenizer.from_pretrained(…, trust_remote_code=True)` and pass it as `target_tokenizer`"
    if given is not None:
        is_name = isinstance(given, str | Path)
        return load_tokenizer(AutoTokenizer, given, way, trust_remote_code=False) if is_name else given
    name = model.config.name_or_path or tokenizer.name_or_path
    if model.config.model_type not in HEED_TYPES or not name or (Path(name).is_absolute() and not Path(name).is_dir()):
        return tokenizer
    # `pipeline(token=…)` passes it only to the model.
    access = getattr(model, "hub_access", None)
    options: dict[str, Any] = {key: getattr(access, key, None) for key in ("revision", "token")}
    options["subfolder"] = TARGET_FOLDER
    if not (settings := get_tokenizer_config(name, **options)):
        if TARGET_FOLDER in tokenizer.init_kwargs:
            raise FileNotFoundError(f"{name} must hold the target's tokenizer in `{TARGET_FOLDER}`, but does not.")
        return tokenizer
    if TARGET_FOLDER not in {**tokenizer.init_kwargs, **get_tokenizer_config(name, **options | {"subfolder": ""})}:
        check_no_target(name, is_there=True)
    # By its class: AutoTokenizer would first look for the folder's model.
    ours = settings.get("tokenizer_class") == "PreTrainedTokenizerFast"
    loader: Any = PreTrainedTokenizerFast if ours else AutoTokenizer
    return load_tokenizer(loader, name, way, trust_remote_code=False, **options)


def _check_tokenizers(model: Any, source: Any, target: Any) -> None:
    """Raise a `ValueError` with each mismatch between the tokenizers and the model's config."""
    config, wrong = model.config, []
    sizes = (config.vocab_size, config.decoder_vocab_size) if config.model_type in HEED_TYPES else (None, None)
    for side, tokenizer, size in zip(("tokenizer", "target_tokenizer"), (source, target), sizes, strict=True):
        facts = [
            (f"`{name}`", getattr(config, name), getattr(tokenizer, name)) for name in ("pad_token_id", "eos_token_id")
        ]
        for what, expected, found in [*facts, ("number of tokens", size, len(tokenizer))]:
            if expected is not None and found not in (expected if isinstance(expected, list) else [expected]):
                wrong.append(f"The {what} of the `{side}` must be {expected}, but is {found} instead.")
    if wrong:
        raise ValueError("The tokenizers do not fit the model's config: " + " ".join(wrong))
