"""Text in, translations out. In float32, outputs do not depend on other sentences or `token_budget`."""

import copy
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Self, get_args

import torch
from transformers import GenerationConfig

from heedful.configuration_base_heed import TEXT_TASK, position_limit
from heedful.data.glossary import Glossary
from heedful.data.tokenization import TokenizerPair
from heedful.decoding.documents import Documents, Found, Rows
from heedful.decoding.engines import EngineName, GenerateEngine, Progress, Translation, ignored
from heedful.decoding.loading import load_model, load_tokenizers, model_folder, resolve_device
from heedful.decoding.markup import MarkedParagraphs
from heedful.decoding.native.engine import NativeEngine, may_replace
from heedful.decoding.native.kernels import Precision
from heedful.decoding.paragraphs import Paragraphs
from heedful.decoding.scoring import PairScore, score_stream
from heedful.decoding.search_settings import LONGEST_SOURCE, MOST_SOURCE_TOKENS
from heedful.decoding.strategies.sampling import SeededSampling
from heedful.files import check_at_least
from heedful.generation_heed import DEFAULT_MAX_NEW_TOKENS
from heedful.messages_heed import wrong
from heedful.protocols import Seq2SeqModel
from heedful.sentences_heed import LINE_BREAK
from heedful.symbols_heed import UNKNOWN, check_are_several, checked_texts, naming_the_line, trimmed, unknown_id

FORCED_BEAMS = 5  # at least, for a search with forced words


@dataclass(frozen=True)
class Search:
    """One call's checked settings, with defaults."""

    config: GenerationConfig
    token_budget: int
    target_language: str | None = None
    positions: int | None = None  # most tokens in a sequence
    trained: int | None = None  # longest source in training, in tokens, if known
    split: bool | None = False
    every_line: bool = False
    documents: Documents | None = None
    markup: MarkedParagraphs | None = None
    keep_going: bool = False
    sampling: SeededSampling | None = None
    progress: Progress = ignored


@dataclass
class Tally:
    """One call's counts, for its warnings at the end."""

    search: Search
    paragraphs: Paragraphs | None = None  # if lines may be split
    unfinished: int = 0
    unknown: int = 0
    texts: dict[tuple[int, int], str] = field(default_factory=dict)  # of rows, for a glossary
    missing: int = 0  # a glossary's terms
    long: list[tuple[int, int]] = field(default_factory=list)  # number and tokens
    skipped: list[tuple[int, int]] = field(default_factory=list)

    def keeps(self, number: int, *sides: Sequence[int]) -> bool:
        """Return whether a sentence or pair is short enough, and record a long one."""
        positions, trained = self.search.positions, self.search.trained
        most, tokens = positions or max(MOST_SOURCE_TOKENS, trained or 0), max(map(len, sides))
        if tokens > most and not self.search.keep_going:
            whose = "the model's number of positions" if positions else "because more take too much memory"
            raise ValueError(f"Sentence {number} must have at most {most} tokens, {whose}, but has {tokens} instead.")
        if tokens > most:
            self.skipped.append((number, tokens))
        elif trained is not None and len(sides[0]) > trained:
            self.long.append((number, len(sides[0])))
        return tokens <= most

    def warn(self, done: str = "translated") -> None:
        """Warn once per kind, at the caller of the translator's method."""
        if self.unfinished:
            were, limit = "output was" if self.unfinished == 1 else "outputs were", "`max_new_tokens`"
            at = f"{self.search.config.max_new_tokens} tokens"
            if (beyond := getattr(self.search.config, "tokens_beyond_source", None)) is not None:
                at, limit = f"{at}, or {beyond} beyond the source length,", f"{limit} or `tokens_beyond_source`"
            cure = f"raise {limit}, or check whether the model repeats itself"
            warnings.warn(f"{self.unfinished} {were} cut off at {at} before </s>: {cure}.", stacklevel=3)
        if self.search.markup is not None:
            self.search.markup.end()
        if self.unknown:
            have = "output has" if self.unknown == 1 else "outputs have"
            warnings.warn(f"{self.unknown} {have} {UNKNOWN}.", stacklevel=3)
        if (documents := self.search.documents) is not None and documents.unmatched:
            why = "with context, the output has other separators or is cut off"
            warnings.warn(f"Sentences translated without context: {documents.unmatched} ({why}).", stacklevel=3)
        if self.missing:
            warnings.warn(f"Glossary terms that are not in the output: {self.missing}.", stacklevel=3)
        if self.long:
            result = "scored too low" if done == "scored" else "translated in part or wrongly"
            if done == "translated" and not self.search.split:
                result += ": `split` (of `translate_lines`, `--split`) splits them"
            learned = f"the {self.search.trained} tokens of the longest training source"
            warnings.warn(f"{_counted(self.long)} longer than {learned}, and may be {result}.", stacklevel=3)
        if self.skipped:
            warnings.warn(f"{_counted(self.skipped)} too long to be {done}, and left empty.", stacklevel=3)


class Translator:
    """Translate with a sequence-to-sequence model and its tokenizers.

    Args:
        model: A Heed model, or another transformers encoder-decoder with `generate()`, on its device.
        tokenizers: The pair that the model was trained with.
        engine: `generate` is `model.generate()`; `native` is Heed's own decoder for the CPU, several times as fast,
            with the same tokens in float32. `auto` uses the native decoder if it supports model and settings.
        precision: Weight type of the native decoder, `float32` or `int8`.
        ensemble: Further models with these tokenizers. The mean of all probabilities chooses each token.
        glossary: File of terms to translate as given. They are marked in the sources for a model trained with
            `data.augmentation.terms`. A second search forces missing ones into the outputs.

    Raises:
        ValueError: If the tokenizers do not fit the model, the engine cannot run it, the precision is ignored, or
            the glossary is wrong.
    """

    def __init__(
        self,
        model: Seq2SeqModel,
        tokenizers: TokenizerPair,
        engine: EngineName = "auto",
        precision: Precision = "float32",
        ensemble: Sequence[Seq2SeqModel] = (),
        glossary: str | Path | None = None,
    ):
        if not isinstance(tokenizers, TokenizerPair):
            raise wrong("tokenizers", "be a `TokenizerPair`", f"a {type(tokenizers).__name__}")
        check_are_several(ensemble, "ensemble")
        for name, each in (("model", model), *(("ensemble", each) for each in ensemble)):
            if not callable(getattr(each, "generate", None)):
                raise wrong(name, "be loaded, with `generate()`", f"a {type(each).__name__}")
        tokenizers.check_config(model.config, model.generation_config)
        if engine not in get_args(EngineName):
            raise wrong("engine", f"be one of {', '.join(get_args(EngineName))}", repr(engine))
        if ensemble and engine not in ("auto", "generate"):
            raise wrong("engine", "be generate for an `ensemble`", engine)
        if ensemble:
            engine = "generate"
        elif engine == "auto" and precision != "float32":
            engine = "native"
        if engine == "generate" and precision != "float32":
            raise wrong("precision", "be float32 with the engine generate", repr(precision))
        self.model, self.tokenizers, self.ensemble = model, tokenizers, ensemble
        self.engine, self.precision = engine, precision
        self.glossary = None if glossary is None else Glossary(glossary, tokenizers)
        self._engines: dict[str, GenerateEngine] = {}
        if engine != "auto":
            self._current(engine)

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, device: str | torch.device | None = None, revision: str | None = None, **options: Any
    ) -> Self:
        """Load a model and its tokenizers from a folder or the Hub.

        Args:
            folder: A local folder with a model or a peft adapter (which is merged into its model), or a Hub id.
            device: "cpu", "cuda", "cuda:1", "mps"; None means CUDA if available, else the CPU.
            revision: Branch, tag or commit on the Hub.
            **options: `engine`, `precision`, `ensemble` and `glossary`, as in the constructor.

        Raises:
            FileNotFoundError: If the folder, its config or its weights are missing.
            ValueError: If a file or the device cannot be used, or the engine cannot run the model.
        """
        target, given = resolve_device(device), folder
        folder = model_folder(folder, revision)
        model = load_model(folder).to(target)
        return cls(model, load_tokenizers(folder, model, given), **options)

    def translate(
        self,
        texts: Sequence[str],
        *,
        num_beams: int | None = None,
        num_return_sequences: int = 1,
        target_language: str | None = None,
        max_new_tokens: int | None = None,
        token_budget: int = 8192,
        context: int = 0,
        markup: str | None = None,
    ) -> list[list[Translation]]:
        """Translate sentences.

        A blank sentence gives empty translations. A text's lines are translated one by one, and line breaks stay;
        `heed-text2text` models get the whole text. Warnings count the sentences that reached the length limit
        (`Translation.finished` is False), and those longer than any training source. With the generation config's
        `do_sample`, results are random and depend on the batch.

        Args:
            texts: Sentences.
            num_beams: Beam width, 1 for greedy search; None uses the model's generation config.
            num_return_sequences: Translations per sentence, best first; at most `num_beams` unless sampling.
            target_language: Language to translate into, if the tokenizers have several.
            max_new_tokens: Longest translation in tokens; None uses the generation config's limit, else 256.
            token_budget: Batch size in padded source tokens × beams; a longer sentence runs alone.
            context: Most texts before each that the model sees with it, if it was trained on documents; a blank text,
                or a text after a line break, begins a document. `score` is then that of all of them.
            markup: `html`, `xml`, `placeholders` (`%s`, `{name}`), or two: `html,placeholders`, `xml,placeholders`. A
                text is divided into sentences, and its tags go around the translations of their words.

        Returns:
            The `num_return_sequences` translations of each sentence, in the order of `texts`.

        Raises:
            ValueError: If a setting is out of range, markup is not well-formed, or a sentence exceeds the model's
                learned positions, or has more than 8,192 tokens although training had no such source, or the
                tokenizers have no `<sep>`.
        """
        options: Any = {"target_language": target_language, "token_budget": token_budget, "context": context}
        options["markup"] = markup
        tally = Tally(self._search(num_beams, num_return_sequences, max_new_tokens, **options))
        results = self._translate(checked_texts(texts), tally, first_number=1)
        tally.warn()
        return results

    def translate_lines(
        self,
        lines: Iterable[str] | Iterable[list[str]],
        *,
        chunk_size: int | None = 4096,
        split: bool | None = None,
        paragraphs: bool = False,
        keep_going: bool = False,
        sampling: SeededSampling | None = None,
        progress: Progress | None = None,
        **settings: Any,
    ) -> Iterator[list[Translation]]:
        """Translate a stream of lines, such as an open file, which need not fit in memory.

        Args:
            lines: Lines, with or without line ends; a byte order mark before the first is dropped.
            chunk_size: Lines to read and batch together; None if `lines` are lists of such lines.
            split: Whether to split lines longer than any training source into sentences. Their translations are
                joined, n-th best with n-th best, with the mean of the scores. None splits texts at line breaks, like
                `translate`; False gives the model each text as one sequence.
            paragraphs: Whether to split each line into sentences. White space, line ends, leading bullets or numbers,
                and lines without text (tags, addresses, front matter, code) stay. Table cells are translated singly.
            keep_going: Whether a too long sentence gives empty translations and a warning, not an error.
            sampling: Draws one translation per line, the same in every batch, instead of a search.
            progress: Called with the number of lines since the last call.
            **settings: Keyword arguments of `translate`.

        Returns:
            An iterator with a list of translations per line, in order. Warnings come once, at its end.

        Raises:
            ValueError: As `translate` does; sentences are numbered through the whole stream.
        """
        check_are_several(lines, "lines")
        check_at_least(1, chunk_size=chunk_size)
        defaults: dict[str, Any] = self.translate.__kwdefaults__ or {}
        for name in settings.keys() - defaults.keys():
            raise ValueError(f"`{name}` must be a keyword of `translate`, but is not.")
        if sampling is not None:
            settings["num_beams"] = settings.get("num_beams") or 1
        of_lines: Any = {"split": paragraphs or split, "keep_going": keep_going, "sampling": sampling}
        of_lines |= {"every_line": paragraphs, "progress": progress or ignored}
        return self._stream(lines, chunk_size, Tally(self._search(**defaults | settings, **of_lines)))

    def score_pairs(
        self,
        pairs: Iterable[tuple[str, str]],
        *,
        target_language: str | None = None,
        token_budget: int = 8192,
        chunk_size: int = 4096,
        keep_going: bool = False,
    ) -> Iterator[PairScore | None]:
        """Score given translations by the model's probability, from pairs that need not fit in memory.

        Padding changes a float32 score by less than 1e-5 per token; with a `token_budget` of 1 each pair runs alone.
        </s> is scored too. A warning counts the sources longer than any training source.

        Args:
            pairs: Sources and targets.
            target_language: The targets' language, if the tokenizers have several.
            token_budget: Padded tokens per batch, sources and targets; a longer pair runs alone.
            chunk_size: Pairs to read and batch together.
            keep_going: Whether a too long pair has no score and a warning, not an error.

        Returns:
            An iterator with a score per pair, in order; `None` for a too long one.

        Raises:
            ValueError: If a setting is out of range, a pair is not two texts or is too long, or the precision not
                float32.
        """
        check_are_several(pairs, "pairs")
        check_at_least(1, token_budget=token_budget, chunk_size=chunk_size)
        self.tokenizers.encode_source([""], target_language)  # raises before the first pair
        if self.precision != "float32" or self.ensemble:
            must = "`engine`, `precision` and `ensemble` must be left out, because the model itself scores pairs"
            given = f"{self.engine}, {self.precision} and {len(self.ensemble)} models"
            raise ValueError(f"{must}, but are {given} instead.")
        limits = position_limit(self.model.config), self._longest_trained()
        search = Search(self.model.generation_config, token_budget, target_language, *limits, keep_going=keep_going)
        return score_stream(self, pairs, chunk_size, Tally(search))

    def __getstate__(self) -> dict[str, Any]:
        # Each process packs the weights again.
        return self.__dict__ | {"_engines": {}}

    def _stream(self, lines: Iterable[Any], chunk_size: int | None, tally: Tally) -> Iterator[list[Translation]]:
        stream, number = iter(lines), 1
        for given in stream if chunk_size is None else iter(lambda: list(islice(stream, chunk_size)), []):
            chunk = checked_texts(given, "lines", number - 1)
            if number == 1 and chunk:
                chunk[0] = chunk[0].removeprefix("\ufeff")
            yield from self._translate(chunk, tally, first_number=number)
            number += len(chunk)
        tally.warn()

    def _search(
        self, num_beams: int | None, num_return_sequences: int, max_new_tokens: int | None, **options: Any
    ) -> Search:
        """Check a call's settings, and copy its search settings into a generation config."""
        offered = getattr(self.model.config, "custom_pipelines", None) or {}
        if options.setdefault("split", None) is None and next(iter(offered), None) == TEXT_TASK:
            options["split"] = False
        if (markup := options.get("markup")) is not None:
            if options["split"] or getattr(self.model.config, "attention", None) == "none":
                raise wrong("markup", "be left out with `split` or `paragraphs`, and without attention", markup)
            options["markup"] = MarkedParagraphs(markup)
        config = copy.deepcopy(self.model.generation_config)
        config.num_beams = num_beams if num_beams is not None else (config.num_beams or 1)
        config.num_return_sequences = num_return_sequences
        check_at_least(1, num_beams=config.num_beams, num_return_sequences=num_return_sequences)
        check_at_least(1, token_budget=options["token_budget"], max_new_tokens=max_new_tokens)
        check_at_least(0, context=(context := options.pop("context")))
        if num_return_sequences > config.num_beams and not config.do_sample:
            raise wrong("num_return_sequences", f"be at most `num_beams` ({config.num_beams})", num_return_sequences)
        if config.num_beams > (vocabulary := len(self.tokenizers.target)):
            must = f"be at most {vocabulary}, the number of tokens in the vocabulary"
            raise wrong("num_beams", must, config.num_beams)
        config.return_dict_in_generate = config.output_scores = config.output_logits = False
        config.output_attentions = config.output_hidden_states = False
        if (sampling := options.get("sampling")) is not None:
            sampling.prepare(config, options["split"])
        if self.engine != "auto":
            self._current(self.engine).check(config)
        positions = position_limit(self.model.config)
        bound = config.max_new_tokens if max_new_tokens is None else max_new_tokens
        if bound is None:  # `max_length` counts the start token
            bound = DEFAULT_MAX_NEW_TOKENS if config.max_length is None else config.max_length - 1
        if positions is not None and bound > positions and max_new_tokens is not None:
            raise wrong("max_new_tokens", f"be at most {positions}, the model's number of positions", max_new_tokens)
        config.max_new_tokens, config.max_length = bound if positions is None else min(bound, positions), None
        trained = self._longest_trained()
        documents = Documents(self.tokenizers, context, trained or MOST_SOURCE_TOKENS) if context else None
        return Search(config, positions=positions, trained=trained, documents=documents, **options)

    def _longest_trained(self) -> int | None:
        trained = getattr(self.model.generation_config, LONGEST_SOURCE, None)
        return trained or getattr(self.model.config, "max_position_embeddings", None)

    def _engine(self, config: GenerationConfig) -> GenerateEngine:
        if self.engine != "auto":
            return self._current(self.engine)
        if may_replace(self.model, config):
            try:
                return self._current("native")
            except ValueError as error:  # changed code always gives other logits
                warnings.warn(f"`generate()` translates instead of the native decoder. {error}", stacklevel=2)
                self.engine = "generate"
        return self._current("generate")

    def _current(self, name: str) -> GenerateEngine:
        engine = self._engines.get(name)
        if engine is None or not engine.is_current:
            self._engines.pop(name, None)
            del engine  # frees its weights before a new copy
            if name == "generate":
                engine = GenerateEngine(self.model, self.ensemble, self.tokenizers.target)
            else:
                engine = NativeEngine(self.model, self.precision)
            self._engines[name] = engine
        return engine

    def _translate(self, texts: list[str], tally: Tally, first_number: int) -> list[list[Translation]]:
        search = tally.search
        is_apart = search.split or (search.split is None and any(map(LINE_BREAK.search, map(trimmed, texts))))
        if tally.paragraphs is None:
            tally.paragraphs = search.markup or (Paragraphs(search.every_line) if is_apart else None)
        apart = tally.paragraphs
        rows = self._rows(list(enumerate(texts, start=first_number)), tally)
        own: dict[str, Any] = {} if apart or search.documents else {"progress": search.progress}  # a row for a text

        def searched(rows: Rows) -> Found:
            if (sampling := search.sampling) is not None:
                own["processors"] = lambda batch: sampling.processors([rows[index][0] for index in batch])
            engine, sources = self._engine(search.config), [row for *_, row in rows]
            return engine.search(sources, search.config, search.token_budget, **own) if rows else []

        begins = {number for number, text in enumerate(texts, start=first_number) if text[:1] == "\n"}
        lines = [tally.texts.pop(row[:2]) for row in rows] if self.glossary else []
        marked = self.glossary.marked(lines, rows, search.positions) if self.glossary else rows
        found = search.documents.search(marked, begins, searched) if search.documents else searched(marked)
        if self.glossary is not None:
            self._force_terms(self.glossary, lines, marked, found, tally)
        search.progress(len(texts) - (len(rows) if "progress" in own else 0))
        decoded = iter(self.tokenizers.decode_target([one.token_ids for row in found for one in row]))
        parts: defaultdict[int, dict[int, list[Translation]]] = defaultdict(dict)
        for (number, place, _), row in zip(rows, found, strict=True):
            parts[number][place] = [Translation(one.token_ids, one.score, one.finished, next(decoded)) for one in row]
        empty = [Translation()] * search.config.num_return_sequences
        if search.markup is not None:
            search.markup.put_back(self, rows, parts, empty, search.token_budget)
        join = apart.put_together if apart else lambda number, found, empty: found.get(0, empty)
        results = [join(number, parts[number], empty) for number, _ in enumerate(texts, start=first_number)]
        if self.glossary is not None:  # a forced word at the beginning has a space
            results = [[replace(one, text=one.text.lstrip(" ")) for one in ranked] for ranked in results]
        unknown = unknown_id(self.tokenizers.target)
        tally.unfinished += sum(not all(one.finished for one in row) for row in results)
        tally.unknown += sum(any(unknown in one.token_ids for one in row) for row in results)
        return results

    def _rows(self, texts: list[tuple[int, str]], tally: Tally) -> list[tuple[int, int, list[int]]]:
        """Encode numbered texts; each row has its text's number, and its place there."""
        apart, rows = tally.paragraphs, []
        if apart is None or not apart.every_line:
            rows = self._encoded([(number, 0, text) for number, text in texts], tally)
        if apart is not None:
            rows, parts = apart.divided(texts, rows, tally.search.trained if tally.search.split else None)
            rows += self._encoded(parts, tally)
        return [row for row in sorted(rows) if tally.keeps(row[0], row[2])]

    def _encoded(self, texts: list[tuple[int, int, str]], tally: Tally) -> list[tuple[int, int, list[int]]]:
        texts = [(number, place, text) for number, place, given in texts if (text := trimmed(given))]
        with naming_the_line([number for number, *_ in texts]):
            rows = self.tokenizers.encode_source([text for *_, text in texts], tally.search.target_language)
        if self.glossary is not None:
            tally.texts |= {each[:2]: each[2] for each in texts}
        return [(*each[:2], row) for each, row in zip(texts, rows, strict=True)]

    def _force_terms(self, glossary: Glossary, texts: list[str], rows: Rows, found: Found, tally: Tally) -> None:
        """Search again, with forced words, for outputs that lack terms. A forced word may become part of another."""
        config, engine = copy.deepcopy(tally.search.config), self._current("generate")
        wanted, config.early_stopping = config.num_return_sequences, True
        config.num_return_sequences = config.num_beams = max(FORCED_BEAMS, config.num_beams)
        decode = self.tokenizers.decode_target
        outputs = decode([best.token_ids for best, *_ in found])
        for index, lacking in enumerate(map(glossary.forced, texts, outputs)):
            if lacking and not config.do_sample:
                config.force_words_ids = lacking
                with suppress(ValueError):  # the words need more tokens than an output may have
                    (ranked,) = engine.search([rows[index][2]], config, tally.search.token_budget)
                    still = [glossary.forced(texts[index], text) for text in decode([one.token_ids for one in ranked])]
                    best_first = sorted(range(len(still)), key=list(map(len, still)).__getitem__)
                    found[index], lacking = [ranked[rank] for rank in best_first[:wanted]], still[best_first[0]]
            tally.missing += len(lacking)


def _counted(sentences: list[tuple[int, int]]) -> str:
    """Return subject and verb for sentences by numbers and tokens: "… is" or "… are"."""
    number, tokens = sentences[0]
    count = len({number for number, _ in sentences})
    if count == 1:
        return f"Sentence {number} with {tokens} tokens is"
    return f"{count} sentences (the first is sentence {number} with {tokens} tokens) are"
