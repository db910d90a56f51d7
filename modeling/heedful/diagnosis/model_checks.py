"""Checks of a model by itself: decoding, attention weights, loss, saving, tied weights.

Each gives sentences to the model in two ways that must come to the same, and returns a `Finding`. They work with any
encoder-decoder of transformers, in tests too: `check_cache(model).assert_passed()`. `model` is the encoder-decoder,
`sample` the sentences to try it with; by default they are random.
"""

import inspect
import tempfile
from pathlib import Path
from typing import Any

import torch

from heedful.configuration_base_heed import HEED_TYPES
from heedful.diagnosis import trials
from heedful.diagnosis.findings import Measured, SkippedError, check
from heedful.diagnosis.trials import Sample, Way, difference, labels_of, logits_of, loss_of, make_sample, tolerance_of
from heedful.files import listed

BEAMS = 4


def _compared(model: Any, sample: Sample | None, way: Way, beams: tuple[int, ...], told: str) -> Measured:
    """Compare logits and generated tokens of a way with those of the plain way.

    Logits are judged by the tolerance. Tokens must be the same, except in a dtype in which near ties fall either way.
    """
    sample = sample or make_sample(model)
    distance = difference(logits_of(model, sample, way), logits_of(model, sample))
    differing = sum(_count_differing(model, sample, way, num_beams) for num_beams in beams)
    if differing:
        told += f"; logits {distance:.1e}, {differing} of {len(beams) * len(sample)} generated sentences differ"
        if model.dtype in (torch.float32, torch.float64):
            distance = max(distance, differing)
        else:
            told += f" (not judged in {trials.dtype_name(model.dtype)})"
    elif beams:
        told += "; same tokens generated"
    return distance, tolerance_of(model), told


def _count_differing(model: Any, sample: Sample, way: Way, num_beams: int) -> int:
    outputs = trials.generated(model, sample, num_beams, way), trials.generated(model, sample, num_beams)
    return sum(ours != theirs for ours, theirs in zip(*outputs, strict=True))


@check("batch")
def check_batch(model: Any, sample: Sample | None = None) -> Measured:
    """Check that logits, greedy and beam outputs of a sentence are the same alone and beside longer ones."""
    sample = sample or make_sample(model)
    told = f"{len(sample)} sentences alone and in one batch, greedy and {BEAMS} beams"
    return _compared(model, sample, Way(is_alone=True), (1, BEAMS), told)


@check("order of a batch")
def check_order(model: Any, sample: Sample | None = None) -> Measured:
    """Check that another order of the sentences in a batch only reorders logits and greedy outputs."""
    return _compared(model, sample, Way(is_reversed=True), (1,), "a batch and its reverse")


@check("right padding")
def check_right_padding(model: Any, sample: Sample | None = None) -> Measured:
    """Check that more padding behind the sources changes no logits."""
    told = f"{trials.EXTRA_PADDING} more padding tokens on the source's right"
    return _compared(model, sample, Way(padding=trials.EXTRA_PADDING), (), told)


@check("left padding")
def check_left_padding(model: Any, sample: Sample | None = None) -> Measured:
    """Check that padding before the sources changes neither logits nor greedy outputs."""
    told = f"{trials.EXTRA_PADDING} more padding tokens on the source's left"
    return _compared(model, sample, Way(padding=trials.EXTRA_PADDING, side="left"), (1,), told)


@check("cache")
def check_cache(model: Any, sample: Sample | None = None) -> Measured:
    """Check that decoding token by token with a cache gives what the model gives without one.

    Logits of every step are compared with one pass over the whole target, greedy and beam outputs with those of
    `use_cache=False`.
    """
    told = f"step by step with a cache and in one pass, greedy and {BEAMS} beams"
    return _compared(model, sample, Way(swaps_cache=True), (1, BEAMS), told)


@check("determinism")
def check_determinism(model: Any, sample: Sample | None = None) -> Measured:
    """Check that two calls in evaluation mode give the same to the bit: only a figure of 0 passes."""
    sample = sample or make_sample(model)
    distance = difference(logits_of(model, sample), logits_of(model, sample))
    differing = _count_differing(model, sample, trials.PLAIN, 1)
    return max(distance, differing), 0.0, "logits and greedy outputs of two calls, to the bit"


@check("attention weights")
def check_attentions(model: Any, sample: Sample | None = None) -> Measured:
    """Check that attention weights are returned when they are asked for, whatever kernel the model runs with.

    They must exist, sum to 1 and leave padding out, and asking for them must not change the logits. A recurrent model
    has attention to the source at most.

    Returns:
        A finding whose figure is the largest deviation, or the number of kinds of attention that are missing.
    """
    sample = sample or make_sample(model)
    kinds = _kinds_of_attention(model)
    inputs = trials.source_inputs(model, sample.sources)
    inputs["decoder_input_ids"] = trials.decoder_inputs(model, sample.targets)
    with trials.evaluation_mode(model):
        plain = model(**inputs, use_cache=False).logits
        outputs = model(**inputs, use_cache=False, output_attentions=True)
    kernel = getattr(model.config, "_attn_implementation", None)
    missing = [kind for kind in kinds if not any(w is not None for w in getattr(outputs, kind, None) or ())]
    if missing:
        return len(missing), 0.0, f"{', '.join(missing)}: nothing is returned under {kernel}"
    source_mask = inputs["attention_mask"].bool()
    target_mask = labels_of(model, sample.targets) != trials.IGNORED_LABEL
    worst = difference([outputs.logits[target_mask]], [plain[target_mask]])
    for kind in kinds:
        queries = source_mask if kind == "encoder_attentions" else target_mask
        for weights in getattr(outputs, kind):  # (B, H, Q, K)
            sums = weights.float().sum(-1).transpose(1, 2)[queries]
            worst = max(worst, (sums - 1).abs().max().item())
            if kind == "cross_attentions":
                worst = max(worst, (weights.float() * ~source_mask[:, None, None]).max().item())
    return worst, tolerance_of(model), f"asked for under {kernel}: there, sum to 1, none at padding, same logits"


def _kinds_of_attention(model: Any) -> tuple[str, ...]:
    """Return under which names a model gives out attention weights."""
    if model.config.model_type != "heed_rnn":
        return ("encoder_attentions", "decoder_attentions", "cross_attentions")
    if model.config.attention == "none":
        raise SkippedError("the config's `attention` is none")
    return ("cross_attentions",)


@check("loss of a split update")
def check_loss_split(model: Any, sample: Sample | None = None) -> Measured:
    """Check that the losses of an update's micro-batches add up to the loss of the whole; relative difference.

    They are computed as `Trainer` does it: a model that takes loss arguments gets `num_items_in_batch`, and the losses
    are summed; of another model the mean of them is taken.
    """
    sample = sample or make_sample(model)
    whole = loss_of(model, sample)
    takes_arguments = getattr(model, "accepts_loss_kwargs", None)
    if takes_arguments is None:
        parameters = inspect.signature(model.forward).parameters.values()
        takes_arguments = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
    settings: dict[str, Any] = {"num_items_in_batch": sample.label_count} if takes_arguments else {}
    pieces = [sample.part(rows) for rows in (slice(0, 1), slice(1, 3), slice(3, None))]
    total = sum(loss_of(model, piece, **settings) for piece in pieces) / (1 if takes_arguments else len(pieces))
    told = f"{len(pieces)} micro-batches add up to {total:.4f}, the whole batch has {whole:.4f}"
    return abs(total - whole) / abs(whole), tolerance_of(model), told


@check("loss and padding")
def check_loss_padding(model: Any, sample: Sample | None = None) -> Measured:
    """Check that a loss is the mean over the labels that are not -100, however they are padded.

    The loss of a batch is compared with the losses of its sentences alone, weighted by their tokens, and with the loss
    under more -100 behind the labels; the loss of labels of which every second is -100 with the cross-entropy of the
    others. The figure is the largest relative difference.
    """
    sample = sample or make_sample(model)
    whole = loss_of(model, sample)
    singles = [sample.part(slice(row, row + 1)) for row in range(len(sample))]
    weighted = sum(single.label_count * loss_of(model, single) for single in singles) / sample.label_count
    more = loss_of(model, sample, labels_of(model, sample.targets, trials.EXTRA_PADDING))
    blanked = labels_of(model, sample.targets)
    blanked[:, 1::2] = trials.IGNORED_LABEL
    of_the_others = loss_of(model, sample, blanked, decoder_input_ids=trials.decoder_inputs(model, sample.targets))
    logits = torch.cat([row[::2].float() for row in logits_of(model, sample)])
    labels = torch.tensor([token for row in sample.targets for token in row[::2]], device=logits.device)
    expected = torch.nn.functional.cross_entropy(logits, labels).item()
    pairs = ((weighted, whole), (more, whole), (of_the_others, expected))
    distances = [abs(ours - theirs) / abs(theirs) for ours, theirs in pairs]
    told = "token-weighted mean of the sentences, more -100 behind, -100 in the middle ({:.1e}, {:.1e}, {:.1e})"
    return max(distances), tolerance_of(model), told.format(*distances)


def told_of_loading(report: dict[str, Any]) -> Measured:
    """Judge the report that `from_pretrained(..., output_loading_info=True)` gives: the number of faulty tensors."""
    kinds = {"missing_keys": "missing", "unexpected_keys": "unknown", "mismatched_keys": "misshapen"}
    faults = {told: [str(name) for name in report[kind]] for kind, told in kinds.items() if report.get(kind)}
    told = "; ".join(f"{kind}: {listed(names)}" for kind, names in faults.items())
    return sum(map(len, faults.values())), 0, told or "names of the saved tensors and of the model's"


@check("save and load")
def check_saving(model: Any, sample: Sample | None = None) -> Measured:
    """Check that a model which is saved whole and in shards is loaded as it was: weights and logits to the bit.

    Returns:
        A finding whose figure is the number of tensors that differ, or the relative difference of the logits.
    """
    sample = sample or make_sample(model)
    expected = logits_of(model, sample)
    state = model.state_dict()
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    files = []
    for shard_size in (2 * size + 10**6, size // 3):
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder, max_shard_size=shard_size)
            files.append(len(list(Path(folder).glob("*.safetensors"))))
            loaded, report = type(model).from_pretrained(
                folder, dtype=model.dtype, local_files_only=True, output_loading_info=True
            )
        faults, _, told = told_of_loading(report)
        if faults:
            return faults, 0, told
        found = loaded.state_dict()
        wrong = [name for name in state if name not in found or not torch.equal(state[name].cpu(), found[name].cpu())]
        if wrong:
            return len(wrong), 0, f"differ after loading: {listed(wrong)}"
        distance = difference(logits_of(loaded.to(model.device), sample), expected)
        if distance > 0:
            return distance, 0, "logits differ after loading, though the weights are the same"
    told = f"{len(state)} tensors and the logits, to the bit, by way of {files[0]} file and of {files[1]}"
    return 0, 0, told


@check("tied weights")
def check_tied_weights(model: Any) -> Measured:
    """Check that the embeddings which the config says are one share memory, and that the others do not.

    Returns:
        A finding whose figure is the number of pairs that are not as the config says.
    """
    config = model.config
    if config.model_type in HEED_TYPES:
        claims = [config.shares_source_and_target_embeddings, config.shares_target_and_output_embeddings]
    else:
        claims = [getattr(config, name, None) for name in ("share_encoder_decoder_embeddings", "tie_word_embeddings")]
    if claims == [None, None]:
        raise SkippedError("the config does not say which embeddings are tied")
    source, target = (stack.get_input_embeddings().weight for stack in (model.get_encoder(), model.get_decoder()))
    output = model.get_output_embeddings().weight
    told, wrong = [], 0
    pairs = {"source and target": (source, target), "target and output": (target, output)}
    for (name, (first, second)), expected in zip(pairs.items(), claims, strict=True):
        if expected is not None:
            is_shared = first is second or first.data_ptr() == second.data_ptr()
            is_wrong = is_shared != expected
            wrong += is_wrong
            told.append(f"{name} embeddings {'shared' if is_shared else 'separate'}{' (wrong)' if is_wrong else ''}")
    return wrong, 0, ", ".join(told)
