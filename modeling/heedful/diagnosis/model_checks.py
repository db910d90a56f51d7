"""Checks of a model by itself: decoding, attention weights, loss, saving, tied weights.

Each tries the model two ways that must come to the same, and returns a `Verdict`. They work with any
encoder-decoder of transformers, in tests too: `check_cache(model).assert_passed()`.
"""

import inspect
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from heedful.configuration_base_heed import HEED_TYPES
from heedful.diagnosis import trials
from heedful.diagnosis.trials import Sample, difference, generated, logits_of, make_sample
from heedful.diagnosis.verdicts import Measured, SkippedError, check, dtype_name, tolerance_of

BEAMS = 4


def _judged(model: Any, distance: float, told: str, differing: int, outputs: int) -> Measured:
    """Judge logits by the tolerance; tokens must be the same, except in a dtype in which near ties fall either way."""
    if outputs and not differing:
        told += "; same tokens generated"
    elif differing:
        told += f"; logits {distance:.1e}, {differing} of {outputs} generated sentences differ"
        if model.dtype in (torch.float32, torch.float64):
            distance = max(distance, differing)
        else:
            told += f" (not judged in {dtype_name(model.dtype)})"
    return distance, tolerance_of(model), told


def _count_differing(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> int:
    return sum(list(a) != list(b) for a, b in zip(ours, theirs, strict=True))


# Decoding


@check("batch")
def check_batch(model: Any, sample: Sample | None = None) -> Measured:
    """Check that a sentence's logits, greedy and beam outputs are the same alone and beside longer ones.

    Args:
        model: An encoder-decoder of transformers.
        sample: Sentences to try it with; random ones by default.

    Returns:
        A `Verdict`; its figure is the largest relative difference of a logit, or the number of differing outputs.

    """
    sample = sample or make_sample(model)
    pairs = zip(sample.sources, sample.targets, strict=True)
    alone = [logits_of(model, [source], [target])[0] for source, target in pairs]
    distance = difference(logits_of(model, sample.sources, sample.targets), alone)
    differing = 0
    for num_beams in (1, BEAMS):
        singly = [generated(model, [source], num_beams)[0] for source in sample.sources]
        differing += _count_differing(generated(model, sample.sources, num_beams), singly)
    rows = len(sample.sources)
    told = f"{rows} sentences alone and in one batch, greedy and {BEAMS} beams"
    return _judged(model, distance, told, differing, 2 * rows)


@check("order of a batch")
def check_order(model: Any, sample: Sample | None = None) -> Measured:
    """Check that another order of the sentences in a batch only reorders logits and greedy outputs.

    Arguments and result are those of `check_batch`.
    """
    sample = sample or make_sample(model)
    sources, targets = sample.sources[::-1], sample.targets[::-1]
    distance = difference(logits_of(model, sources, targets)[::-1], logits_of(model, sample.sources, sample.targets))
    differing = _count_differing(generated(model, sources, 1)[::-1], generated(model, sample.sources, 1))
    return _judged(model, distance, "a batch and its reverse", differing, len(sources))


def _check_padding(model: Any, sample: Sample | None, side: str) -> Measured:
    sample = sample or make_sample(model)
    plain = logits_of(model, sample.sources, sample.targets)
    more = logits_of(model, sample.sources, sample.targets, side, extra=trials.EXTRA_PADDING)
    differing = 0
    if side == "left":
        differing = _count_differing(
            generated(model, sample.sources, 1, side="left"), generated(model, sample.sources, 1)
        )
    told = f"{trials.EXTRA_PADDING} more padding tokens on the source's {side}"
    return _judged(model, difference(more, plain), told, differing, len(sample.sources) if side == "left" else 0)


@check("right padding")
def check_right_padding(model: Any, sample: Sample | None = None) -> Measured:
    """Check that more padding behind the sources changes nothing; arguments and result as `check_batch`."""
    return _check_padding(model, sample, "right")


@check("left padding")
def check_left_padding(model: Any, sample: Sample | None = None) -> Measured:
    """Check that padding before the sources changes nothing; arguments and result as `check_batch`."""
    return _check_padding(model, sample, "left")


@check("cache")
def check_cache(model: Any, sample: Sample | None = None) -> Measured:
    """Check that decoding token by token with a cache gives what the model gives without one.

    Logits of every step against one pass over the whole target, greedy and beam outputs against those with
    `use_cache=False`. Arguments and result are those of `check_batch`.
    """
    sample = sample or make_sample(model)
    distance = difference(
        trials.cached_logits_of(model, sample.sources, sample.targets),
        logits_of(model, sample.sources, sample.targets),
    )
    differing = sum(
        _count_differing(
            generated(model, sample.sources, num_beams), generated(model, sample.sources, num_beams, use_cache=False)
        )
        for num_beams in (1, BEAMS)
    )
    told = f"step by step with a cache and in one pass, greedy and {BEAMS} beams"
    return _judged(model, distance, told, differing, 2 * len(sample.sources))


@check("determinism")
def check_determinism(model: Any, sample: Sample | None = None) -> Measured:
    """Check that two calls in evaluation mode give the same to the bit; arguments as `check_batch`.

    Returns:
        A `Verdict`; only a figure of 0 passes.

    """
    sample = sample or make_sample(model)
    first, second = (logits_of(model, sample.sources, sample.targets) for _ in range(2))
    differing = _count_differing(*(generated(model, sample.sources, 1) for _ in range(2)))
    distance = max(difference(first, second), differing)
    return distance, 0.0, "logits and greedy outputs of two calls, to the bit"


@check("attention weights")
def check_attentions(model: Any, sample: Sample | None = None) -> Measured:
    """Check that attention weights are returned when asked for, whatever kernel the model runs with.

    They must exist, sum to 1, leave padding out, and asking for them must not change the logits. Arguments are
    those of `check_batch`.

    Returns:
        A `Verdict`; its figure is the largest deviation, or the number of kinds of attention that are missing. A
        recurrent model has attention to the source at most.

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
    target_mask = (trials.labels_of(model, sample.targets) != trials.IGNORED_LABEL).to(source_mask.device)
    worst = difference([outputs.logits[target_mask]], [plain[target_mask]])
    for kind in kinds:
        queries = source_mask if kind == "encoder_attentions" else target_mask
        for weights in getattr(outputs, kind):  # (B, H, Q, K)
            sums = weights.float().sum(-1).transpose(1, 2)[queries]
            worst = max(worst, (sums - 1).abs().max().item())
            if kind == "cross_attentions":
                at_padding = weights.float() * ~source_mask[:, None, None]
                worst = max(worst, at_padding.max().item())
    return worst, tolerance_of(model), f"asked for under {kernel}: there, sum to 1, none at padding, same logits"


def _kinds_of_attention(model: Any) -> tuple[str, ...]:
    """Return under which names a model gives out attention weights."""
    if model.config.model_type != "heed_rnn":
        return ("encoder_attentions", "decoder_attentions", "cross_attentions")
    if model.config.attention == "none":
        raise SkippedError("the config's `attention` is none")
    return ("cross_attentions",)


# Loss


@check("loss of a split update")
def check_loss_split(model: Any, sample: Sample | None = None) -> Measured:
    """Check that an update split into micro-batches adds up to the loss of the whole.

    Computed as `Trainer` does it: a model that takes loss arguments gets `num_items_in_batch`, and the losses are
    summed; from another the mean of them is taken. Arguments are those of `check_batch`.

    Returns:
        A `Verdict`; its figure is the relative difference.

    """
    sample = sample or make_sample(model)
    whole = trials.loss_of(model, sample.sources, trials.labels_of(model, sample.targets))
    takes_arguments = getattr(model, "accepts_loss_kwargs", None)
    if takes_arguments is None:
        parameters = inspect.signature(model.forward).parameters.values()
        takes_arguments = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
    settings = {"num_items_in_batch": sample.label_count} if takes_arguments else {}
    pieces = [slice(0, 1), slice(1, 3), slice(3, None)]
    losses = [
        trials.loss_of(model, sample.sources[piece], trials.labels_of(model, sample.targets[piece]), **settings)
        for piece in pieces
    ]
    total = sum(losses) if takes_arguments else sum(losses) / len(losses)
    told = f"{len(pieces)} micro-batches add up to {total:.4f}, the whole batch has {whole:.4f}"
    return abs(total - whole) / abs(whole), tolerance_of(model), told


@check("loss and padding")
def check_loss_padding(model: Any, sample: Sample | None = None) -> Measured:
    """Check that a loss is the mean over the labels that are not -100, however they are padded.

    A batch against its sentences alone, weighted by their tokens; more -100 behind the labels; and labels blanked
    out in the middle against the cross-entropy of the others. Arguments are those of `check_batch`.

    Returns:
        A `Verdict`; its figure is the largest relative difference.

    """
    sample = sample or make_sample(model)
    labels = trials.labels_of(model, sample.targets)
    whole = trials.loss_of(model, sample.sources, labels)
    weighted = sum(
        len(target) * trials.loss_of(model, [source], trials.labels_of(model, [target]))
        for source, target in zip(sample.sources, sample.targets, strict=True)
    )
    more = trials.loss_of(model, sample.sources, trials.labels_of(model, sample.targets, trials.EXTRA_PADDING))
    blanked = labels.clone()
    blanked[:, 1::2] = trials.IGNORED_LABEL
    decoder_inputs = trials.decoder_inputs(model, sample.targets)
    of_the_others = trials.loss_of(model, sample.sources, blanked, decoder_input_ids=decoder_inputs)
    rows = zip(logits_of(model, sample.sources, sample.targets), sample.targets, strict=True)
    entropies = torch.cat(
        [
            torch.nn.functional.cross_entropy(
                logits[::2].float(), torch.tensor(target[::2], device=logits.device), reduction="none"
            )
            for logits, target in rows
        ]
    )
    expected = entropies.mean().item()
    distances = (
        abs(weighted / sample.label_count - whole) / abs(whole),
        abs(more - whole) / abs(whole),
        abs(of_the_others - expected) / abs(expected),
    )
    told = "token-weighted mean of the sentences, more -100 behind, -100 in the middle ({:.1e}, {:.1e}, {:.1e})"
    return max(distances), tolerance_of(model), told.format(*distances)


# Saving and loading


def told_of_loading(report: dict[str, Any]) -> Measured:
    """Judge the report that `from_pretrained(..., output_loading_info=True)` gives: the number of faulty tensors."""
    faults = []
    for kind, told in (("missing_keys", "missing"), ("unexpected_keys", "unknown"), ("mismatched_keys", "misshapen")):
        names = sorted(str(name) for name in report.get(kind) or ())
        if names:
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            faults.append((len(names), f"{told}: {', '.join(names[:2])}{more}"))
    told = "; ".join(text for _, text in faults) or "names of the saved tensors and of the model's"
    return sum(count for count, _ in faults), 0, told


@check("save and load")
def check_saving(model: Any, sample: Sample | None = None) -> Measured:
    """Check that a model saved whole and in shards is loaded as it was: weights and logits to the bit.

    Arguments are those of `check_batch`.

    Returns:
        A `Verdict`; its figure is the number of tensors that differ, or the relative difference of the logits.

    """
    sample = sample or make_sample(model)
    expected = logits_of(model, sample.sources, sample.targets)
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
        loaded_state = loaded.state_dict()
        wrong = [name for name in state if not _is_equal(state[name], loaded_state.get(name))]
        if wrong:
            return len(wrong), 0, f"differ after loading: {', '.join(wrong[:2])}"
        distance = difference(logits_of(loaded.to(model.device), sample.sources, sample.targets), expected)
        if distance > 0:
            return distance, 0, "logits differ after loading, though the weights are the same"
    told = f"{len(state)} tensors and the logits, to the bit, by way of {files[0]} file and of {files[1]}"
    return 0, 0, told


def _is_equal(ours: torch.Tensor, theirs: torch.Tensor | None) -> bool:
    return theirs is not None and torch.equal(ours.cpu(), theirs.cpu())


@check("tied weights")
def check_tied_weights(model: Any) -> Measured:
    """Check that the embeddings which the config says are one share memory, and that the others do not.

    Args:
        model: An encoder-decoder of transformers.

    Returns:
        A `Verdict`; its figure is the number of pairs that are not as the config says.

    """
    config = model.config
    if config.model_type in HEED_TYPES:
        source_is_target = config.shares_source_and_target_embeddings
        target_is_output = config.shares_target_and_output_embeddings
    else:
        target_is_output = getattr(config, "tie_word_embeddings", None)
        source_is_target = getattr(config, "share_encoder_decoder_embeddings", None)
    source, target = (stack.get_input_embeddings().weight for stack in (model.get_encoder(), model.get_decoder()))
    output = model.get_output_embeddings().weight
    claims = [
        ("source and target", source, target, source_is_target),
        ("target and output", target, output, target_is_output),
    ]
    if target_is_output is None and source_is_target is None:
        raise SkippedError("the config does not say which embeddings are tied")
    told, wrong = [], 0
    for name, first, second, expected in claims:
        shared = first is second or first.data_ptr() == second.data_ptr()
        if expected is not None:
            is_wrong = shared != expected
            wrong += is_wrong
            told.append(f"{name} embeddings {'shared' if shared else 'separate'}{' (wrong)' if is_wrong else ''}")
    return wrong, 0, ", ".join(told)
