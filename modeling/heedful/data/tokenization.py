"""A model's tokenizers: encode the source, encode and decode the target.

Sequences end in `</s>` and do not begin with `<s>`, which starts the decoder. A tokenizer trained by Heedful makes no
control token from text: "<s>" or "<2en>" in a sentence is plain text.
"""

import base64
import functools
import hashlib
import json
import math
import re
import subprocess
import sys
import threading
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from heedful.checksums_heed import TARGET_FOLDER, changed_files, check_no_target, load_tokenizer, write_checksums
from heedful.files import ENDLESS, check_inside, check_name_inside, first_line, listed, read_object, write_text
from heedful.messages_heed import wrong
from heedful.symbols_heed import UnknownSymbol, checked_texts, decoded, symbols_of, trimmed, unknown_symbol

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

# The source tokenizer's class in `tokenization_heed.py`, if the target has its own tokenizer.
SOURCE_CLASS = "HeedSourceTokenizer"
# Settings by from_pretrained that save_pretrained must not write.
LOCAL_KEYS = ("local_files_only", "is_local", "name_or_path", "_commit_hash", "backend")
# For tokenizers that switch between two sides.
SWITCHING = threading.Lock()
MOST_GROWTH, MOST_PARTS = 1000, 10_000  # characters made from one, and values in a tokenizer.json
QUANTIFIER, MOST_QUANTIFIERS = re.compile(r"(?<!\()[*+?{]"), 3  # patterns with more are tried first
PATIENCE = 5  # seconds
# In a separate process, because nothing else ends a search.
TRY_PATTERNS = """
import json, sys
from tokenizers import Regex, pre_tokenizers
for pattern in json.load(sys.stdin):
    for letter in sorted({*pattern, "a", " "}):
        pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str(letter * 200 + "!")
"""
LANGUAGE_TAG = re.compile(r"<2([A-Za-z0-9_-]+)>")
GAP = re.compile(r"<extra_id_\d+>|<mask>")  # T5 or BART fills them
SEPARATOR = "<sep>"  # between the sentences of a document's window, in both vocabularies
MARKS = ("<term>", "<term-as>", "<term-end>")  # around a term in a source, and its translation


class TokenizerPair:
    """A model's tokenizers: one for both sides (joint, the same object twice), or one for each.

    `languages` are those with a tag `<2xx>` in the source vocabulary, in the order of their ids.

    Raises:
        ValueError: If a tokenizer lacks a padding or end token, the two disagree on them, or one is random.
    """

    def __init__(self, source: "PreTrainedTokenizerFast", target: "PreTrainedTokenizerFast"):
        for side, tokenizer in (("source", source), ("target", target)):
            for name in ("pad_token_id", "eos_token_id"):
                found, of_source = getattr(tokenizer, name), getattr(source, name)
                if found is None:
                    raise ValueError(f"`{name}` of the {side} tokenizer must be set, but is None instead.")
                if found != of_source:
                    both = f"{of_source} in the source tokenizer and {found} in the target's"
                    raise wrong(name, "be the same in both tokenizers", both)
            model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
            if dropout := getattr(model, "dropout", None):
                what = f"`dropout` of the {side} tokenizer (in its tokenizer.json)"
                raise ValueError(f"{what} must be null, because it cannot be seeded, but is {dropout} instead.")
            warn_of_split_tokens(tokenizer)
        self.source, self.target = source, target
        tags = sorted((id_, str(token)) for id_, token in source.added_tokens_decoder.items())
        matches = (LANGUAGE_TAG.fullmatch(token) for _, token in tags)
        self.languages = tuple(match[1] for match in matches if match)

    @property
    def pad_token_id(self) -> int:
        """The padding id, for `Trainer`."""
        return int(self.source.pad_token_id)

    @property
    def model_input_names(self) -> list[str]:
        """Model input names, for `Trainer`."""
        return self.source.model_input_names

    @property
    def is_joint(self) -> bool:
        """Whether both sides share one tokenizer."""
        return self.source is self.target

    def encode_source(self, texts: Sequence[str], target_language: str | None = None) -> list[list[int]]:
        """Encode source texts after their `head`, without truncation and outer white space."""
        head = self.head(target_language)
        encoded = encode_texts(self.source, "text", texts)
        return [head + ids for ids in encoded] if head else encoded

    def head(self, target_language: str | None = None) -> list[int]:
        """Return the ids before every source: the target language's tag, needed if there are several languages."""
        if target_language is None and len(self.languages) < 2:
            return []
        if target_language not in self.languages:
            must = f"one of {', '.join(self.languages)}" if self.languages else "left out for a model without tags"
            must += ", the columns of its training data" * all(map(str.isdigit, self.languages or ["none"]))
            raise wrong("target_language", f"be {must}", repr(target_language))
        return [int(self.source.added_tokens_encoder[f"<2{target_language}>"])]

    def encode_target(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode target texts as labels, without truncation."""
        return encode_texts(self.target, "text_target", texts)

    def decode_target(self, batch_of_ids: Iterable[Iterable[int]]) -> list[str]:
        """Return the texts of target ids, in NFC, without control tokens and negative ids, but with `<unk>`."""
        with tokenizing("decode ids"):
            texts = [decoded(self.target, [int(id_) for id_ in ids if id_ >= 0]) for ids in batch_of_ids]
        backend = getattr(self.target, "backend_tokenizer", None)
        is_decomposed = type(getattr(backend, "normalizer", None)).__name__ == "NFD"
        return [unicodedata.normalize("NFC", text) for text in texts] if is_decomposed else texts

    def check_is_fast(self, use: str) -> None:
        """Raise a `ValueError` unless both tokenizers are from the library `tokenizers`."""
        for tokenizer in (self.source, self.target):
            if not tokenizer.is_fast:
                must, kind = f"a fast one (of the library `tokenizers`) for {use}", type(tokenizer).__name__
                raise ValueError(f"The tokenizer must be {must}, but is a {kind} instead.")

    def check_symbols(self, pairs: Iterable[Mapping[str, Any]], place: str, ignore: str | None = None) -> None:
        """Raise a `ValueError` for a symbol that a closed vocabulary lacks; `ignore` limits the check to sources."""
        for side, name in (("source", "text"), ("target", "text_target")):
            tokenizer = getattr(self, side)
            if symbols_of(tokenizer) is not None and (side == "source" or ignore is None):
                try:
                    encode_texts(tokenizer, name, [pair[side] for pair in pairs])
                except UnknownSymbol as error:
                    raise error.at(f"{place}, pair {error.index + 1}") from None

    def fingerprint(self) -> str:
        """Return a checksum of everything that affects ids; it does not depend on how tokenizers were loaded."""
        digest = hashlib.sha256()
        for tokenizer in (self.source, self.target):
            backend = getattr(tokenizer, "backend_tokenizer", None)
            parts = json.loads(backend.to_str()) if backend is not None else {"model": tokenizer.get_vocab()}
            # The backend keeps the last call's padding and truncation.
            kept = {name: part for name, part in parts.items() if name not in ("padding", "truncation")}
            digest.update(json.dumps([kept, self.special_ids()], sort_keys=True).encode())
        return digest.hexdigest()

    def special_ids(self) -> dict[str, int | None]:
        """Return special ids for a config; without `<s>`, padding starts the decoder, as in Marian."""
        bos, pad = self.target.bos_token_id, self.target.pad_token_id
        ids = {"pad_token_id": pad, "bos_token_id": bos, "eos_token_id": self.target.eos_token_id}
        return ids | {"decoder_start_token_id": pad if bos is None else bos}

    def vocabularies(self) -> dict[str, int | None]:
        """Return vocabulary sizes and special ids for a config."""
        return {"vocab_size": len(self.source), "decoder_vocab_size": len(self.target), **self.special_ids()}

    def check_config(self, config: "PreTrainedConfig", generation_config: "GenerationConfig | None" = None) -> None:
        """Raise a `ValueError` that names each special id and size that fits neither config nor generation config."""
        wrong = []
        for name, value in self.vocabularies().items():
            found = getattr(config, name, None)
            if name == "decoder_vocab_size" and found is None:  # both sides have `vocab_size` tokens
                found = getattr(config, "vocab_size", None)
            if found is None and value is not None:
                found = getattr(generation_config, name, None)
            if value not in (found if isinstance(found, list) else [found]):
                wrong.append(f"`{name}` must be {value}, but is {found} instead.")
        if wrong:
            raise ValueError("The model's config does not fit the tokenizers: " + " ".join(wrong))

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the tokenizers for `from_pretrained` and transformers' `AutoTokenizer`.

        A separate target tokenizer goes into the subfolder `target_tokenizer`. A joint pair raises a `ValueError` if
        the folder has another pair's target tokenizer.
        """
        folder = Path(folder)
        if self.is_joint:
            check_no_target(folder)
        _save(self.source, folder, {} if self.is_joint else {TARGET_FOLDER: TARGET_FOLDER})
        if not self.is_joint:
            _save(self.target, folder / TARGET_FOLDER)
        write_checksums(folder, "tokenizer")

    @classmethod
    def from_pretrained(cls, folder: str | Path, trust_remote_code: bool = False) -> "TokenizerPair":
        """Load a saved pair, or any Hugging Face tokenizer as a joint pair, without the network.

        Warns of files that changed since `save_pretrained`. `trust_remote_code` allows the folder's code to run.

        Raises:
            FileNotFoundError: If the folder, or a tokenizer in it, does not exist.
            ValueError: If it needs untrusted code, or names files outside the folder.
        """
        folder = Path(folder)
        source = _load(folder, trust_remote_code)
        is_separate = TARGET_FOLDER in source.init_kwargs
        if not is_separate:  # transformers may have overwritten one of two
            check_no_target(folder)
        target = _load(folder / TARGET_FOLDER, trust_remote_code) if is_separate else source
        changed = changed_files(folder, "tokenizer")
        if changed:
            must = f"should be those saved with the model, but {listed(changed)} changed since"
            why = "another model's tokenizer gives nonsense"
            advice = "If you changed them on purpose, save them with `TokenizerPair.save_pretrained`."
            warnings.warn(f"The tokenizers in {folder} {must}: {why}. {advice}", stacklevel=2)
        return cls(source, target)


def warn_of_split_tokens(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Warn about `add_special_tokens`: our tokenizers never find special tokens in text."""
    added = [str(token) for token in getattr(tokenizer, "extra_special_tokens", None) or ()]
    is_ours = not type(tokenizer).__module__.startswith("transformers.models.")
    if added and is_ours and tokenizer.split_special_tokens:
        advice = "use `tokenizer.add_tokens`, or find all by `tokenizer.split_special_tokens = False`"
        warnings.warn(f"{listed(added)} will be split in texts, like every special token: {advice}.", stacklevel=3)


def encode_texts(tokenizer: "PreTrainedTokenizerFast", side: str, texts: Sequence[str]) -> list[list[int]]:
    """Encode texts as `text` or `text_target`; raise an `UnknownSymbol` if a closed vocabulary lacks one."""
    texts = checked_texts(texts)
    if not texts:
        return []
    texts = list(map(trimmed, texts)) if side == "text" else texts
    options: dict[str, Any] = {side: texts, "return_attention_mask": False, "truncation": False}
    switches = getattr(tokenizer, "src_lang", None) is not None or not tokenizer.is_fast
    try:
        with SWITCHING if switches else nullcontext(), tokenizing("encode texts"):
            ids: list[list[int]] = tokenizer(**options, verbose=False)["input_ids"]
    except ValueError as error:  # `tokenizers` does not name the symbol
        raise unknown_symbol(tokenizer, side, texts) or error from None
    if tokenizer.is_fast or not tokenizer.split_special_tokens:
        return ids
    gaps = {token for token in tokenizer.added_tokens_encoder if GAP.fullmatch(token)}
    for number, text in enumerate(texts):  # ByT5 splits gaps too
        parts = re.split(f"({GAP.pattern})", text)
        if not gaps.isdisjoint(parts):
            tokens = [token for part in parts for token in ([part] if part in gaps else tokenizer.tokenize(part))]
            ids[number] = tokenizer.build_inputs_with_special_tokens(tokenizer.convert_tokens_to_ids(tokens))
    return ids


@contextmanager
def tokenizing(task: str) -> Iterator[None]:
    """Turn any error from a broken tokenizer, also a `tokenizers` panic, into a `ValueError`."""
    try:
        yield
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"  # not an `Exception`, and without a module
        if isinstance(error, OSError | ValueError | ImportError) or not (is_panic or isinstance(error, Exception)):
            raise
        raise ValueError(f"The tokenizer cannot {task}: {first_line(error)}") from error


def check_is_bounded(path: Path) -> None:
    """Raise a `ValueError` if a tokenizer.json expands a character so much that a text would fill the memory."""
    state, growth = read_object(path), 1.0
    parts: list[object] = [state.get(name) for name in ("normalizer", "pre_tokenizer", "decoder", "post_processor")]
    for number, part in enumerate(parts):  # grows below
        if isinstance(part, dict):
            growth *= _growth(part)
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        if growth > MOST_GROWTH or number > MOST_PARTS:
            raise ValueError(f"{path} must make at most {MOST_GROWTH} characters from one, but makes more.")
    patterns = [str(part["Regex"]) for part in parts if isinstance(part, dict) and "Regex" in part]
    slow = [each for each in patterns if ENDLESS.search(each) or len(QUANTIFIER.findall(each)) > MOST_QUANTIFIERS]
    if slow and not are_quick(tuple(slow)):
        must = f"patterns that end their search in {PATIENCE} seconds, but has {max(slow, key=len)[:80]!r}"
        raise ValueError(f"{path} must have {must}.")


@functools.cache
def are_quick(patterns: tuple[str, ...]) -> bool:
    """Return whether patterns end soon, without a panic, in texts made from their characters."""
    command, given = [sys.executable, "-I", "-c", TRY_PATTERNS], json.dumps(patterns).encode()
    with suppress(subprocess.SubprocessError):
        subprocess.run(command, input=given, check=True, capture_output=True, timeout=PATIENCE)
        return True
    return False


def _growth(part: dict[str, Any]) -> float:
    """Return the most characters that a tokenizer.json part makes from one."""
    pattern, content, charsmap = part.get("pattern"), part.get("content"), part.get("precompiled_charsmap")
    if isinstance(charsmap, str):  # its first bytes are the size of a table to allocate
        table = base64.b64decode(charsmap)
        return math.inf if int.from_bytes(table[:4], "little") > len(table) else 1
    if isinstance(pattern, dict) and isinstance(content, str):
        replaced = pattern.get("String")
        return max(1, len(content) / len(replaced)) if isinstance(replaced, str) and replaced else 1 + len(content)
    return 1 + len(str(part.get("prepend") or ""))


def _save(tokenizer: "PreTrainedTokenizerFast", folder: Path, more: dict[str, str] | None = None) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    for key in (*LOCAL_KEYS, TARGET_FOLDER):
        settings.pop(key, None)
    settings |= more or {}
    if type(tokenizer).__name__ in (PreTrainedTokenizerFast.__name__, SOURCE_CLASS):
        # transformers 4 has this name too. `SOURCE_CLASS` refuses `text_target`; without Heedful it is the same.
        settings["tokenizer_class"] = SOURCE_CLASS if more else "PreTrainedTokenizerFast"
    write_text(path, json.dumps(settings, indent=2, ensure_ascii=False, sort_keys=True) + "\n")


def options_inside(folder: str | Path) -> dict[str, Any]:
    """Check the tokenizer files in a folder, and return `from_pretrained` options that ignore outside paths."""
    path = Path(folder) / "tokenizer_config.json"
    if not Path(folder).is_dir():
        return {}
    check_inside(Path(folder))
    check_is_bounded(path.with_name("tokenizer.json"))
    settings = read_object(path)
    for name in settings.get("fast_tokenizer_files") or []:
        check_name_inside(name, f"`fast_tokenizer_files` of {path}")
    names = (key for key, value in settings.items() if isinstance(value, str))
    return {key: None for key in names if key.endswith(("_file", "_spm")) or key in ("vocab", "merges")}


def _load(folder: Path, trust_remote_code: bool) -> "PreTrainedTokenizerFast":
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = folder / "tokenizer_config.json"
    if not path.is_file():
        found = f"has no {path.name}" if folder.is_dir() else "does not exist"
        raise FileNotFoundError(f"{folder} must be a folder with a tokenizer, but {found}.")
    options = options_inside(folder) | {"local_files_only": True, "trust_remote_code": trust_remote_code}
    # AutoTokenizer would look for a model first.
    is_ours = read_object(path).get("tokenizer_class") in ("PreTrainedTokenizerFast", SOURCE_CLASS)
    loader = PreTrainedTokenizerFast if is_ours else AutoTokenizer
    way = "with `TokenizerPair.from_pretrained(…, trust_remote_code=True)`; Heed's own need no code"
    with tokenizing("be loaded"):
        return cast("PreTrainedTokenizerFast", load_tokenizer(loader, folder, way, **options))
