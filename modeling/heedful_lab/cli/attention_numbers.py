"""`heedful attention-numbers`: attention in numbers."""

from typing import Annotated, Any

from typer import Option

from heedful.cli import options
from heedful.cli.attention import Kind, Layer, Rollout, Text, Translation, attention_of


def attention_numbers(
    model: options.AnyModel,
    text: Text,
    target: Translation = None,
    layer: Layer = None,
    head: Annotated[int | None, Option(help="Head, from 0. Default: 0 with --steps, otherwise the mean.")] = None,
    kind: Annotated[Kind, Option(help="Attention of encoder or decoder, or cross-attention.")] = "cross",
    rollout: Rollout = False,
    steps: Annotated[bool, Option("--steps", help="Print each step in one head (the default).")] = False,
    entropy: Annotated[bool, Option("--entropy", help="Print each head's entropy (its spread).")] = False,
    as_json: Annotated[bool, Option("--json", help="Print the weights, and the entropy, as JSON.")] = False,
    to: options.TargetLanguage = None,
    revision: options.Revision = None,
    device: options.Device = None,
) -> None:
    """Print attention in numbers: one head step by step, the entropy of each head, or the weights as JSON."""
    from heedful.attention import measures
    from heedful_lab.course import numbers

    steps = steps or not (entropy or as_json)
    options.check_apart(head=head, rollout=rollout)
    options.check_apart(steps=steps, rollout=rollout)
    options.check_apart(steps=steps, json=as_json)
    if entropy and not (steps or as_json) and (layer, head, rollout) != (None, None, False):
        raise ValueError("`--layer`, `--head` and `--rollout` need --steps or --json: --entropy covers all heads.")
    (maps,) = attention_of(model, revision, device, [(text, target)], None if rollout else kind, to)
    view = measures.View(kind, layer, (head or 0) if steps else head, rollout)
    values, lines = dict[str, Any](), list[str]()
    if entropy:
        found = measures.attention_entropy(maps, kind)
        values["entropy"] = {"nats": found.nats.tolist(), "share": found.share.tolist()}
        lines += numbers.entropy_lines(found)
    if steps:
        each_step = maps.steps(kind, -1 if layer is None else layer, view.head or 0)
        lines += [view.title_of(maps), *numbers.steps_lines(each_step)]
    if as_json:
        one = view.map_of(maps)
        values["maps"] = [{"kind": kind, **vars(one), "weights": one.weights.astype(float).round(6).tolist()}]
    options.print_result(values, "\n".join(lines), as_json)
