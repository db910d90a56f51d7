"""Heed models as transformers' own classes, without our code, compared in a process without Heedful.

A Heed model of the paper's shape is a Marian with reordered features: Marian has all sines before all cosines.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from heedful.cards.hub import check_folder
from heedful.cards.learning_curve import CURVE_FILE
from heedful.cards.model_card import CARD_FILE, metadata_of_card, render
from heedful.checksums_heed import write_checksums
from heedful.configuration_heed import HeedConfig
from heedful.conversion.families import FAMILIES, T5Family, field_faults, stock_kind
from heedful.data.sources import sample
from heedful.decoding.engines import count_tokens, pad_sources
from heedful.decoding.loading import load_model
from heedful.export import comparison, fresh_process
from heedful.files import read_object, write_text
from heedful.messages_heed import wrong
from heedful.modeling_heed import HeedForConditionalGeneration
from heedful.training.model_of_recipe import config_of
from heedful.training.preparation import named_tokenizers
from heedful.training.publication import UNDETERMINED, with_decoding
from heedful.training.recipe import Recipe
from heedful.training.run import RunResult

TOLERANCE = 1e-5  # largest allowed logit difference in float32, relative if above 1
BEAMS = 5
SEARCHED = ("num_beams", "num_return_sequences", "do_sample", "max_new_tokens")  # fields that a search changes
FORM_FOLDER = "transformers"  # in a run's folder
RUN_SENTENCES = 500
LOGITS = 2**25  # most logits compared; the other process writes them to a file
USAGE = re.compile(r"^## How to use\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)  # the card section that changes


def export_transformers(model: str | Path, target: str | Path, sentences: Sequence[str]) -> comparison.Export:
    """Write a Heed model as a transformers class, compared on sentences."""
    with comparison.begun_export(model, target, sentences, "transformers") as draft:
        folder, stock = draft.folder, stock_model(draft.model)
        settings = draft.model.generation_config.to_dict().items()
        kept = {name: value for name, value in settings if name in comparison.SETTINGS["transformers"]}
        stock.generation_config = GenerationConfig.from_dict(kept)
        save(stock, folder, draft.dtype)
        _name_as_version_4(folder)
        write_checksums(folder, "tokenizer")
        write_checksums(folder, "weights")
        comparisons, difference, read = _compare(draft, stock.config)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        found = {"count": len(draft.sentences), "difference": difference, "read": read}
        _write_card(Path(model), Path(target).name, folder, stock, **found)
    return comparison.Export(Path(target), str(draft.dtype).removeprefix("torch."), size, comparisons, difference)


@contextmanager
def stock_form(model: str | Path) -> Iterator[Path]:
    """Yield a temporary folder with a model's stock form, after the checks for a push."""
    check_folder(Path(model))
    with tempfile.TemporaryDirectory() as work:
        yield export_transformers(model, Path(work) / "model", comparison.sentences_to_compare(model)).folder


def check_recipe(recipe: Recipe) -> None:
    """Check before a run that the model for `publish.also` has a stock form, and that the folder is free."""
    if not recipe.publish.also:
        return
    folder, start, where = recipe.folder / FORM_FOLDER, recipe.model.start_from, None
    given = named_tokenizers(recipe.given_tokenizer)
    if len(languages := given.languages if given else recipe.data.languages) > 1:
        names = ", ".join(languages)
        where = f"for a model with several target languages ({names}), because no transformers class supports them"
    elif folder.exists() and not recipe.overwrite:
        where = f"because {folder} exists"
    if where is not None:
        raise wrong("publish.also", f"be empty {where}", recipe.publish.also)
    config: Any = load_model(start).config if start else config_of(recipe.model, {}, recipe.tokenizer.joint)
    comparison.check_kind(config, "transformers")
    stock_config(config)
    decoding = with_decoding(GenerationConfig(), recipe.decoding)
    comparison.check_settings(decoding, "transformers", "`publish.also` must be empty: the recipe's `decoding`")


def export_run(result: RunResult) -> Path:
    """Write the published model's stock form after a run, compared on validation sentences."""
    sentences = [pair["source"] for pair in sample(result.corpus.validation_pairs, RUN_SENTENCES)]
    return export_transformers(result.folder, result.recipe.folder / FORM_FOLDER, sentences).folder


def stock_config(config: HeedConfig) -> PreTrainedConfig:
    """Return the equivalent stock config; a `ValueError` names unsupported fields."""
    kind = stock_kind(config)
    family = FAMILIES[kind]
    if faults := list(field_faults(config, family.write_choices(config))):
        nearest = f"not even as {family.model_class}, the nearest class"
        raise ValueError(f"The model has no stock form, {nearest}: {' '.join(faults)}")
    options = family.stock_options(config)
    options |= {name: getattr(config, name) for name in ("bos_token_id", "vocab_size")}
    # Some classes would force an end token onto cut-off outputs.
    return AutoConfig.for_model(kind, **options, forced_eos_token_id=None, forced_bos_token_id=None)


def stock_model(ours: HeedForConditionalGeneration) -> PreTrainedModel:
    """Return the stock model with copied weights, in evaluation mode. It raises the errors of `stock_config`."""
    config = stock_config(ours.config)
    if ours.config.position_encoding == "sinusoidal":  # their table must be long enough
        config.max_position_embeddings = max(config.max_position_embeddings, ours.generation_config.max_length or 0)
    family = FAMILIES[config.model_type]
    theirs: Any = getattr(transformers, family.model_class)(config)
    theirs.load_state_dict(family.stock_weights(ours, theirs), strict=True)
    return theirs.to(ours.dtype).eval()


def save(stock: Any, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Save a stock model in a dtype; values that it would round stay in float32."""
    stock.save_pretrained(folder)
    config, weights = read_object(folder / CONFIG_NAME), load_file(folder / SAFE_WEIGHTS_NAME)
    if isinstance(FAMILIES[stock.config.model_type], T5Family):
        # transformers 5 treats each T5 as tied and checks the file; before, it used the config.
        config["tie_word_embeddings"] = stock.lm_head.weight is stock.shared.weight
    for name, weight in weights.items():
        if torch.equal(weight.to(dtype).float(), weight):
            weights[name] = weight.to(dtype)
    save_file(weights, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
    config["dtype"] = str(dtype).removeprefix("torch.")
    write_text(folder / CONFIG_NAME, json.dumps(config, indent=2) + "\n")


def _name_as_version_4(folder: Path) -> None:
    """Write special tokens, such as T5's sentinels, under the name that every version uses."""
    config = read_object(folder / "tokenizer_config.json")
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
        write_text(folder / "tokenizer_config.json", json.dumps(config, ensure_ascii=False, indent=2) + "\n")


def _compare(draft: comparison.Draft, config: Any) -> tuple[dict[str, comparison.Comparison], float, int]:
    """Compare the exported folder; return the comparisons, the logit difference, and the number of sentences."""
    ours, limit = draft.model, getattr(config, "max_position_embeddings", None)  # T5 has none
    sources = comparison.encode(draft.tokenizers, draft.sentences, limit)
    searches, pad = comparison.searches_of(ours.generation_config, BEAMS), ours.config.pad_token_id

    def padded(rows: Sequence[list[int]]) -> dict[str, torch.Tensor]:
        return pad_sources(rows, pad, torch.device("cpu"))

    batches, asked = [], []
    for name, search in searches.items():
        for numbers in comparison.batches(sources, search, limit):
            batches.append((name, numbers))
            settings = {setting: getattr(search, setting) for setting in SEARCHED}
            asked.append((settings, padded([sources[number] for number in numbers])))
    targets = draft.tokenizers.encode_target(draft.sentences)
    start, rows = ours.config.decoder_start_token_id, LOGITS // (max(map(len, targets)) * ours.config.vocab_size)
    read = padded([[start, *row[: limit and limit - 1]] for row in targets[: max(1, rows)]])
    inputs = padded(sources[: max(1, rows)]) | {"decoder_input_ids": read["input_ids"]}
    answer = fresh_process.ask(draft.folder, inputs, asked, texts=draft.sentences)
    for side, own, theirs in zip(("source", "target"), (sources, targets), answer["ids"], strict=True):
        for sentence, expected, found in zip(draft.sentences, own, theirs, strict=True):
            if expected != found:
                wrong = f"the ids {expected}, but gives {found} instead, so no folder is written"
                raise ValueError(f"The exported tokenizer must give the {side} {sentence!r} {wrong}.")
    outputs: comparison.Outputs = {name: [()] * len(sources) for name in searches}
    for (name, numbers), (_, batch), tokens in zip(batches, asked, answer["tokens"], strict=True):
        counts, _ = count_tokens(tokens, batch["attention_mask"], searches[name], draft.tokenizers.target)
        for number, row, count in zip(numbers, tokens.tolist(), counts.tolist(), strict=True):
            outputs[name][number] = tuple(row[1 : count + 1])
    comparisons = draft.compare(outputs, searches, limit, "transformers", "float32")
    is_compared = read["attention_mask"].bool()
    with torch.inference_mode():
        logits = ours(**inputs).logits[is_compared]
    difference = comparison.logits_difference(logits, answer["logits"][is_compared], TOLERANCE)
    return comparisons, difference, len(read["input_ids"])


def _write_card(source: Path, name: str, folder: Path, stock: Any, **facts: Any) -> None:
    card = comparison.card_of(source)
    usage = USAGE.search(card)
    example = re.findall(r"^inputs = tokenizer\(.*$", usage[0] if usage else "", re.MULTILINE)
    metadata = None if card else metadata_of_card(name, [UNDETERMINED], [], license="unknown")
    section = render(
        "stock_usage_template.md", metadata, name=name, kind=type(stock).__name__, example=next(iter(example), None),
        beams=BEAMS, limit=getattr(stock.config, "max_position_embeddings", None), **facts,
    )  # fmt: skip
    text = USAGE.sub(lambda _: f"{section}\n", card) if usage else f"{card.rstrip()}\n\n{section}".lstrip()
    write_text(folder / CARD_FILE, text.rstrip() + "\n")
    if (source / CURVE_FILE).is_file():
        shutil.copy(source / CURVE_FILE, folder)
