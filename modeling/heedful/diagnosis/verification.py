"""Does a saved model keep the promises that Heed makes? Checks for any encoder-decoder of transformers.

`verify` runs every check on a folder. Each check is a function that returns a `Finding`, so that tests can say
`check_cache(model).assert_passed()`; those that need nothing but the model are in `model_checks`.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import heedful
from heedful.configuration_base_heed import HEED_TYPES
from heedful.data.tokenization import TARGET_FOLDER, TokenizerPair
from heedful.diagnosis import trials
from heedful.diagnosis.findings import Finding, Measured, Report, SkippedError, check, shown
from heedful.diagnosis.model_checks import (
    check_attentions,
    check_batch,
    check_cache,
    check_determinism,
    check_left_padding,
    check_loss_padding,
    check_loss_split,
    check_order,
    check_right_padding,
    check_saving,
    check_tied_weights,
    told_of_loading,
)
from heedful.diagnosis.trials import TEXTS, Sample, difference, dtype_name, logits_of, make_sample, tolerance_of
from heedful.inference.loading import first_line, resolve_device

# Those that try a model with sentences and write no file.
MODEL_CHECKS = (
    check_batch,
    check_order,
    check_right_padding,
    check_left_padding,
    check_cache,
    check_determinism,
    check_attentions,
    check_loss_split,
    check_loss_padding,
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "spiece.model", "source.spm", "vocab.json", "vocab.txt")


@dataclass
class Verification(Report):
    """What all checks found in one folder, and under which conditions.

    Attributes:
        findings: One for each check.
        folder: The model's folder.
        model: Name of the model's class.
        parameters: Number of parameters, shared ones counted once.
        dtype: In which the checks ran.
        saved_dtype: In which the weights were saved, where the config says so.
        device: On which the checks ran.
    """

    folder: str
    model: str
    parameters: int
    dtype: str
    saved_dtype: str | None
    device: str

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed."""
        return [finding.check for finding in self.at("FAIL")]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON can hold it."""
        conditions = {name: value for name, value in vars(self).items() if name != "findings"}
        verdicts = self.rows(check="check", result="level", figure="figure", limit="limit", told="told")
        for verdict in verdicts:
            for key in ("figure", "limit"):
                if verdict[key] is not None and not math.isfinite(verdict[key]):
                    verdict[key] = str(verdict[key])
        return {**conditions, "verdicts": verdicts, "passed": not self.failed}

    def table(self) -> str:
        """Return the findings as lines of text, with the conditions above them and a summary below."""
        saved = f" (saved in {self.saved_dtype})" if self.saved_dtype not in (None, self.dtype) else ""
        head = f"{self.folder}: {self.model}, {self.parameters:,} parameters, in {self.dtype}{saved} on {self.device}"
        rows = [("check", "result", "worst", "limit", "compared")]
        rows += [(f.check, f.level, shown(f.figure), shown(f.limit), f.told) for f in self.findings]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]) for row in rows]
        counts = f"{len(self.at('pass'))} passed, {len(self.failed)} failed, {len(self.at('skipped'))} skipped"
        return "\n".join([head, "", *lines, "", counts])


@check("weights complete")
def check_weights(folder: str | Path, trust_remote_code: bool = False) -> Measured:
    """Check that the weights in a folder are the model's; the figure is the number of missing and unknown tensors."""
    return told_of_loading(_load(Path(folder), torch.float32, trust_remote_code)[1])


_FRESH_PROCESS = """
import sys
sys.modules["heedful"] = None  # makes its import fail
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM
folder, work, dtype, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
model = AutoModelForSeq2SeqLM.from_pretrained(
    folder, trust_remote_code=True, local_files_only=True, dtype=getattr(torch, dtype)
).eval()
if not type(model).__module__.startswith("transformers_modules."):
    raise ImportError(f"{type(model).__name__} comes from {type(model).__module__}, not from the folder")
with torch.no_grad():
    logits = model(**load_file(work + "/inputs.safetensors"), use_cache=False).logits
save_file({"logits": logits.contiguous()}, work + "/logits.safetensors")
"""


@check("code in the folder")
def check_remote_code(
    folder: str | Path, model: Any, sample: Sample | None = None, trust_remote_code: bool = False
) -> Measured:
    """Check that the code in a model's folder gives the same logits where Heedful is not installed.

    A new process, in which `import heedful` fails, loads the folder with `trust_remote_code=True`. Unless the argument
    of that name is true, only code that is the installed package's to the byte is run.

    Args:
        folder: The saved model.
        model: The same model, loaded.
        sample: Sentences to try it with; random ones by default.
        trust_remote_code: Whether any other code in the folder may run.
    """
    folder = Path(folder)
    if not any(folder.rglob("*.py")):
        raise SkippedError("the folder carries no code")
    if not trust_remote_code and not _code_is_ours(folder):
        raise SkippedError("it is not the installed package's, and would run only with --trust-remote-code")
    from safetensors.torch import load_file, save_file

    sample = sample or make_sample(model)
    with tempfile.TemporaryDirectory() as work:
        inputs = trials.source_inputs(model, sample.sources)
        inputs["decoder_input_ids"] = trials.decoder_inputs(model, sample.targets)
        save_file({name: tensor.cpu().contiguous() for name, tensor in inputs.items()}, f"{work}/inputs.safetensors")
        # -P: no module of the current folder is imported.
        command = [sys.executable, "-P", "-c", _FRESH_PROCESS, str(folder.resolve()), work]
        command += [dtype_name(model.dtype), str(torch.get_num_threads())]
        environment = {**os.environ, "HF_MODULES_CACHE": f"{work}/modules", "HF_HUB_OFFLINE": "1"}
        process = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True, check=False)
        if process.returncode != 0:
            lines = [line for line in process.stderr.splitlines() if line.strip()]
            raise ImportError(f"the new process failed: {lines[-1].strip() if lines else process.returncode}")
        theirs = load_file(f"{work}/logits.safetensors")["logits"]
    rows = [row[: len(target)] for row, target in zip(theirs, sample.targets, strict=True)]
    distance = difference(rows, logits_of(model, sample))
    return distance, tolerance_of(model), "logits here and in a new process that cannot import heedful"


def _code_is_ours(folder: Path) -> bool:
    """Tell whether a folder's code runs nothing but files that are installed here already."""
    package = Path(heedful.__file__).parent
    for path in folder.rglob("*.py"):
        installed = package / path.name
        if path.parent != folder or not installed.is_file() or installed.read_bytes() != path.read_bytes():
            return False
    for name in ("config.json", "tokenizer_config.json"):
        path = folder / name
        # "owner/repository--file.Class" names code elsewhere.
        if path.is_file() and "--" in json.dumps(json.loads(path.read_text(encoding="utf-8")).get("auto_map")):
            return False
    return True


@check("special ids")
def check_special_ids(model: Any, tokenizers: TokenizerPair | None = None) -> Measured:
    """Check that tokenizers, config and generation config agree on special ids and vocabulary sizes.

    Without tokenizers only the two configs are compared. The figure is the number of disagreements.
    """
    faults = []
    for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id"):
        ids = {
            "config": getattr(model.config, name, None),
            "generation config": getattr(model.generation_config, name, None),
            "tokenizer": getattr(tokenizers.target, name, None) if tokenizers else None,
        }
        ids = {where: id_ for where, id_ in ids.items() if id_ is not None}
        given = [set(id_ if isinstance(id_, list) else [id_]) for id_ in ids.values()]
        # A model may end at more tokens than its tokenizer's one.
        if not given or not set.intersection(*given):
            told = ", ".join(f"{id_} in the {where}" for where, id_ in ids.items())
            faults.append(f"{name}: {told or 'set nowhere'}")
    sizes = trials.vocabulary_sizes(model)
    if model.config.model_type in HEED_TYPES:
        configured = zip((model.config.vocab_size, model.config.decoder_vocab_size), sizes, strict=True)
        faults += [f"vocabulary: {ours} in the config, {rows} rows" for ours, rows in configured if ours != rows]
    if tokenizers is not None:
        faults += _tokenizer_faults(model, tokenizers, sizes)
    if faults:
        return len(faults), 0, "; ".join(faults)
    compared = "config and generation config" + (" and tokenizers" if tokenizers is not None else " (no tokenizer)")
    return 0, 0, f"pad, end, start and vocabulary sizes of {compared}"


def _tokenizer_faults(model: Any, tokenizers: TokenizerPair, sizes: tuple[int, int]) -> list[str]:
    """Tell where a model's vocabulary sizes and start token are not those of its tokenizers."""
    faults = []
    is_heed = model.config.model_type in HEED_TYPES
    sides = (("source", tokenizers.source), ("target", tokenizers.target))
    for (side, tokenizer), rows in zip(sides, sizes, strict=True):
        # Some models round their vocabulary up; Heed's do not, and its Translator insists.
        if len(tokenizer) > rows or (is_heed and len(tokenizer) != rows):
            faults.append(f"{side} vocabulary: {len(tokenizer)} tokens in the tokenizer, {rows} rows in the model")
    start = trials.special_token(model, "decoder_start_token_id")
    expected = tokenizers.special_ids()["decoder_start_token_id"]
    if is_heed and start != expected:
        faults.append(f"decoder_start_token_id: {start}, but {expected} by tokenizer")
    return faults


@check("tokenizer round trip")
def check_round_trip(tokenizers: TokenizerPair, texts: Sequence[str] = TEXTS) -> Measured:
    """Check that texts which are encoded and decoded come back (in Unicode's form NFC).

    Both tokenizers are tried where there are two. The figure is the number of texts that come back changed; the first
    of them is shown.
    """
    changed: dict[str, str] = {}
    for encode, tokenizer in _sides(tokenizers):
        batch = encode(list(texts))
        backs = tokenizer.batch_decode(batch, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for text, back in zip(texts, backs, strict=True):
            if back != unicodedata.normalize("NFC", text):
                changed.setdefault(text, back)
    if not changed:
        return 0, 0, f"{len(texts)} texts encoded and decoded"
    text, back = next(iter(changed.items()))
    told = f"{len(changed)} of {len(texts)} texts come back changed: {text!r} as {back!r}"
    # A small closed vocabulary is made for some texts only.
    return len(changed), 0, told + (" (try texts of your own)" if texts is TEXTS else "")


@check("special tokens in a text")
def check_special_text(tokenizers: TokenizerPair) -> Measured:
    """Check that "<s>" or "</s>" written in a text stays text; the figure is how many such become special tokens."""
    tokens = dict.fromkeys([*tokenizers.source.all_special_tokens, *tokenizers.target.all_special_tokens])
    smuggled: dict[str, None] = {}
    for encode, tokenizer in _sides(tokenizers):
        # The unknown token controls nothing, and any text may hold what is unknown.
        special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        expected, *counts = (
            sum(id_ in special for id_ in ids) for ids in encode(["a b", *(f"a {token} b" for token in tokens)])
        )
        smuggled |= dict.fromkeys(token for token, count in zip(tokens, counts, strict=True) if count != expected)
    if smuggled:
        return len(smuggled), 0, f"taken for special tokens: {', '.join(list(smuggled)[:4])}"
    return 0, 0, f"{len(tokens)} special tokens, such as {next(iter(tokens), None)!r}, written in a text"


def _sides(tokenizers: TokenizerPair) -> list[tuple[Callable[[list[str]], list[list[int]]], Any]]:
    """Return how each different tokenizer encodes, and the tokenizer."""
    language = tokenizers.languages[0] if len(tokenizers.languages) > 1 else None
    sides: list[tuple[Callable[[list[str]], list[list[int]]], Any]] = [(tokenizers.encode_target, tokenizers.target)]
    if not tokenizers.is_joint:
        sides.append((lambda texts: tokenizers.encode_source(texts, language), tokenizers.source))
    return sides


def verify(
    folder: str | Path,
    texts: Sequence[str] = (),
    *,
    device: str | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    trust_remote_code: bool = False,
) -> Verification:
    """Run every check on a saved encoder-decoder.

    Args:
        folder: A local folder with config.json and weights; tokenizers are tried too where it has them.
        texts: Texts to try model and tokenizers with; by default built-in ones of several scripts.
        device: "cpu", "cuda", "cuda:1", "mps"; None takes CUDA where there is one, else the CPU.
        dtype: To compute in. float32 shows faults that rounding hides in the others.
        trust_remote_code: Whether code in the folder may run that is not the installed package's.

    Raises:
        FileNotFoundError: If there is no such folder, or no config in it.
        ValueError: If it holds no encoder-decoder that can be loaded, or `texts` are given and it has no
            tokenizer.
    """
    folder, target = Path(folder), resolve_device(device)
    model, report = _load(folder, getattr(torch, dtype), trust_remote_code)
    model = model.to(target).eval()
    tokenizers, reason, is_broken = _load_tokenizers(folder, trust_remote_code)
    if texts and tokenizers is None:
        raise ValueError(f"`texts` must be left out where nothing can encode them, but {reason}.")
    sample = make_sample(model, tokenizers, texts)
    findings = [check("weights complete")(told_of_loading)(report), check_saving(model, sample)]
    findings += [check_tied_weights(model), check_remote_code(folder, model, sample, trust_remote_code)]
    findings += [check_model(model, sample) for check_model in MODEL_CHECKS]
    findings.append(Finding("special ids", "FAIL", reason) if is_broken else check_special_ids(model, tokenizers))
    if tokenizers is None:
        names = ("tokenizer round trip", "special tokens in a text")
        findings += [Finding(name, "skipped", reason) for name in names]
    else:
        findings += [check_round_trip(tokenizers, texts or TEXTS), check_special_text(tokenizers)]
    return Verification(
        findings,
        folder=str(folder),
        model=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=dtype,
        saved_dtype=json.loads((folder / "config.json").read_text(encoding="utf-8")).get("dtype"),
        device=str(target),
    )


def _load(folder: Path, dtype: torch.dtype, trust_remote_code: bool) -> tuple[Any, dict[str, Any]]:
    """Load a model and what `from_pretrained` reports of its weights; faulty ones are for a check to tell."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} must be a folder with a model, but {'is a file' if folder.is_file() else 'does not exist'}."
            " (A model on the Hub must be downloaded first: huggingface_hub.snapshot_download.)"
        )
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} must hold a model, but has no config.json.")
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(folder, **local)
        if not config.is_encoder_decoder:
            raise ValueError(f"an encoder-decoder is needed, but {config.model_type!r} is none")
        # Weights of other shapes are in the report; transformers' error names none of them.
        told: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, report = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=dtype, **told, **local)
    # The libraries below raise whatever they like for a broken file.
    except Exception as error:
        raise ValueError(f"The model in {folder} cannot be loaded: {first_line(error)}") from error
    return model, report


def _load_tokenizers(folder: Path, trust_remote_code: bool) -> tuple[TokenizerPair | None, str, bool]:
    """Load the tokenizers of a folder; without, tell why, and whether there are any, which are broken."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None, "the folder holds no tokenizer", False
    from transformers import AutoTokenizer

    try:
        if (folder / TARGET_FOLDER).is_dir() or _is_of_heed(folder):
            return TokenizerPair.from_pretrained(folder), "", False
        # `AutoTokenizer` asks on the terminal unless it is told whether to trust.
        tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
        return TokenizerPair(tokenizer, tokenizer), "", False
    except ImportError as error:
        return None, f"the tokenizer needs a library: {first_line(error)}", False
    except Exception as error:
        return None, f"the tokenizer cannot be used: {first_line(error)}", True


def _is_of_heed(folder: Path) -> bool:
    """Tell whether `TokenizerPair.save_pretrained` wrote a folder's tokenizer, or something just like it."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return settings.get("tokenizer_class") == "PreTrainedTokenizerFast"
