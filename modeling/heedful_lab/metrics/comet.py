"""COMET (Rei et al., 2020; 2022) with plain transformers, without the older libraries of `unbabel-comet`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer

from heedful.data.tokenization import options_inside
from heedful.decoding.loading import resolve_device
from heedful.evaluation.metrics import TITLE_WIDTH
from heedful.files import check_inside, first_line
from heedful.training.recipe_file import read_yaml

KINDS = {"regression_metric": True, "referenceless_regression_metric": False}  # True if references are used
# Supported values of hparams.yaml: those of published models.
KNOWN: dict[str, tuple[Any, ...]] = {
    "class_identifier": tuple(KINDS),
    "pool": ("avg", "cls"),
    "layer_transformation": ("softmax", "sparsemax"),
    "layer_norm": (False,),
    "final_activation": (None,),
    "activations": tuple(name for name in torch.nn.modules.activation.__all__ if name != "MultiheadAttention"),
}
# COMET's defaults.
DEFAULTS: dict[str, Any] = {"class_identifier": None, "layer_norm": True, "activations": "Tanh", "layer": "mix"}
ENCODER = "encoder.model."


class Comet:
    """A trained metric: XLM-R or a relative encodes the texts, and a small network compares the encodings.

    `folder`, as on the Hub, has `hparams.yaml` and `checkpoints/model.ckpt` (else a `FileNotFoundError`). The
    encoder's config and tokenizer come from its subfolder `encoder`, otherwise from the Hub, by the name in
    hparams.yaml. A model of an unsupported kind, or weights that do not fit, are a `ValueError`.
    """

    def __init__(self, folder: str | Path, device: str | None = None):
        place = Path(folder)
        for file in ("hparams.yaml", "checkpoints/model.ckpt"):
            if not (place / file).is_file():
                raise FileNotFoundError(f"`comet:` must name a folder with {file}, but {place} has none.")
        try:
            self.settings = DEFAULTS | dict(read_yaml((place / "hparams.yaml").read_text(encoding="utf-8"))[0])
            # No code of the checkpoint is run.
            saved = torch.load(place / "checkpoints/model.ckpt", map_location="cpu", weights_only=True)["state_dict"]
        except Exception as error:  # from YAML, pickle, or a value that is not a mapping
            raise ValueError(f"{place} must be a model that `unbabel-comet` saved: {first_line(error)}") from error
        for name, known in KNOWN.items():
            if (value := self.settings.get(name, known[0])) not in known:
                must = " or ".join(map(str, known))
                raise ValueError(f"`{name}` of {place / 'hparams.yaml'} must be {must}, but is {value} instead.")
        check_inside(place)
        name = str(place / "encoder") if (place / "encoder").is_dir() else self.settings["pretrained_model"]
        if name != str(place / "encoder") and Path(str(name)).exists():
            must = f"`pretrained_model` of {place / 'hparams.yaml'} must be a name on the Hub"
            raise ValueError(f"{must}, but is {name} here instead.")
        self.tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options_inside(name))
        self.device = resolve_device(device)
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        self.encoder = AutoModel.from_config(config, add_pooling_layer=False, trust_remote_code=False).eval()
        layers, layer = config.num_hidden_layers + 1, self.settings["layer"]
        if layer != "mix" and layer not in range(layers):
            raise ValueError(f"`layer` of hparams.yaml must be mix or below {layers}, but is {layer} instead.")
        found = {key.removeprefix(ENCODER): value for key, value in saved.items() if key.startswith(ENCODER)}
        self.weights = {key: value.to(self.device) for key, value in saved.items() if not key.startswith(ENCODER)}
        try:
            if missing := self.encoder.load_state_dict(found, strict=False).missing_keys:
                raise KeyError(ENCODER + missing[0])
            self.encoder.to(self.device)
            self.scores(["a"], ["a"], ["a"])
        except (KeyError, IndexError, RuntimeError) as error:
            held = place / "checkpoints/model.ckpt"
            raise ValueError(f"{held} must have the weights of hparams.yaml's model: {first_line(error)}") from error

    def _estimator(self) -> list[int]:
        """Return the numbers of the estimator's matrices in order."""
        names = (key.split(".") for key in self.weights)
        return sorted({0, *(int(name[2]) for name in names if name[:2] == ["estimator", "ff"])})

    def added_to(
        self, found: dict[str, Any], sources: Sequence[str], texts: Sequence[str], accepted: Sequence[Sequence[str]]
    ) -> str:
        """Add the mean score, against the first reference of each text, to `found`, and return its line."""
        scores = self.scores(sources, texts, [right[0] for right in accepted])
        found["comet"] = sum(scores) / len(scores)
        return f"{'COMET':<{TITLE_WIDTH}}{found['comet']:8.4f}"

    @torch.inference_mode()
    def scores(
        self, sources: Sequence[str], texts: Sequence[str], references: Sequence[str], batch_size: int = 16
    ) -> list[float]:
        """Return the score of each text in order; models without references ignore them."""
        order = sorted(range(len(texts)), key=lambda index: len(sources[index]) + len(texts[index]))
        found: dict[int, float] = {}
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            sides = [sources, texts, references] if KINDS[self.settings["class_identifier"]] else [sources, texts]
            source, text, *reference = (self._encoded([side[index] for index in chosen]) for side in sides)
            parts = [text, source, text * source, (text - source).abs()]
            for other in reference:
                parts = [text, other, text * other, (text - other).abs(), *parts[2:]]
            found |= zip(chosen, self._estimate(torch.cat(parts, dim=1)), strict=True)
        return [found[index] for index in range(len(texts))]

    def _encoded(self, texts: list[str]) -> torch.Tensor:
        """Return a vector for each text: the mean of its tokens, or its first token, from one layer or a mixture."""
        limit = self.encoder.config.max_position_embeddings - 2
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=limit)
        inputs = inputs.to(self.device)
        layers = self.encoder(**inputs, output_hidden_states=True).hidden_states  # each (batch, length, width)
        if (layer := self.settings["layer"]) == "mix":
            names = (f"layerwise_attention.scalar_parameters.{number}" for number in range(len(layers)))
            scalars = torch.cat([self.weights[name] for name in names])
            is_sparse = self.settings.get("layer_transformation") == "sparsemax"
            shares = sparsemax(scalars) if is_sparse else scalars.softmax(dim=0)
            mixed = torch.einsum("n,nblw->blw", shares, torch.stack(layers))
            mixed *= self.weights["layerwise_attention.gamma"]
        else:
            mixed = layers[layer]
        if self.settings.get("pool", "avg") == "cls":
            return mixed[:, 0]
        mask = inputs["attention_mask"][:, :, None].to(mixed.dtype)
        return (mixed * mask).sum(dim=1) / mask.sum(dim=1)

    def _estimate(self, features: torch.Tensor) -> list[float]:
        """Return the scores (batch) of combined encodings (batch, width)."""
        activation, numbers = getattr(torch.nn, self.settings["activations"])(), self._estimator()
        for number in numbers:
            weight, bias = (self.weights[f"estimator.ff.{number}.{name}"] for name in ("weight", "bias"))
            features = torch.nn.functional.linear(features, weight, bias)
            features = activation(features) if number != numbers[-1] else features
        return features[:, 0].tolist()


def sparsemax(scalars: torch.Tensor) -> torch.Tensor:
    """Project scalars (n) onto the simplex of probabilities, most of them to 0 (Martins and Astudillo, 2016)."""
    ordered = scalars.sort(descending=True).values
    sums = ordered.cumsum(dim=0) - 1
    support = ordered * torch.arange(1, len(scalars) + 1, device=scalars.device) > sums
    return (scalars - sums[support][-1] / support.sum()).clamp(min=0)
