"""The check of the native decoder against `generate()`."""

from heedful.checking.findings import Measured, SkippedError, check
from heedful.decoding.engines import evaluation_mode
from heedful.decoding.native.conditions import NAME, model_obstacle
from heedful.decoding.native.engine import may_replace, prepare_for_inference
from heedful.modeling_heed import HeedForConditionalGeneration
from heedful.verification import samples
from heedful.verification.samples import Sample, make_sample

BEAMS = (1, 4)


@check("engines")
def check_engines(model: HeedForConditionalGeneration, sample: Sample | None = None) -> Measured:
    """Check that the native decoder, if a `Translator` would choose it, gives the tokens of `generate()`; count."""
    sample = sample or make_sample(model)
    if not may_replace(model, model.generation_config):
        why = model_obstacle(model) or f"only `generate()` supports its settings and its dtype, {model.dtype}"
        raise SkippedError(f"{NAME} does not support this model: {why}")
    plain = [samples.generated(model, sample, beams) for beams in BEAMS]
    with evaluation_mode(model), prepare_for_inference(model):  # also compares logits
        found = [samples.generated(model, sample, beams) for beams in BEAMS]
    differing = sum(a != b for one, other in zip(plain, found, strict=True) for a, b in zip(one, other, strict=True))
    message = f"{len(BEAMS) * len(sample)} sentences by {NAME} and the model's own code, greedy and beams"
    return differing, 0, message
