"""A recipe's data: files, cleaning, and changes in each epoch."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from heedful.data.tokenization import GAP, LANGUAGE_TAG, MARKS, SEPARATOR
from heedful.data.tokenizer_training import OTHER_TAG, SPECIAL_TOKENS
from heedful.messages_heed import wrong
from heedful.recipe_keys import Section, key

Location = str | list[str]
DENOISE, MASK = "denoise", "<mask>"  # the tag before damaged texts, and the token for a dropped span, as in BART


@dataclass
class MixturePart(Section):
    """One part of the training data; `data` gives the defaults."""

    train: Location = key("files, as in `data.train`")
    source: str | None = key("source column; empty: `data.source`", None)
    target: str | None = key("target column; empty: `data.target`", None)
    to: str | None = key("target language; empty: `data.target`", None)
    tag: str | None = key("bt puts the token <bt> before the sources", None)


@dataclass(frozen=True)
class CleaningRules(Section, section="data.cleaning"):
    """Rules to drop pairs. A pair counts under the first broken rule, in the order of `cleaning.REASONS`."""

    max_ratio: float | None = key("drops pairs with a higher length ratio (longer side / shorter side)", None, least=1)
    drop_duplicates: bool = key("drops repeated pairs; a source with two targets makes two pairs", False)
    drop_identical: bool = key("drops pairs with equal source and target", False)
    # Training on a held-out source, even with another target, would spoil the test. In a mixture's further parts, a
    # side may be generated or in another language, so neither may be a held-out text.
    drop_overlap: bool = key("drops pairs whose source (in `mixture`, either side) is in validation or test", True)


@dataclass(frozen=True)
class AugmentationRules(Section, section="data.augmentation"):
    """Shares of the training pairs to change in an epoch."""

    lower_case: float = key("share of sources in lower case", 0.0, least=0, most=1)
    upper_case: float = key("share of sources in capitals", 0.0, least=0, most=1)
    title_case: float = key("share of sources whose words begin with a capital letter", 0.0, least=0, most=1)
    typos: float = key("share of source words with a swapped, lost, doubled or replaced letter", 0.0, least=0, most=1)
    no_final_punctuation: float = key("share of sources without their final full stop, ? or !", 0.0, least=0, most=1)
    joined: float = key("share of pairs joined with another pair (Kondo et al., 2021)", 0.0, least=0, most=1)
    terms: float = key("share of sources with marked terms, for glossaries (Dinu et al., 2019)", 0.0, least=0, most=1)
    placeholders: float = key("share of pairs with numbers instead of words, for `--markup`", 0.0, least=0, most=1)

    def check(self) -> None:
        """Refuse shares that together are above 1."""
        self.require(self.terms + self.placeholders <= 1, "placeholders", "be at most 1 - `data.augmentation.terms`")


@dataclass(frozen=True)
class DocumentRules(Section, section="data.documents"):
    """Windows of consecutive sentences, from which a model learns to use earlier sentences as context."""

    column: str | None = key("column with each pair's document; empty: blank lines separate documents", None)
    sentences: int | None = key("most sentences in a window; empty: no windows", None, least=2)

    def check(self) -> None:
        """Refuse a column without windows."""
        self.require(self or self.column is None, "sentences", "be given if `data.documents.column` is")

    def __bool__(self) -> bool:
        return self.sentences is not None


@dataclass
class DataRecipe(Section, section="data"):
    """Files, columns and limits of the pairs."""

    train: Location = key(
        "training pairs: a file (.jsonl, .json, .csv, .tsv, .txt, also with .gz; .parquet), a glob, a folder with a "
        "file for each split, line-aligned texts [a.de, a.en], a Hub dataset NAME[:CONFIG[:SPLIT]], or "
        "builtin:SPLIT:COUNT for the built-in Korean-English corpus; paths are relative to the recipe's file"
    )
    source: str = key(
        "source column, by name or number, or a language in a `translation` column; `[lemma, features]` or "
        "`lemma,features` joins columns by a space, and validation then holds out whole lemmas"
    )
    target: str = key("target column, by name or number, or a language in a `translation` column")
    validation: Location | None = key("pairs for validation during training; empty: held out of `train`", None)
    test: dict[str, Location] = key("test sets by name, used once after training", dict, resumes=True)
    references: str | None = key("column with the list of all right targets, in validation and tests", None)
    held_out: dict[str, Location] = key("files of texts to keep out of training, without `folder`", dict, resumes=True)
    folder: str | None = key("folder of the files above", None, resumes=True, on_card=False)
    mixture: dict[str, MixturePart] = key(
        "further training data: {NAME: {train: FILES, source: COLUMN, target: COLUMN}}, by default with "
        "the columns above. `to: fr` adds a target language, with tags such as <2fr>; a part with the columns "
        "exchanged makes a model of both directions. `tag: bt` puts <bt> before the sources (Caswell et al., 2019). "
        "Validation and tests stay those above",
        dict,
    )
    temperature: float = key(
        "above 1 repeats small parts: n pairs get shares of n^(1/temperature) (Arivazhagan et al., 2019)", 1.0, least=1
    )
    streaming: bool = key("true loads a corpus that does not fit in memory from disk, epoch by epoch", False)
    pool_size: int = key("number of streamed pairs to sort into batches together", 20000, least=1)
    max_source_tokens: int | None = key("pairs with a longer source are dropped; empty: no limit", 256, least=1)
    max_target_tokens: int | None = key("pairs with a longer target are dropped; empty: no limit", 256, least=1)
    cleaning: CleaningRules = key("rules to drop pairs", CleaningRules)
    augmentation: AugmentationRules = key("random changes of training pairs, new in every epoch", AugmentationRules)
    documents: DocumentRules = key("windows of a document's sentences, new in every epoch", DocumentRules)
    denoise: list[str] = key(
        "files with one target-language text a line (.txt, .gz), which the model learns to restore instead of pairs, "
        "in a run before the run with pairs; the tokenizer learns both",
        list,
    )

    def check(self) -> None:
        """Refuse keys that exclude each other."""
        check_mixture(self.mixture, self.target)
        if names := {"validation", "ended"} & self.test.keys():
            raise ValueError(f"`data.test` must not have a set called {names.pop()}: `metrics.json` has that name.")
        for name in ("streaming", "references", "denoise", "documents"):
            is_met = self.validation is not None or not getattr(self, name)
            self.require(is_met, "validation", f"be given if `data.{name}` is")
        is_met = self.validation is not None or not self.mixture or "," not in self.source
        self.require(is_met, "validation", "be given if `data.mixture` is, and `data.source` joins columns")
        is_changed = self.augmentation != AugmentationRules() or self.documents
        must = "be false if `data.augmentation` or `data.documents` is given"
        self.require(not (self.streaming and is_changed), "streaming", must)
        must = "be 1 in a stream" if self.streaming else "be 1 without a `data.mixture`"
        self.require(self.temperature == 1 or (self.mixture and not self.streaming), "temperature", must)
        for name in ("mixture", "streaming", "augmentation", "documents") if self.denoise else ():
            is_off = getattr(self, name) in ({}, False, AugmentationRules(), DocumentRules())
            self.require(is_off, name, "be left out if `data.denoise` is given")
        must = "be false if `data.denoise` is given"
        self.cleaning.require(not (self.denoise and self.cleaning.drop_identical), "drop_identical", must)

    @property
    def located(self) -> "DataRecipe":
        """The recipe with `folder` in front of file names."""
        train, validation = self._located(self.train), self._located(self.validation)
        test = {name: self._located(where) for name, where in self.test.items()}
        mixture = {name: replace(part, train=self._located(part.train)) for name, part in self.mixture.items()}
        places: dict[str, Any] = {"train": train, "validation": validation, "test": test, "mixture": mixture}
        return replace(self, **places, denoise=self._located(self.denoise), folder=None)

    @property
    def parts(self) -> dict[str, MixturePart]:
        """Parts of the training data by key: `train`, `mixture`, and `denoise`."""
        parts = {"data.train": MixturePart(self._located(self.train), self.source, self.target, self.target)}
        for name, part in self.mixture.items():
            source, target, to = part.source or self.source, part.target or self.target, part.to or self.target
            parts[f"data.mixture.{name}"] = MixturePart(self._located(part.train), source, target, to, part.tag)
        for number, text in enumerate(self._located(self.denoise), start=1):  # a pair has one text twice
            parts[f"data.denoise.{number}"] = MixturePart([text, text], self.target, self.target, self.target, DENOISE)
        return parts

    @property
    def denoised(self) -> list[int]:
        """Numbers of the parts with damaged texts; if any, the pairs only train the tokenizer."""
        return [number for number, part in enumerate(self.parts.values()) if part.tag == DENOISE]

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """Additional tokens for the tokenizers: language tags, part tags, a mask, a separator, and marks of terms."""
        tags = dict.fromkeys(f"<{part.tag}>" for part in self.parts.values() if part.tag)
        marks = (
            [MASK] * bool(self.denoise) + [SEPARATOR] * bool(self.documents) + [*MARKS] * bool(self.augmentation.terms)
        )
        return (*self.languages, *tags, *marks)

    @property
    def languages(self) -> tuple[str, ...]:
        """The target languages, if a model has several; else none."""
        languages = tuple(dict.fromkeys(str(part.to) for part in [*self.parts.values()][::-1]))
        return languages if len(languages) > 1 else ()

    def check_room(self, limit: int | None) -> None:
        """Raise a `ValueError` if rows made during an epoch may be longer than a model's positions."""
        rules = self.augmentation
        is_longer = rules.joined or rules.terms or rules.placeholders
        is_new = is_longer or self.streaming or self.denoise or self.documents
        for name in ("max_source_tokens", "max_target_tokens"):
            most = getattr(self, name)
            where = "with `data.streaming`, `data.denoise`, `data.documents` or rules of `data.augmentation`"
            is_met = limit is None or not is_new or (most is not None and most <= limit)
            self.require(is_met, name, f"be at most {limit}, the model's positions, {where}")

    def _located(self, where: Any) -> Any:
        if self.folder is None or where is None or "builtin:" in where:
            return where
        if isinstance(where, list):
            return [str(Path(self.folder) / name) for name in where]
        return str(Path(self.folder) / where)


def check_mixture(mixture: dict[str, MixturePart], target: str) -> None:
    """Check a mixture before it is read."""
    languages = {"data.target": target}
    languages |= {f"data.mixture.{name}.to": part.to or target for name, part in mixture.items()}
    if len({*languages.values()}) > 1:
        for name, language in languages.items():
            if not LANGUAGE_TAG.fullmatch(f"<2{language}>"):
                must = "be a language code of letters, digits, '-' and '_' if there are several"
                raise wrong(name, must, repr(language))
    for name, part in mixture.items():
        field, token = f"data.mixture.{name}", f"<{part.tag}>"
        if part.to is None and part.target not in (None, target) and re.fullmatch("[a-z]{2,3}", part.target or ""):
            raise wrong(f"{field}.to", f"be given if the target is {part.target}, not {target}", "empty")
        is_taken = token in (*SPECIAL_TOKENS, SEPARATOR, *MARKS) or part.tag == DENOISE or GAP.fullmatch(token)
        if part.tag is not None and (is_taken or not OTHER_TAG.fullmatch(token)):
            must = (
                "letters, digits, '-' and '_', a letter first; not pad, s, unk, mask, sep, term, denoise or extra_id_0"
            )
            raise wrong(f"{field}.tag", f"be {must}", repr(part.tag))
