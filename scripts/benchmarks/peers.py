"""The models that benchmarks compare, with equal sizes and weights, and their tasks."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import MarianConfig, MarianMTModel

from heedful.conversion.families import COPIED_FIELDS, RENAMINGS
from heedful.conversion.model_conversion import convert_model
from heedful.decoding.native.engine import NativeDecoder
from heedful.export.ctranslate2_specification import make_specification
from heedful.positions_heed import sinusoids

SIZES = {
    "tiny": {"layers": 1, "width": 32, "inner": 64, "heads": 2},
    "small": {"layers": 3, "width": 256, "inner": 1024, "heads": 4},
    "base": {"layers": 6, "width": 512, "inner": 2048, "heads": 8},
    "big": {"layers": 6, "width": 1024, "inner": 4096, "heads": 16},
}


def make_marian(size: str, vocabulary: int, dropout: float = 0.1) -> MarianMTModel:
    """Return a Marian model with random weights, scaled so that tokens differ between steps."""
    torch.manual_seed(0)
    layers, width, inner, heads = SIZES[size].values()
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", layers), ("ffn_dim", inner), ("attention_heads", heads))
    }
    config = MarianConfig(
        vocab_size=vocabulary,
        d_model=width,
        **sides,
        dropout=dropout,
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=vocabulary - 1,
        eos_token_id=0,
        decoder_start_token_id=vocabulary - 1,
        max_position_embeddings=512,
    )
    model = MarianMTModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed_positions" not in name:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.tie_weights()
    return model


def make_heed(marian: MarianMTModel) -> Any:
    """Return a Heed model with a Marian model's weights."""
    return convert_model(marian)


def loss_of(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Return a model's training loss, Heed's as `heedful train` computes it."""
    return model.loss_of(inputs) if hasattr(model, "loss_of") else model(**inputs).loss


def marian_like(heed: Any) -> MarianMTModel:
    """Return a Marian model with a trained Heed model's weights.

    Raises:
        ValueError: If Marian lacks an option: only sizes may differ from the paper's, with one vocabulary.
    """
    config = heed.config
    sizes = {name: getattr(config, name) for name in (*COPIED_FIELDS, "vocab_size")}
    model = MarianMTModel(MarianConfig(**sizes, forced_eos_token_id=None))
    weights = {name: torch.zeros_like(weight) for name, weight in model.state_dict().items()}  # biases it lacks
    for name, weight in heed.state_dict().items():
        for theirs, ours in RENAMINGS.items():
            name = name.replace(ours, theirs)
        if name not in weights:
            raise ValueError(f"The model must be one that Marian has too, but {name} is not in Marian.")
        weights[name] = weight
    for side in ("encoder", "decoder"):
        table = weights[f"model.{side}.embed_positions.weight"]
        table.copy_(sinusoids(torch.arange(len(table)), config.d_model, config.sinusoid_layout))
    model.load_state_dict(weights)
    model.tie_weights()
    model.generation_config.bad_words_ids = None
    return model.eval()


TRANSLATORS: dict[str, Any] = {}  # of CTranslate2, in this process, by precision


def load_translator(folder: str, precision: str, threads: int) -> None:
    """Load a CTranslate2 model."""
    import ctranslate2

    TRANSLATORS[precision] = ctranslate2.Translator(folder, "cpu", compute_type=precision, intra_threads=threads)


def translate_with(precision: str, sources: list[list[str]], settings: dict[str, int]) -> list[list[str]]:
    """Translate a batch with the last model loaded in this precision."""
    return [result.hypotheses[0] for result in TRANSLATORS[precision].translate_batch(sources, **settings)]


class CTranslate2:
    """CTranslate2 with a Heed model's weights, called directly, with ids as tokens.

    With several threads it has its own process. In a shared process its threads and torch's count together, and if
    they exceed the cores, all of them sleep when they wait.

    Args:
        heed: The model.
        precision: `float32` or `int8`.
    """

    def __init__(self, heed: Any, precision: str):
        config = heed.config
        specification = make_specification(heed)
        for register in (specification.register_source_vocabulary, specification.register_target_vocabulary):
            register([str(number) for number in range(config.vocab_size)])
        ends = {"bos_token": config.decoder_start_token_id, "eos_token": config.eos_token_id}
        for name, token in (ends | {"unk_token": config.eos_token_id}).items():
            setattr(specification.config, name, str(token))
        specification.config.decoder_start_token = str(config.decoder_start_token_id)
        specification.config.layer_norm_epsilon = config.layer_norm_eps
        specification.validate()
        specification.optimize(quantization=precision)
        self._precision, threads = precision, torch.get_num_threads()
        self._processes = ProcessPoolExecutor(1, get_context("spawn")) if threads > 1 else None
        with TemporaryDirectory() as folder:
            specification.save(folder)
            self._call(load_translator, folder, precision, threads)

    def _call(self, function: Callable, *arguments: Any) -> Any:
        return (
            function(*arguments) if self._processes is None else self._processes.submit(function, *arguments).result()
        )

    def translate(self, sources: list[list[int]], beams: int, longest: int, shortest: int = 1) -> list[list[int]]:
        """Translate a batch into `shortest` to `longest` tokens, without the end token."""
        settings = {"beam_size": beams, "max_decoding_length": longest, "min_decoding_length": shortest}
        results = self._call(translate_with, self._precision, [list(map(str, row)) for row in sources], settings)
        return [list(map(int, result)) for result in results]


def make_sources(batch: int, length: int, vocabulary: int, shortest: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random source tokens `(batch, length)` and their mask; `shortest` is a share of the longest length."""
    generator = torch.Generator().manual_seed(batch)
    lengths = torch.randint(max(1, int(length * shortest)), length + 1, (batch,), generator=generator)
    lengths[0] = length
    mask = (torch.arange(length) < lengths[:, None]).long()
    tokens = torch.randint(1, vocabulary - 1, (batch, length), generator=generator)
    return tokens.masked_fill(mask == 0, vocabulary - 1), mask


def make_pairs(batch: int, length: int, vocabulary: int, shortest: float) -> dict[str, torch.Tensor]:
    """Return random sources and labels of up to `length` tokens for a forward pass."""
    tokens, mask = make_sources(batch, length, vocabulary, shortest)
    labels, label_mask = make_sources(batch, length, vocabulary, shortest)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels.masked_fill(label_mask == 0, -100)}


def endless_search(beams: int, new_tokens: int) -> dict[str, Any]:
    """Return arguments of `generate()` for the same number of tokens in each sentence."""
    settings = {"num_beams": beams, "do_sample": False, "max_new_tokens": new_tokens, "max_length": None}
    return settings | {"eos_token_id": None, "forced_eos_token_id": None, "bad_words_ids": None}


def native(model: Any, decoder: NativeDecoder, inputs: dict[str, Any], settings: dict[str, Any]) -> torch.Tensor:
    """Generate with Heed's native decoder."""
    return model.generate(**decoder.encoded(**inputs), custom_generate=decoder, **settings)


def training_step(model: Any, loss: Callable[..., torch.Tensor]) -> Callable[..., None]:
    """Return a training step with AdamW; its arguments are those of `loss`."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-5, fused=True)

    def step(*arguments: Any) -> None:
        loss(*arguments).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def check_losses(theirs: float, ours: float, tolerance: float = 1e-5) -> None:
    """Raise a `RuntimeError` if two losses differ by more than a share of the first."""
    if abs(ours - theirs) > tolerance * theirs:
        raise RuntimeError(f"Heed's loss must be Marian's, {theirs}, but is {ours}.")
