"""Heed models as folders of transformers' own classes, which run without our code and without `trust_remote_code`.

Before the folder appears, a process that cannot import Heedful has loaded it, and has given the same ids for
sentences, the same logits, and the same translations, greedily and with beams.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import GenerationConfig

from heedful.checksums_heed import write_checksums
from heedful.data.mixture import languages_of
from heedful.data.tokenization import TokenizerPair
from heedful.data.tokenizer_training import PAD
from heedful.inference.engines import pad_sources
from heedful.inference.loading import load_model
from heedful.publishing.conversion.stock_models import save, start_from_zero, stock_config, stock_model
from heedful.publishing.exports import comparison
from heedful.publishing.hub import check_folder
from heedful.publishing.learning_curve import CURVE_FILE
from heedful.publishing.model_card import CARD_FILE, metadata_of_card, python_string
from heedful.training.model_of_recipe import config_of
from heedful.training.publication import UNDETERMINED, with_decoding
from heedful.training.recipe import Recipe
from heedful.training.run import RunResult

# The largest allowed difference of a logit in float32; relative where logits are above 1.
TOLERANCE = 1e-5
BEAMS = 5
SEARCHED = ("num_beams", "num_return_sequences", "do_sample", "max_new_tokens")  # what a search changes of a config
FORM_FOLDER = "transformers"  # of a run
RUN_SENTENCES = 500
LOGITS_AT_ONCE = 2**24  # so many logits lie in one file for the other process
# The section of a card that tells how to use a model, up to the next one.
USAGE = re.compile(r"^## How to use\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
EXAMPLE = re.compile(r'translate\((".*?[^\\]")[),]')
NEW_USAGE = """## How to use

With transformers alone, 4 or 5: this is a `{kind}`, and no code has to be trusted.

```python
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

repository = {name}

tokenizer = AutoTokenizer.from_pretrained(repository)
model = AutoModelForSeq2SeqLM.from_pretrained(repository)
inputs = tokenizer([{example}], return_tensors="pt", padding=True)
print(tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True)[0])
```

It was trained as a Heed model and written as a `{kind}` by Heedful, which compared the two on {count:,} sentences:
the same translations, greedily and with {beams} beams, and logits that differ by {difference:.1e} at most. A sequence
has at most {limit:,} tokens, and padding stands on the right.

"""


def export_transformers(
    model: str | Path, target: str | Path, sentences: Sequence[str], zero_start: bool = False
) -> comparison.Export:
    """Write a saved Heed model as one of transformers' own classes, and compare the two on sentences.

    `model` is a folder or an id on the Hub, of a Heed model or of an adapter; `target` must not exist, and appears
    whole or not at all. With `zero_start` a Marian's decoder starts as `start_from_zero` says. A `ValueError` names
    the fields that no class of transformers can have, or the sentence for which the written model gives other tokens.
    """
    with comparison.begun_export(model, target, sentences, "transformers") as (loaded, tokenizers, compared, folder):
        comparison.check_one_tokenizer(tokenizers, "a stock form")
        own, stock = loaded.generation_config, stock_model(loaded)
        kept = {name: value for name, value in own.to_dict().items() if name in comparison.SETTINGS["transformers"]}
        stock.generation_config = GenerationConfig.from_dict(kept)
        if zero_start:
            tokenizers.check_is_fast("`zero_start`")
            stock = start_from_zero(stock)
            _pad_with_the_last_token(folder / "tokenizer.json", stock.config.pad_token_id)
            write_checksums(folder, "tokenizer")
        save(stock, folder)
        write_checksums(folder, "weights")
        limit = stock.config.max_position_embeddings
        sources = comparison.encode(tokenizers, compared, limit)
        searches = comparison.searches_of(own, BEAMS)
        with _fresh_model(folder, stock) as fresh:
            fresh.check_ids(tokenizers, compared)
            engines = [comparison.UnscoredEngine(each) for each in (loaded.float(), fresh)]
            comparisons = comparison.compare_engines(engines, compared, sources, searches, limit)
            comparison.refuse(comparisons, "transformers", "float32")
            difference = fresh.logits_difference(loaded, sources, tokenizers.encode_target(compared), limit)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        facts = {"kind": type(stock).__name__, "difference": difference, "count": len(compared), "limit": limit}
        _write_card(Path(model), Path(target).name, folder, facts)
    return comparison.Export(Path(target), str(stock.dtype).removeprefix("torch."), size, comparisons, difference)


@contextmanager
def stock_form(model: str | Path) -> Iterator[Path]:
    """Yield a folder for the Hub with the stock form of a model, which is removed with the context.

    The model's own folder is checked as for a push of it, for its card becomes the other's.
    """
    check_folder(Path(model))
    with tempfile.TemporaryDirectory() as work:
        yield export_transformers(model, Path(work) / "model", comparison.sentences_to_compare(model)).folder


def check_recipe(recipe: Recipe) -> None:
    """Check before a run what `publish.also` asks for at its end: that there is room, and a stock form."""
    if not recipe.publish.also:
        return
    folder, settings = recipe.folder / FORM_FOLDER, recipe.model
    if folder.exists() and not recipe.overwrite:
        raise ValueError(
            f"`publish.also` must be empty where there is {folder}, but is {recipe.publish.also} instead."
        )
    if languages := languages_of(recipe.data.parts):
        must = "empty for a model of several target languages, which no class of transformers is told"
        raise ValueError(
            f"`publish.also` must be {must} ({', '.join(languages)}), but is {recipe.publish.also} instead."
        )
    config: Any = (
        config_of(settings, {}, recipe.tokenizer.joint)
        if settings.start_from is None
        else load_model(settings.start_from).config
    )
    comparison.check_kind(config)
    stock_config(config)
    decoding = with_decoding(GenerationConfig(), recipe.decoding)
    comparison.check_settings(decoding, "transformers", "`publish.also` must be empty, for `decoding` of the recipe")


def export_run(result: RunResult) -> Path:
    """Write the stock form of what a run has published beside it, compared on its validation sentences."""
    sentences = [pair["source"] for pair in result.corpus.validation_pairs[:RUN_SENTENCES]]
    return export_transformers(result.folder, result.recipe.folder / FORM_FOLDER, sentences).folder


def _pad_with_the_last_token(file: Path, last: int) -> None:
    """Add `<pad>` to a tokenizer as its last token, and give the one that was it another name."""
    state = json.loads(file.read_text(encoding="utf-8"))
    pad = next(token for token in state["added_tokens"] if token["content"] == PAD)
    state["added_tokens"].append(pad | {"id": last})
    unused = f"<unused_{pad['id']}>"
    vocabulary = state["model"]["vocab"]
    if isinstance(vocabulary, dict):
        state["model"]["vocab"] = {unused if token == PAD else token: id_ for token, id_ in vocabulary.items()}
    else:  # of Unigram
        vocabulary[pad["id"]][0] = unused
    pad["content"] = unused
    file.write_text(json.dumps(state, ensure_ascii=False), encoding="utf-8")


class _FreshModel(nn.Module):
    """The exported folder in a process of its own, with `generate()` as a model has it."""

    device = torch.device("cpu")

    def __init__(self, process: subprocess.Popen[str], errors: Any, stock: Any):
        super().__init__()
        self.process, self.errors = process, errors
        self.config, self.generation_config = stock.config, stock.generation_config

    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, generation_config: GenerationConfig, **_: Any
    ) -> torch.Tensor:
        """Return the `(batch, length)` tokens for `(batch, source_length)` ids."""
        inputs = {"input_ids": input_ids.tolist(), "attention_mask": attention_mask.tolist()}
        settings = {name: getattr(generation_config, name) for name in SEARCHED}
        return torch.tensor(self.ask(inputs | {"settings": settings}))

    def ask(self, request: dict[str, Any]) -> Any:
        """Return the answer of `fresh_process.py` to a request."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())
        except (OSError, ValueError) as error:  # it has ended
            self.process.wait()
            self.errors.seek(0)
            told = ["nothing", *self.errors.read().strip().splitlines()][-1]
            raise ValueError(
                f"transformers alone cannot run the exported model, so that no folder is left; it says: {told}"
            ) from error

    def check_ids(self, tokenizers: TokenizerPair, sentences: list[str]) -> None:
        """Raise a `ValueError` if the tokenizer there gives other ids."""
        ours = [tokenizers.encode_source(sentences), tokenizers.encode_target(sentences)]
        for side, expected, found in zip(("source", "target"), ours, self.ask({"texts": sentences}), strict=True):
            for sentence, ids, others in zip(sentences, expected, found, strict=True):
                if ids != others:
                    raise ValueError(
                        f"The exported tokenizer must give the {side} {sentence!r} the ids {ids}, but gives {others} "
                        "instead, so that no folder is left."
                    )

    def logits_difference(self, model: Any, sources: list[list[int]], targets: list[list[int]], limit: int) -> float:
        """Return the largest difference of a logit, relative where logits are above 1, beside any targets.

        A `ValueError` is raised if it is more than rounding in float32 explains.
        """
        largest, pad, start = 0.0, model.config.pad_token_id, model.config.decoder_start_token_id
        rows = max(1, LOGITS_AT_ONCE // (max(map(len, targets)) * model.config.vocab_size))
        order = sorted(range(len(sources)), key=lambda number: len(targets[number]))
        with tempfile.TemporaryDirectory() as work, torch.inference_mode():
            for chosen in (order[first : first + rows] for first in range(0, len(order), rows)):
                inputs = pad_sources([sources[number] for number in chosen], pad, self.device)
                read = pad_sources([[start, *targets[number][: limit - 1]] for number in chosen], pad, self.device)
                ids, is_compared = read["input_ids"], read["attention_mask"].bool()
                logits = model(**inputs, decoder_input_ids=ids).logits[is_compared]
                ids[:, 0] = self.config.decoder_start_token_id
                tensors = {**inputs, "decoder_input_ids": ids, "logits": logits, "is_compared": is_compared}
                save_file(tensors, f"{work}/logits.safetensors")
                largest = max(largest, self.ask({"file": f"{work}/logits.safetensors"}))
        if not largest <= TOLERANCE:  # so that not-a-number is refused too
            raise ValueError(
                f"The exported model's logits differ by {largest:.1e} from the model's, so that no folder is left."
            )
        return largest


@contextmanager
def _fresh_model(folder: Path, stock: Any) -> Iterator[_FreshModel]:
    """Yield the exported folder in a process without Heedful, which ends with the context."""
    program = Path(__file__).with_name("fresh_process.py")
    # -P: what lies beside the program cannot be imported by its bare name.
    command = [sys.executable, "-P", str(program), str(folder), str(torch.get_num_threads())]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "utf-8"}
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(command, stderr=errors, **pipes) as process,
    ):
        try:
            yield _FreshModel(process, errors, stock)
        finally:
            process.kill()


def _write_card(source: Path, name: str, folder: Path, facts: dict[str, Any]) -> None:
    """Write the model's own card, or one with little in it, with the code that loads the stock form."""
    text = comparison.card_of(source)
    if not text:
        metadata = metadata_of_card(name, [UNDETERMINED], [], license="unknown").to_yaml()
        text = f"---\n{metadata}\n---\n\n# {name}\n\n## How to use\n"
    example = EXAMPLE.search(text)
    usage = NEW_USAGE.format(name=python_string(name), example=example[1] if example else '"…"', beams=BEAMS, **facts)
    text = USAGE.sub(lambda _: usage, text)
    if (source / CURVE_FILE).is_file():
        shutil.copy(source / CURVE_FILE, folder)
    (folder / CARD_FILE).write_text(text.rstrip() + "\n", encoding="utf-8")
