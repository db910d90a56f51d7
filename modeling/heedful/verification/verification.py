"""Checks that a saved encoder-decoder keeps Heed's promises. Most run it in two ways that must agree."""

import inspect
import math
import re
import tempfile
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

import heedful
from heedful.checking.findings import Measured, ModelFinding, SkippedError, check, shown
from heedful.checksums_heed import CHECKSUMS_FILE, Part, changed_files, has_tokenizer
from heedful.configuration_base_heed import HEED_TYPES, IGNORED_LABEL, special_token
from heedful.data.tokenization import TokenizerPair, options_inside, tokenizing
from heedful.decoding.engines import evaluation_mode
from heedful.decoding.loading import ADAPTER_FILE, CODE_REFERENCE, reading, resolve_device
from heedful.decoding.native.conditions import NAME, model_obstacle
from heedful.decoding.native.engine import may_replace, prepare_for_inference
from heedful.decoding.translation import Translator
from heedful.evaluation.faults import find_faults
from heedful.export import fresh_process
from heedful.files import check_inside, first_line, listed, read_object
from heedful.messages_heed import shortened
from heedful.modeling_heed import HeedForConditionalGeneration
from heedful.protocols import Seq2SeqModel
from heedful.symbols_heed import symbols_of
from heedful.verification import samples
from heedful.verification.samples import Sample, Variation, difference, labels_of, loss_of, make_sample, tolerance_of
from heedful.versions_heed import NEWEST_TRANSFORMERS

BEAMS = 4
RUNAWAY = {"repeated", "cut_off", "too_long"}  # faults that no input should cause
EXACT = (torch.float32, torch.float64)  # in other types, near ties are arbitrary


def _unchanged_by(
    name: str, variation: Variation, beams: Sequence[int], message: str, to_the_bit: bool = False
) -> Callable[..., ModelFinding]:
    """Return a check that a variation changes neither logits nor tokens generated with some beam widths."""
    ways = (variation, samples.PLAIN)

    @check(name)
    def compare(model: Seq2SeqModel, sample: Sample | None = None) -> Measured:
        sample = sample or make_sample(model)
        limit = 0.0 if to_the_bit else tolerance_of(model)
        distance, differing = difference(*(samples.logits_of(model, sample, each) for each in ways)), 0
        for num_beams in beams:
            pairs = zip(*(samples.generated(model, sample, num_beams, each) for each in ways), strict=True)
            differing += sum(ours != theirs for ours, theirs in pairs)
        if not differing:
            return distance, limit, message + "; same tokens generated" * bool(beams)
        count = f"{differing} of {len(beams) * len(sample)} generated sentences differ"
        found = f"{message}; logits {distance:.1e}, {count}"
        if to_the_bit or model.dtype in EXACT:
            return max(distance, differing), limit, found
        return distance, limit, f"{found} (not judged in {str(model.dtype).removeprefix('torch.')})"

    return compare


_MORE = f"{samples.EXTRA_PADDING} more padding tokens on the source's"
_SEARCHES = f"greedy and {BEAMS} beams"
check_batch = _unchanged_by("batch", Variation(is_alone=True), (1, BEAMS), f"alone and in one batch, {_SEARCHES}")
check_order = _unchanged_by("order of a batch", Variation(is_reversed=True), (1,), "a batch and its reverse")
check_right_padding = _unchanged_by("right padding", Variation(samples.EXTRA_PADDING), (), f"{_MORE} right")
check_left_padding = _unchanged_by("left padding", Variation(samples.EXTRA_PADDING, "left"), (1,), f"{_MORE} left")
_STEPS = f"step by step with a cache and in one pass, {_SEARCHES}"
check_cache = _unchanged_by("cache", Variation(uses_other_cache=True), (1, BEAMS), _STEPS)
check_determinism = _unchanged_by("determinism", samples.PLAIN, (1,), "two calls, to the bit", to_the_bit=True)


@check("attention weights")
def check_attentions(model: Seq2SeqModel, sample: Sample | None = None) -> Measured:
    """Check that attention weights exist with any kernel, sum to 1, ignore padding, and change no logits."""
    sample, is_recurrent = sample or make_sample(model), model.config.model_type == "heed_rnn"
    kinds = ["encoder_attentions", "decoder_attentions"] * (not is_recurrent) + ["cross_attentions"]
    if is_recurrent and model.config.attention == "none":
        raise SkippedError("the config's `attention` is none")
    inputs = samples.source_inputs(model, sample.sources)
    inputs["decoder_input_ids"] = samples.decoder_inputs(model, sample.targets)
    with evaluation_mode(model), torch.no_grad():
        plain = model(**inputs, use_cache=False).logits
        outputs = model(**inputs, use_cache=False, output_attentions=True)
    kernel = getattr(model.config, "_attn_implementation", None)
    missing = [kind for kind in kinds if not any(w is not None for w in getattr(outputs, kind, None) or ())]
    if missing:
        return len(missing), 0.0, f"{', '.join(missing)}: nothing is returned under {kernel}"
    source_mask = inputs["attention_mask"].bool()
    target_mask = labels_of(model, sample.targets) != IGNORED_LABEL
    figures = [difference([outputs.logits[target_mask]], [plain[target_mask]])]
    for kind in kinds:
        queries = source_mask if kind == "encoder_attentions" else target_mask
        for weights in getattr(outputs, kind):  # (B, H, Q, K)
            sums = weights.float().sum(-1).transpose(1, 2)[queries]
            figures.append((sums - 1).abs().max().item())
            if kind == "cross_attentions":
                figures.append((weights.float() * ~source_mask[:, None, None]).max().item())
    message = f"asked for under {kernel}: there, sum to 1, none at padding, same logits"
    return max(figures), tolerance_of(model), message


@check("loss of a split update")
def check_loss_split(model: Seq2SeqModel, sample: Sample | None = None) -> Measured:
    """Check that micro-batch losses add up to the batch's loss; relative difference."""
    sample = sample or make_sample(model)
    whole = loss_of(model, sample)
    # As in `Trainer`: losses are summed if the model takes the label count, and averaged otherwise.
    takes_arguments = getattr(model, "accepts_loss_kwargs", None)
    if takes_arguments is None:
        parameters = inspect.signature(model.forward).parameters.values()
        takes_arguments = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
    pieces = [sample.part(rows) for rows in (slice(0, 1), slice(1, 3), slice(3, None))]
    settings: dict[str, Any] = {"num_items_in_batch": sample.label_count} if takes_arguments else {}
    total = sum(loss_of(model, piece, **settings) for piece in pieces) / (1 if takes_arguments else len(pieces))
    message = f"{len(pieces)} micro-batches add up to {total:.4f}, the whole batch has {whole:.4f}"
    return abs(total - whole) / abs(whole), tolerance_of(model), message


@check("loss and padding")
def check_loss_padding(model: Seq2SeqModel, sample: Sample | None = None) -> Measured:
    """Check that a loss is the mean over labels other than -100; relative difference."""
    sample = sample or make_sample(model)
    whole, read = loss_of(model, sample), samples.decoder_inputs(model, sample.targets)
    singles = [sample.part(slice(row, row + 1)) for row in range(len(sample))]
    weighted = sum(single.label_count * loss_of(model, single) for single in singles) / sample.label_count
    more = loss_of(model, sample, labels_of(model, sample.targets, samples.EXTRA_PADDING))
    blanked = labels_of(model, sample.targets)
    blanked[:, 1::2] = IGNORED_LABEL
    logits = torch.cat([row[::2].float() for row in samples.logits_of(model, sample)])
    labels = torch.tensor([token for row in sample.targets for token in row[::2]], device=logits.device)
    expected = torch.nn.functional.cross_entropy(logits, labels).item()
    pairs = ((weighted, whole), (more, whole), (loss_of(model, sample, blanked, decoder_input_ids=read), expected))
    distances = [abs(ours - theirs) / abs(theirs) for ours, theirs in pairs]
    message = "token-weighted mean of the sentences, more -100 behind, -100 in the middle ({:.1e}, {:.1e}, {:.1e})"
    return max(distances), tolerance_of(model), message.format(*distances)


@check("engines")
def check_engines(model: HeedForConditionalGeneration, sample: Sample | None = None) -> Measured:
    """Check that the native decoder, if a `Translator` would choose it, gives the tokens of `generate()`; count."""
    sample = sample or make_sample(model)
    if not may_replace(model, model.generation_config):
        why = model_obstacle(model) or f"only `generate()` supports its settings and its dtype, {model.dtype}"
        raise SkippedError(f"{NAME} does not support this model: {why}")
    plain = [samples.generated(model, sample, beams) for beams in (1, BEAMS)]
    with evaluation_mode(model), prepare_for_inference(model):  # also compares logits
        found = [samples.generated(model, sample, beams) for beams in (1, BEAMS)]
    differing = sum(a != b for one, other in zip(plain, found, strict=True) for a, b in zip(one, other, strict=True))
    message = f"{2 * len(sample)} sentences by {NAME} and the model's own code, greedy and beams"
    return differing, 0, message


# Checks that write no file.
MODEL_CHECKS = (
    *(check_batch, check_order, check_right_padding, check_left_padding, check_cache, check_determinism),
    *(check_attentions, check_loss_split, check_loss_padding, check_engines),
)


@check("weights complete")
def check_weights(report: dict[str, Any]) -> Measured:
    """Check that no weight is missing or unknown, from `from_pretrained(output_loading_info=True)`."""
    kinds = {"missing_keys": "missing", "unexpected_keys": "unknown", "mismatched_keys": "misshapen"}
    faults = {word: [str(name) for name in report[kind]] for kind, word in kinds.items() if report.get(kind)}
    message = "; ".join(f"{word}: {listed(names)}" for word, names in faults.items())
    return sum(map(len, faults.values())), 0, message or "names of the saved tensors and of the model's"


@check("save and load")
def check_saving(model: Seq2SeqModel, sample: Sample | None = None) -> Measured:
    """Check that a model saved whole and in shards is loaded unchanged: weights and logits to the bit."""
    sample = sample or make_sample(model)
    expected, state, files = samples.logits_of(model, sample), model.state_dict(), []
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    for shard_size in (2 * size + 10**6, size // 3):
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder, max_shard_size=shard_size)
            files.append(len(list(Path(folder).glob("*.safetensors"))))
            options: dict[str, Any] = {"dtype": model.dtype, "local_files_only": True, "output_loading_info": True}
            loaded, report = type(model).from_pretrained(folder, **options)
        names = check_weights(report)
        if not names.passed:
            return names.figure or 1, 0, names.message
        found = loaded.state_dict()
        wrong = [name for name in state if name not in found or not torch.equal(state[name].cpu(), found[name].cpu())]
        if wrong:
            return len(wrong), 0, f"differ after loading: {listed(wrong)}"
        distance = difference(samples.logits_of(loaded.to(model.device), sample), expected)
        if distance > 0:
            return distance, 0, "logits differ after loading, though the weights are the same"
    return 0, 0, f"{len(state)} tensors and the logits, to the bit, by way of {files[0]} file and of {files[1]}"


@check("files as saved")
def check_files(folder: str | Path) -> Measured:
    """Check a folder's checksums for weights and tokenizers; count the changed files."""
    parts: tuple[Part, ...] = ("weights", "tokenizer")
    known = {part: names for part in parts if (names := changed_files(folder, part)) is not None}
    if not known:
        raise SkippedError(f"the folder has no checksums ({CHECKSUMS_FILE})")
    changed = [name for names in known.values() for name in names]
    message = f"changed since: {listed(changed)}" if changed else f"the checksums of {' and '.join(known)}"
    return len(changed), 0, message


@check("tied weights")
def check_tied_weights(model: Seq2SeqModel) -> Measured:
    """Check that embeddings share memory exactly as in the config; count."""
    config = model.config
    if config.model_type in HEED_TYPES:
        claims = [config.shares_source_and_target_embeddings, config.shares_target_and_output_embeddings]
    else:
        claims = [getattr(config, name, None) for name in ("share_encoder_decoder_embeddings", "tie_word_embeddings")]
    if claims == [None, None]:
        raise SkippedError("the config does not name the tied embeddings")
    source, target = (stack.get_input_embeddings().weight for stack in (model.get_encoder(), model.get_decoder()))
    output = model.get_output_embeddings().weight
    pairs = (("source and target", source, target), ("target and output", target, output))
    found, wrong = [], 0
    for (name, first, second), expected in zip(pairs, claims, strict=True):
        if expected is not None:
            is_shared = first is second or first.data_ptr() == second.data_ptr()
            is_wrong, words = is_shared != expected, "shared" if is_shared else "separate"
            found.append(f"{name} embeddings {words}{' (wrong)' * is_wrong}")
            wrong += is_wrong
    return wrong, 0, ", ".join(found)


@check("code in the folder")
def check_remote_code(
    folder: str | Path, model: Seq2SeqModel, sample: Sample | None = None, trust_remote_code: bool = False
) -> Measured:
    """Check that a folder's code gives the same logits and greedy tokens without Heedful."""
    folder = Path(folder)
    if not any(folder.rglob("*.py")):
        raise SkippedError("the folder carries no code")
    # Only code equal to the installed package's runs automatically; older code fails.
    if not trust_remote_code and not _code_is_ours(folder):
        if model.config.model_type in HEED_TYPES and (age := _age_of_code(folder)):
            return 1, 0, age
        raise SkippedError("it differs from the installed package's, so it runs only with --trust-remote-code")
    sample = sample or make_sample(model)
    inputs = samples.source_inputs(model, sample.sources)
    given = inputs | {"decoder_input_ids": samples.decoder_inputs(model, sample.targets)}
    settings = {"do_sample": False, "num_beams": 1, "max_new_tokens": 8}
    theirs = fresh_process.ask(folder, given, [(settings, inputs)], dtype=model.dtype, trust_remote_code=True)
    rows = [row[: len(target)] for row, target in zip(theirs["logits"], sample.targets, strict=True)]
    distance, found = difference(rows, samples.logits_of(model, sample)), "logits and greedy tokens here and"
    if not torch.equal(model.generate(**inputs, **settings).cpu(), theirs["tokens"][0]):
        found = f"logits {distance:.1e}, and other greedy tokens"
        distance = max(distance, 1.0) if model.dtype in EXACT else distance
    return distance, tolerance_of(model), f"{found} in a new process that cannot import heedful"


def _age_of_code(folder: Path) -> str | None:
    """Return how old a folder's code is and how to update it, or `None` if it is current."""
    path = folder / "versions_heed.py"
    found = re.search(r'^NEWEST_TRANSFORMERS = "([\d.]+)"$', path.read_text("utf-8"), re.M) if path.is_file() else None
    known = found[1] if found else "5.23"  # the last before this line existed
    if tuple(map(int, known.split("."))) >= tuple(map(int, NEWEST_TRANSFORMERS.split("."))):
        return None
    load = f"AutoModelForSeq2SeqLM.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    renew = f"import heedful; from transformers import AutoModelForSeq2SeqLM; {load}"
    age = f"older than the installed Heedful's and supports transformers up to {known}"
    return f"it is {age}; to update it, run in Python: {renew}"


def _code_is_ours(folder: Path) -> bool:
    """Return whether a folder's code uses only files equal to installed ones."""
    installed = {path.name: path for path in Path(heedful.__file__).parent.glob("*.py")}
    for path in folder.rglob("*.py"):
        ours = installed.get(path.name)
        if path.parent != folder or ours is None or ours.read_bytes() != path.read_bytes():
            return False
    # Code elsewhere: an adapter's base model, "owner/repository--file.Class", a path.
    references = (read_object(folder / "config.json").get("auto_map") or {}).values()
    return not (folder / ADAPTER_FILE).exists() and all(CODE_REFERENCE.fullmatch(str(each)) for each in references)


@check("special ids")
def check_special_ids(model: Seq2SeqModel, tokenizers: TokenizerPair | None = None) -> Measured:
    """Check that tokenizers, config and generation config have the same special ids and vocabulary sizes; count."""
    faults, sizes, is_heed = [], samples.vocabulary_sizes(model), model.config.model_type in HEED_TYPES
    places = {"config": model.config, "generation config": model.generation_config}
    places |= {"tokenizer": tokenizers.target} if tokenizers else {}
    for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id"):
        found = ((place, getattr(holder, name, None)) for place, holder in places.items())
        ids = {place: id_ for place, id_ in found if id_ is not None}
        # A model may have more end tokens than its tokenizer.
        if not ids or not set.intersection(*map(samples.id_set, ids.values())):
            message = ", ".join(f"{id_} in the {place}" for place, id_ in ids.items())
            faults.append(f"{name}: {message or 'set nowhere'}")
    if is_heed:
        configured = zip((model.config.vocab_size, model.config.decoder_vocab_size), sizes, strict=True)
        faults += [f"vocabulary: {ours} in the config, {rows} rows" for ours, rows in configured if ours != rows]
    if tokenizers is not None:
        for side, rows in zip(("source", "target"), sizes, strict=True):
            count = len(getattr(tokenizers, side))
            # Some models round their vocabulary up; Heed's never do.
            if count > rows or (is_heed and count != rows):
                faults.append(f"{side} vocabulary: {count} tokens in the tokenizer, {rows} rows in the model")
        start = special_token(model, "decoder_start_token_id")
        expected = tokenizers.special_ids()["decoder_start_token_id"]
        if is_heed and start != expected:
            faults.append(f"decoder_start_token_id: {start}, but {expected} by tokenizer")
    compared = "config and generation config" + (" (no tokenizer)" if tokenizers is None else " and tokenizers")
    return len(faults), 0, "; ".join(faults) or f"pad, end, start and vocabulary sizes of {compared}"


@check("tokenizer round trip")
def check_round_trip(tokenizers: TokenizerPair, texts: Sequence[str] = ()) -> Measured:
    """Check that texts (default: built-in ones or all symbols) survive encoding and decoding, in NFC."""
    changed, count = dict[str, str](), 0
    for encode, tokenizer in _sides(tokenizers):
        symbols = symbols_of(tokenizer)
        tried = list(texts or (samples.TEXTS if symbols is None else [" ".join(symbols)]))
        count = max(count, len(tried))
        backs = tokenizer.batch_decode(encode(tried), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for text, back in zip(tried, backs, strict=True):
            if unicodedata.normalize("NFC", back) != unicodedata.normalize("NFC", text):
                changed.setdefault(text, back)
    message = f"{count} texts encoded and decoded"
    for text, back in [*changed.items()][:1]:
        message = f"{len(changed)} of {count} texts come back changed: {text!r} as {back!r}"
        message += "" if texts else " (try other texts: `--text`, `--data`)"
    return len(changed), 0, message


@check("special tokens in a text")
def check_special_text(tokenizers: TokenizerPair) -> Measured:
    """Check that "<s>" or "</s>" in a text stays text; count the tokens that become special."""
    tokens = dict.fromkeys([*tokenizers.source.all_special_tokens, *tokenizers.target.all_special_tokens])
    smuggled: dict[str, None] = {}
    for encode, tokenizer in _sides(tokenizers):
        if symbols_of(tokenizer) is not None:
            continue  # it refuses such texts
        # Any text may have unknown tokens, which control nothing.
        special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        rows = encode(["a b", *(f"a {token} b" for token in tokens)])
        expected, *counts = (sum(id_ in special for id_ in ids) for ids in rows)
        smuggled |= dict.fromkeys(token for token, count in zip(tokens, counts, strict=True) if count != expected)
    message = f"{len(tokens)} special tokens, such as {next(iter(tokens), None)!r}, written in a text"
    return len(smuggled), 0, f"taken for special tokens: {', '.join([*smuggled][:4])}" if smuggled else message


def check_inputs(name: str, model: Seq2SeqModel, tokenizers: TokenizerPair, texts: Sequence[str]) -> ModelFinding:
    """Check that outputs run away no more often for unusual inputs of one kind than for (up to 20) ordinary texts."""
    texts = texts[:20] or samples.TEXTS

    @check(name)
    def count_runaways() -> Measured:
        if symbols_of(tokenizers.source) is not None:
            raise SkippedError("the source vocabulary is closed, so it refuses other symbols")
        sources = [*map(samples.INPUTS[name], texts), *texts]
        language = tokenizers.languages[0] if len(tokenizers.languages) > 1 else None
        with warnings.catch_warnings(action="ignore"):  # about outputs that are cut off
            found = Translator(model, tokenizers).translate(sources, num_beams=1, target_language=language)
        unusual, usual = list[str](), list[str]()
        for number, (source, (best, *_)) in enumerate(zip(sources, found, strict=True)):
            if RUNAWAY & find_faults(source, best.text, model.generation_config, best.finished).keys():
                side = unusual if number < len(texts) else usual
                side.append(f"{shortened(source)} gives {shortened(best.text)}")
        message = "outputs that repeat themselves, are far too long or cut off; limit: those for ordinary texts"
        return len(unusual), len(usual), "; ".join([message, *unusual[:1]])

    return count_runaways()


def _sides(tokenizers: TokenizerPair) -> Iterator[tuple[Callable[[list[str]], list[list[int]]], Any]]:
    """Yield each different tokenizer with its encoding method."""
    yield tokenizers.encode_target, tokenizers.target
    if not tokenizers.is_joint:
        language = tokenizers.languages[0] if len(tokenizers.languages) > 1 else None
        yield partial(tokenizers.encode_source, target_language=language), tokenizers.source


@dataclass
class Verification:
    """All checks' findings for a folder, and their conditions."""

    findings: list[ModelFinding]
    folder: str
    model: str  # its class
    parameters: int  # tied ones once
    dtype: str  # used for the checks
    saved_dtype: str | None  # dtype of the weights in the file, if in the config
    device: str

    @property
    def failed(self) -> list[str]:
        """Names of failed checks."""
        return [finding.check for finding in self.findings if finding.level == "FAIL"]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as data for JSON."""
        conditions, verdicts = {**vars(self)}, []
        for finding in conditions.pop("findings"):
            is_number = finding.figure is None or math.isfinite(finding.figure)
            numbers = {"figure": finding.figure if is_number else str(finding.figure), "limit": finding.limit}
            verdicts.append({"check": finding.check, "result": finding.level, **numbers, "message": finding.message})
        return {**conditions, "verdicts": verdicts, "passed": not self.failed}

    def table(self) -> str:
        """Write the conditions, the findings and a summary as text."""
        saved = f" (saved in {self.saved_dtype})" if self.saved_dtype not in (None, self.dtype) else ""
        head = f"{self.folder}: {self.model}, {self.parameters:,} parameters, in {self.dtype}{saved} on {self.device}"
        rows = [("check", "result", "worst", "limit", "compared")]
        rows += [(f.check, f.level, shown(f.figure), shown(f.limit), f.message) for f in self.findings]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]) for row in rows]
        counts = Counter(finding.level for finding in self.findings)
        summary = f"{counts['pass']} passed, {counts['FAIL']} failed, {counts['skipped']} skipped"
        return "\n".join([head, "", *lines, "", summary])


def verify(
    folder: str | Path,
    texts: Sequence[str] = (),
    *,
    device: str | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    trust_remote_code: bool = False,
) -> Verification:
    """Run all checks on a saved encoder-decoder and its tokenizers, with `texts` or built-in ones."""
    folder, target = Path(folder), resolve_device(device)
    model, report = _load(folder, getattr(torch, dtype), trust_remote_code)
    model = model.to(target).eval()
    tokenizers, reason, is_broken = _load_tokenizers(folder, trust_remote_code)
    if texts and tokenizers is None:
        raise ValueError(f"`texts` must be left out without a tokenizer to encode them, but {reason}.")
    sample = make_sample(model, tokenizers, texts)
    findings = [
        check_weights(report),
        check_saving(model, sample),
        check_files(folder),
        check_tied_weights(model),
        check_remote_code(folder, model, sample, trust_remote_code),
        *(check_model(model, sample) for check_model in MODEL_CHECKS),
        ModelFinding("special ids", "FAIL", reason) if is_broken else check_special_ids(model, tokenizers),
    ]
    if tokenizers is None:
        names = ("tokenizer round trip", "special tokens in a text", *samples.INPUTS)
        findings += [ModelFinding(name, "skipped", reason) for name in names]
    else:
        findings += [check_round_trip(tokenizers, texts), check_special_text(tokenizers)]
        findings += [check_inputs(name, model, tokenizers, texts) for name in samples.INPUTS]
    saved, parameters = read_object(folder / "config.json").get("dtype"), model.num_parameters()
    return Verification(findings, str(folder), type(model).__name__, parameters, dtype, saved, str(target))


def _load(folder: Path, dtype: torch.dtype, trust_remote_code: bool) -> tuple[Any, dict[str, Any]]:
    if not (folder / "config.json").is_file():
        what = "is a file" if folder.is_file() else "has no config.json" if folder.exists() else "does not exist"
        hint = "(Download a model from the Hub first: huggingface_hub.snapshot_download.)"
        raise FileNotFoundError(f"{folder} must be a folder with a model, but {what}. {hint}")
    check_inside(folder)
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    # The report names weights with wrong shapes; transformers' error does not.
    options: dict[str, Any] = local | {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with reading(folder):
        config = AutoConfig.from_pretrained(folder, **local)
        if not config.is_encoder_decoder:
            raise ValueError(f"an encoder-decoder is needed, but {config.model_type!r} is none")
        return AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=dtype, **options)


def _load_tokenizers(folder: Path, trust_remote_code: bool) -> tuple[TokenizerPair | None, str, bool]:
    """Load a folder's tokenizers; without them, return the reason, and whether they are broken."""
    if not has_tokenizer(folder):
        return None, "the folder holds no tokenizer", False
    from transformers import AutoTokenizer

    try:
        if (folder / "tokenizer_config.json").is_file():
            return TokenizerPair.from_pretrained(folder, trust_remote_code), "", False
        trust: Any = {"local_files_only": True, "trust_remote_code": trust_remote_code}
        with tokenizing("be loaded"):
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, **trust, **options_inside(folder))
        return TokenizerPair(tokenizer, tokenizer), "", False
    except Exception as error:
        what = "needs a library" if isinstance(error, ImportError) else "cannot be used"
        return None, f"the tokenizer {what}: {first_line(error)}", not isinstance(error, ImportError)
