"""Sentences for testing any encoder-decoder, and its outputs: alone, in a batch, padded, step by step."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from heedful.configuration_base_heed import IGNORED_LABEL, position_limit, special_token
from heedful.data.epochs.draws import CASES
from heedful.data.tokenization import TokenizerPair
from heedful.decoding.engines import evaluation_mode
from heedful.protocols import Seq2SeqModel
from heedful.symbols_heed import symbols_of
from heedful.versions_heed import CACHE, cache_of

Item = TypeVar("Item")
Rows = Sequence[Sequence[int]]  # sentences as token ids

# Different scripts and very different lengths, in NFC.
TEXTS = (
    "Good morning!",
    "The committee, which had met only twice since 3 May, agreed that prices would rise by 4.5 % (or €12.80) a year.",
    "안녕하세요, 오늘은 날씨가 참 좋네요. 내일 오후 3시에 도서관 앞에서 만날까요?",
    "Größere Straßen führen über Köln nach Brüssel; „ça va“, dit-elle.",
    "В лесу родилась ёлочка, в лесу она росла.",
    "我们明天上午九点开会。",
    "今日は、元気ですか？",
    "كيف حالك اليوم؟",
    "हम कल सुबह मिलेंगे।",
    "Emoji 🙂 and mathematics: x² ≤ ½, two  spaces, a_name and user@example.org.",
)
# What users type too.
INPUTS: dict[str, Callable[[str], str]] = {
    "one word": lambda text: " ".join(text.split()[:1]),
    "all capitals": CASES["upper_case"],
    "title case": CASES["title_case"],
    "empty input": lambda _: " \u200b\u3000",
    "junk": lambda text: f"#@%& {text[::-1].swapcase()} asdf jkl; ?!?!?! 0987 \ufffd 🙂🙃 </b> {{0}}",
}
# Different lengths, so that each row has different padding.
SOURCE_LENGTHS = (5, 32, 2, 20, 9, 27)
TARGET_LENGTHS = (9, 4, 16, 1, 12, 7)
EXTRA_PADDING = 5
NEW_TOKENS = 12
# Largest relative logit and loss difference. In float32, reordered sums differ by 1e-6, a wrong mask by 1e-2.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2}
ROUGH = 5e-2  # for bfloat16 and less precise types


def tolerance_of(model: Seq2SeqModel) -> float:
    """Return the largest relative difference for a model's dtype."""
    return TOLERANCES.get(model.dtype, ROUGH)


@dataclass(frozen=True)
class Sample:
    """Sentences with different lengths."""

    sources: Rows
    targets: Rows  # labels, without the start token

    def __len__(self) -> int:
        return len(self.sources)

    def part(self, rows: slice) -> "Sample":
        """Return some of the sentences."""
        return Sample(self.sources[rows], self.targets[rows])

    @property
    def label_count(self) -> int:
        """Number of target tokens."""
        return sum(map(len, self.targets))


@dataclass(frozen=True)
class Variation:
    """A way to run sentences that must not change the outputs."""

    padding: int = 0  # more padding tokens than a batch needs
    side: str = "right"  # padding side
    is_alone: bool = False  # each sentence in a separate batch
    is_reversed: bool = False  # in reverse order
    uses_other_cache: bool = False  # logits with a cache, and generation without


PLAIN = Variation()


def make_sample(model: Seq2SeqModel, tokenizers: TokenizerPair | None = None, texts: Sequence[str] = ()) -> Sample:
    """Make six rows with 2 to 32 source and 1 to 16 target tokens, from texts or at random, always the same."""
    longest = position_limit(model.config) or 10**6
    if longest < 10:
        raise ValueError(f"The model must have at least 10 positions to be checked, but has {longest} instead.")
    share = min(1.0, (longest - EXTRA_PADDING - 1) / max(SOURCE_LENGTHS))
    lengths = [[max(1, int(length * share)) for length in side] for side in (SOURCE_LENGTHS, TARGET_LENGTHS)]
    rows = _rows_of_texts(model, tokenizers, texts, lengths) if tokenizers else None
    return Sample(*(rows or _random_rows(model, tokenizers, lengths)))


def _rows_of_texts(
    model: Seq2SeqModel, tokenizers: TokenizerPair, texts: Sequence[str], lengths: Rows
) -> list[Rows] | None:
    """Cut rows with given lengths from encoded texts; `None` without texts, or if the model lacks an id."""
    is_closed = any(symbols_of(each) is not None for each in (tokenizers.source, tokenizers.target))
    texts = list(filter(str.strip, [*texts, *(() if is_closed else TEXTS)]))
    if not texts:
        return None
    language = tokenizers.languages[0] if len(tokenizers.languages) > 1 else None
    encoded = tokenizers.encode_source(texts, language), tokenizers.encode_target(texts[1:] + texts[:1])
    sides: list[Rows] = []
    for rows, wanted, size in zip(encoded, lengths, vocabulary_sizes(model), strict=True):
        cut = [[id_ for row in rows[number:] + rows for id_ in row][:length] for number, length in enumerate(wanted)]
        if not all(0 <= id_ < size for row in cut for id_ in row):
            return None
        sides.append(cut)
    return sides


def _random_rows(model: Seq2SeqModel, tokenizers: TokenizerPair | None, lengths: Rows) -> list[Rows]:
    settings = [*model.config.to_dict().items(), *model.generation_config.to_dict().items()]
    special = {id_ for name, value in settings if name.endswith("token_id") for id_ in id_set(value)}
    special |= {pad_token(model), start_token(model)}
    if tokenizers is not None:
        special |= {*tokenizers.source.all_special_ids, *tokenizers.target.all_special_ids}
    generator, sides = torch.Generator().manual_seed(0), list[Rows]()
    for wanted, size in zip(lengths, vocabulary_sizes(model), strict=True):
        ordinary = torch.tensor([id_ for id_ in range(size) if id_ not in special] or [0])
        drawn = [torch.randint(len(ordinary), (length,), generator=generator) for length in wanted]
        sides.append([ordinary[indices].tolist() for indices in drawn])
    return sides


def vocabulary_sizes(model: Seq2SeqModel) -> tuple[int, int]:
    """Return the row counts of source embeddings and output layer."""
    return model.get_input_embeddings().weight.shape[0], model.get_output_embeddings().weight.shape[0]


def id_set(ids: int | list[int] | None) -> set[int]:
    """Return a setting's ids: one, several or none."""
    return set() if ids is None else set(ids) if isinstance(ids, list) else {ids}


def pad_token(model: Seq2SeqModel) -> int:
    """Return the padding id, or any other if the model has none, because it is masked."""
    return special_token(model, "pad_token_id", "decoder_start_token_id", "bos_token_id") or 0


def start_token(model: Seq2SeqModel) -> int:
    """Return the decoder's first input."""
    return special_token(model, "decoder_start_token_id", "bos_token_id", "pad_token_id") or 0


def padded(model: Seq2SeqModel, rows: Rows, fill: int, side: str = "right", extra: int = 0) -> torch.Tensor:
    """Return rows as ids `(batch, longest + extra)`, padded on one side."""
    tensors = [torch.tensor(row) for row in rows]
    stacked = pad_sequence(tensors, batch_first=True, padding_value=fill, padding_side=side)
    return pad(stacked, (extra, 0) if side == "left" else (0, extra), value=fill).to(model.device)


def source_inputs(model: Seq2SeqModel, sources: Rows, variation: Variation = PLAIN) -> dict[str, torch.Tensor]:
    """Return `input_ids` and `attention_mask`, `(batch, longest + padding)`."""
    ids = padded(model, sources, pad_token(model), variation.side, variation.padding)
    mask = padded(model, [[1] * len(row) for row in sources], 0, variation.side, variation.padding)
    return {"input_ids": ids, "attention_mask": mask}


def decoder_inputs(model: Seq2SeqModel, targets: Rows) -> torch.Tensor:
    """Return the decoder's input ids: the start token, and all but the last target token."""
    return padded(model, [(start_token(model), *row[:-1]) for row in targets], pad_token(model))


def labels_of(model: Seq2SeqModel, targets: Rows, extra: int = 0) -> torch.Tensor:
    """Return labels `(batch, longest + extra)`, padded with -100."""
    return padded(model, targets, IGNORED_LABEL, extra=extra)


def logits_of(model: Seq2SeqModel, sample: Sample, variation: Variation = PLAIN) -> list[torch.Tensor]:
    """Compute each row's logits, `(target length, vocabulary)`."""

    def compute(batch: Sample) -> list[torch.Tensor]:
        inputs, targets = source_inputs(model, batch.sources, variation), decoder_inputs(model, batch.targets)
        if variation.uses_other_cache:
            logits = _logits_by_cache(model, inputs, targets)
        else:
            logits = model(**inputs, decoder_input_ids=targets, use_cache=False).logits
        return [row[: len(target)] for row, target in zip(logits, batch.targets, strict=True)]

    with evaluation_mode(model), torch.no_grad():
        return _arranged(compute, sample, variation)


def _logits_by_cache(model: Seq2SeqModel, inputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    """Compute logits `(batch, length, vocabulary)`, one token at a time."""
    settings = {"encoder_outputs": model.get_encoder()(**inputs), "attention_mask": inputs["attention_mask"]}
    cache, steps = None, []
    for token in targets.split(1, dim=1):
        outputs = model(decoder_input_ids=token, use_cache=True, **{CACHE: cache}, **settings)
        cache = cache_of(outputs)
        steps.append(outputs.logits)
    return torch.cat(steps, dim=1)


def generated(model: Seq2SeqModel, sample: Sample, num_beams: int, variation: Variation = PLAIN) -> list[list[int]]:
    """Generate at most 12 tokens per row, without sampling."""
    settings = copy.deepcopy(model.generation_config)
    longest = min(NEW_TOKENS, (position_limit(model.config) or 99) - 1)
    settings.update(do_sample=False, num_beams=num_beams, num_return_sequences=1, return_dict_in_generate=False)
    # No bigram twice, because an untrained model would repeat one token for every input.
    settings.update(max_length=None, max_new_tokens=longest, no_repeat_ngram_size=2)
    settings.update(pad_token_id=pad_token(model), decoder_start_token_id=start_token(model))
    settings.use_cache = not variation.uses_other_cache
    ends = id_set(special_token(model, "eos_token_id"))

    def generate(batch: Sample) -> list[list[int]]:
        rows = model.generate(**source_inputs(model, batch.sources, variation), generation_config=settings).tolist()
        # `generate()` may pad with the end token. A start token with the same id does not count.
        lasts = [next((at for at, token in enumerate(row) if at and token in ends), len(row)) for row in rows]
        return [row[: last + 1] for row, last in zip(rows, lasts, strict=True)]

    with evaluation_mode(model), torch.no_grad():
        return _arranged(generate, sample, variation)


def _arranged(run: Callable[[Sample], list[Item]], sample: Sample, variation: Variation) -> list[Item]:
    """Run on batches by the variation, and return the results in the sample's order."""
    if variation.is_alone:
        return [result for row in range(len(sample)) for result in run(sample.part(slice(row, row + 1)))]
    return run(sample.part(slice(None, None, -1)))[::-1] if variation.is_reversed else run(sample)


def loss_of(model: Seq2SeqModel, sample: Sample, labels: torch.Tensor | None = None, **settings: Any) -> float:
    """Compute a batch's loss in evaluation mode, with the sample's or other labels."""
    labels = labels_of(model, sample.targets) if labels is None else labels
    with evaluation_mode(model), torch.no_grad():
        return float(model(**source_inputs(model, sample.sources), labels=labels, **settings).loss)


def difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Return the largest difference relative to the largest number in `theirs`, or infinity."""
    if [tensor.shape for tensor in ours] != [tensor.shape for tensor in theirs]:
        return float("inf")
    # In float64, to add no rounding error.
    found, expected = (torch.cat([each.detach().cpu().double().flatten() for each in side]) for side in (ours, theirs))
    if not (found.isfinite() & expected.isfinite()).all():
        return float("inf")
    return (found - expected).abs().max().item() / (expected.abs().max().item() or 1.0)
