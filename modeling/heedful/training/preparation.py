"""From a recipe to what the loop needs: tokenizers, training rows, validation pairs, and a model of the right size."""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator

from heedful.data.batching import UpdateBatches, stream_updates
from heedful.data.cleaning import CleaningReport, clean_pairs
from heedful.data.encoding import EncodedPairs, PairEncoder
from heedful.data.sources import read_pairs
from heedful.data.tokenization import TokenizerPair
from heedful.data.tokenizer_training import train_tokenizers
from heedful.files import written_whole
from heedful.training.processes import encode_together
from heedful.training.recipe import ModelRecipe, Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

Row = dict[str, list[int]]
# Model types that a recipe can make.
KINDS = ("heed", "heed_rnn")


@dataclass
class Corpus:
    """Training rows and validation pairs of one run.

    Attributes:
        tokenizers: The model's tokenizers.
        updates: Makes the updates of an epoch from its number: each a list of buckets of rows.
        validation: Validation pairs, encoded.
        validation_pairs: The same pairs as text.
        report: What cleaning kept and dropped.
        encoder: Counts the rows that were too long.
        pairs: Number of training rows, or `None` for a stream that has not come to its end yet.
        languages: Target languages of the model's directions, if it has several.
        fingerprint: A checksum of validation and training rows, of the latter unless they are a stream.
    """

    tokenizers: TokenizerPair
    updates: Any
    validation: EncodedPairs
    validation_pairs: list[dict[str, str]]
    report: CleaningReport
    encoder: PairEncoder
    pairs: int | None = None
    languages: tuple[str, ...] = field(default_factory=tuple)
    fingerprint: str = ""


def prepare_corpus(recipe: Recipe, folder: Path, accelerator: Accelerator | None = None) -> Corpus:
    """Read, clean, tokenize and encode what the recipe names.

    Args:
        recipe: The run.
        folder: Where the run's tokenizers lie; they are trained and saved there unless they exist.
        accelerator: The processes that need the same corpus; the main one writes. Without it there is one process.

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If the data are unusable, or nothing is left of them.
    """
    data = recipe.data
    source, target = data.source, data.target
    validation = list(read_pairs(data.location(data.validation), source, target, split="validation"))
    tests = [read_pairs(data.location(where), source, target, split=name) for name, where in data.test.items()]
    pairs = read_pairs(data.location(data.train), source, target, split="train", streaming=data.streaming)
    pairs, report = clean_pairs(pairs, data.cleaning, held_out=chain(validation, *tests))
    languages = (data.target, data.source) if data.both_directions else ()
    is_main = accelerator is None or accelerator.is_main_process
    tokenizers = load_or_train_tokenizers(recipe, pairs, folder, is_main)
    encoder = PairEncoder(tokenizers, data.max_source_tokens, data.max_target_tokens, languages)
    held_out = EncodedPairs(PairEncoder(tokenizers, languages=languages).rows(validation))
    corpus = Corpus(tokenizers, None, held_out, validation, report, encoder, languages=languages)
    corpus.fingerprint = held_out.fingerprint()
    if data.streaming:

        def updates(epoch: int) -> Iterator[list[list[Row]]]:
            rows = encoder.rows(pairs) if accelerator is None else encode_together(encoder, pairs, accelerator)
            return _counted(corpus, stream_updates(rows, pool_size=data.pool_size, epoch=epoch, **_batching(recipe)))

        corpus.updates = updates
        return corpus
    rows = EncodedPairs(encoder.rows(pairs))
    if not len(rows):
        raise no_pair_left(encoder)
    batches = UpdateBatches(rows.source_lengths, rows.target_lengths, **_batching(recipe))
    corpus.pairs = len(rows)
    corpus.fingerprint += rows.fingerprint()
    corpus.updates = lambda epoch: _rows_of(batches, rows, epoch)
    return corpus


def _batching(recipe: Recipe) -> dict[str, int]:
    return {
        "tokens_per_update": recipe.optimization.tokens_per_update,
        "buckets_per_update": recipe.optimization.buckets_per_update,
        "seed": recipe.seed,
    }


def _counted(corpus: Corpus, updates: Iterator) -> Iterator[list[list[Row]]]:
    """Pass on the updates of a stream, whose number of rows is known at its end."""
    rows = 0
    for update in updates:
        rows += sum(map(len, update))
        yield update
    if not rows:
        raise no_pair_left(corpus.encoder)
    corpus.pairs = rows


def no_pair_left(encoder: PairEncoder) -> ValueError:
    """Return the error for a corpus without a row."""
    return ValueError(
        f"No training pair is left: {encoder.too_long} are longer than `data.max_source_tokens` "
        f"({encoder.max_source_tokens}) or `data.max_target_tokens` ({encoder.max_target_tokens})."
    )


def _rows_of(batches: UpdateBatches, rows: EncodedPairs, epoch: int) -> Iterator[list[list[Row]]]:
    for update in batches.epoch(epoch):
        yield [[rows[index] for index in bucket] for bucket in update]


def load_or_train_tokenizers(recipe: Recipe, pairs, folder: Path, is_main: bool) -> TokenizerPair:
    """Load the tokenizers the recipe names or the run has already trained; otherwise train and save them.

    Args:
        recipe: The run.
        pairs: Cleaned training pairs.
        folder: Where the run keeps its tokenizers.
        is_main: Whether this process may write.

    Raises:
        ValueError: If the vocabulary is larger than the data allow.
    """
    settings = recipe.tokenizer
    given = settings.path or recipe.model.start_from
    if given is not None:
        return TokenizerPair.from_pretrained(given)
    if folder.is_dir():
        return TokenizerPair.from_pretrained(folder)
    logger.info("training the tokenizer (%s, %s tokens)", settings.algorithm, settings.vocab_size or "all")
    tokenizers = train_tokenizers(
        (pair["source"] for pair in islice(pairs, settings.sentences)),
        (pair["target"] for pair in islice(pairs, settings.sentences)),
        algorithm=settings.algorithm,
        vocab_size=settings.vocab_size,
        joint=settings.joint,
        target_vocab_size=settings.target_vocab_size,
        languages=(recipe.data.source, recipe.data.target) if recipe.data.both_directions else (),
    )
    if is_main:
        # A run that dies here leaves no half-written tokenizer to resume with.
        with written_whole(folder) as partial:
            tokenizers.save_pretrained(partial)
    return tokenizers


def make_model(recipe: Recipe, tokenizers: TokenizerPair) -> "PreTrainedModel":
    """Make the recipe's model with fresh weights, or load the one it goes on from.

    Sizes of vocabularies and special ids come from the tokenizers, so that the two cannot disagree.

    Raises:
        FileNotFoundError: If the config or the model does not exist.
        ValueError: If the config is not one, or contradicts the tokenizers.
    """
    from heedful.inference.loading import load_model

    if recipe.model.start_from is not None:
        model = load_model(recipe.model.start_from)
        tokenizers.check_config(model.config)
        if recipe.model.attn_implementation is not None:
            model.set_attn_implementation(recipe.model.attn_implementation)
        return model
    options = read_config(recipe.model.config) if recipe.model.config is not None else {}
    options |= recipe.model.options
    wired: dict[str, int | None] = {"vocab_size": len(tokenizers.source), "decoder_vocab_size": len(tokenizers.target)}
    wired |= tokenizers.special_ids()
    for name in wired.keys() & recipe.model.options.keys():
        if options[name] != wired[name]:
            raise ValueError(
                f"`model.options.{name}` must be left to the tokenizer, which sets it to {wired[name]}, "
                f"but is {options[name]} instead."
            )
    if not tokenizers.is_joint:
        options["share_encoder_decoder_embeddings"] = False
    kind = options.pop("model_type", "heed")
    if kind not in KINDS:
        raise ValueError(f"`model.options.model_type` must be {' or '.join(KINDS)}, but is {kind} instead.")
    if kind == "heed_rnn":
        return _make_recurrent_model(recipe.model, options | wired)
    from heedful.configuration_heed import HeedConfig
    from heedful.modeling_heed import HeedForConditionalGeneration

    config = HeedConfig(**options | wired)
    if recipe.model.attn_implementation is not None:
        config._attn_implementation = recipe.model.attn_implementation
    return HeedForConditionalGeneration(config)


def _make_recurrent_model(recipe: ModelRecipe, options: dict[str, Any]) -> "PreTrainedModel":
    """Make a recurrent model of a config's fields, for which some of the recipe's settings mean nothing."""
    from heedful.configuration_heed_rnn import HeedRNNConfig
    from heedful.modeling_heed_rnn import HeedRNNForConditionalGeneration

    if recipe.attn_implementation is not None:
        raise ValueError(
            "`model.attn_implementation` must be empty for a recurrent model, which has one way to attend, "
            f"but is {recipe.attn_implementation!r} instead."
        )
    if recipe.gradient_checkpointing:
        raise ValueError("`model.gradient_checkpointing` must be false for a recurrent model, but is true instead.")
    return HeedRNNForConditionalGeneration(HeedRNNConfig(**options))


def read_config(path: str | Path) -> dict[str, Any]:
    """Read a config.json, or the one of a folder, as a dictionary of fields.

    Raises:
        FileNotFoundError: If it does not exist.
        ValueError: If it is not JSON.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"The model config {path} (`model.config`) does not exist.")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"The model config {path} (`model.config`) must be JSON, but is not: {error}") from error
    kind = fields.get("model_type", "heed") if isinstance(fields, dict) else type(fields).__name__
    if kind not in KINDS:
        raise ValueError(
            f"The model config {path} (`model.config`) must be of type {' or '.join(KINDS)}, but is of {kind} instead."
        )
    return {name: value for name, value in fields.items() if name not in ("architectures", "transformers_version")}
