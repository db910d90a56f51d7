"""Convert saved transformers models into Heed models with exactly the same logits and tokens."""

import re
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from transformers import AutoConfig, AutoModelForSeq2SeqLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.utils import cached_file

from heedful.cards.model_card import CARD_FILE, metadata_of_card, render
from heedful.configuration_heed import HeedConfig
from heedful.conversion.families import EMBEDDINGS, ENCODERS, FAMILIES, exact_sinusoids, field_faults
from heedful.conversion.tokenizer_conversion import convert_tokenizers
from heedful.data.languages import code_of
from heedful.data.tokenization import tokenizing
from heedful.decoding.loading import HUB_ID, check_files, load_weights, reading
from heedful.decoding.search_settings import check_ids
from heedful.files import check_is_new, new_folder, read_object, write_text
from heedful.messages_heed import wrong
from heedful.modeling_heed import HeedForConditionalGeneration
from heedful.training.publication import UNDETERMINED

SPECIAL_IDS = ("pad_token_id", "eos_token_id", "decoder_start_token_id")
LICENSE_FIELDS = ("license", "license_name", "license_link")
IDENTIFIER = re.compile(r"(https://)?[\w.+/-]{1,200}")
TOLERANCE = 1e-4  # largest allowed logit difference in float32, relative if above 1


@dataclass(frozen=True)
class Conversion:
    """Facts about a converted model."""

    source: str  # folder or Hub id
    folder: Path  # type of the Heed model
    model_type: str  # type of the source, such as "marian"
    parameters: int  # shared ones counted once
    difference: float  # largest logit difference in float32, relative if above 1
    languages: tuple[str, ...] = ()  # source and target, if the tokenizer has them
    notes: tuple[str, ...] = ()  # one sentence each, for users
    added: str | None = None  # a new target language
    tokens: int | None = None  # of the target, if the vocabulary was cut


def convert(
    source: str | Path, target: str | Path, source_language: str | None = None, target_language: str | None = None
) -> Conversion:
    """Convert a saved model from one of the `FAMILIES` into a Heed folder, with tokenizers and card.

    Args:
        source: A folder, or an id on the Hub, which is downloaded.
        target: The folder to write; it must not exist. If the conversion fails, no folder is left.
        source_language: The source language in mBART's, M2M100's or NLLB's tokenizer, such as "eng_Latn". Default: the
            tokenizer's current language.
        target_language: The language to translate into, named as `source_language`.

    Raises:
        ValueError: If `target` exists, or Heed cannot represent the model or its tokenizer; the message names the
            fields.
        OSError: If `source` cannot be read, or `target` cannot be written.
        ImportError: If the tokenizer needs sentencepiece, which is not installed.
    """
    target = Path(target)
    check_is_new(target)
    theirs, dtype = _load(str(source))
    ours = convert_model(theirs)
    difference = largest_difference(theirs, ours)
    if not difference <= TOLERANCE:  # also not-a-number
        raise ValueError(f"The converted model's logits differ by {difference:.1e} from those in {source}.")
    config, settings = theirs.config, theirs.generation_config.to_dict()
    del theirs  # keeps only two copies of large checkpoints in memory
    with tokenizing("be converted"):
        converted = convert_tokenizers(str(source), ours.config, source_language, target_language)
    ours.generation_config = _generation_config(settings | converted.settings, ours.config)
    check_ids(ours.generation_config, ours.config.target_vocab_size)
    notes = list(converted.notes)
    if any(getattr(config, name, 0) for name in ("encoder_layerdrop", "decoder_layerdrop")):
        dropped = "Layer dropout (`encoder_layerdrop`, `decoder_layerdrop`)"
        notes.append(f"{dropped} is left out, because only training uses it.")
    if any(not torch.equal(weight.to(dtype).float(), weight) for weight in ours.parameters()):
        notes.append(f"The weights are in float32, because {dtype} would round T5's factor 1/√d_model in one.")
        dtype = torch.float32
    facts = config.model_type, ours.num_parameters(), difference, converted.languages, tuple(notes)
    conversion = Conversion(str(source), target, *facts)
    with new_folder(target) as folder:
        torch.nn.Module.to(ours, dtype).save_pretrained(folder)
        if converted.pair is not None:
            converted.pair.save_pretrained(folder)
        write_card(folder, conversion)
    return conversion


def convert_config(config: PreTrainedConfig) -> HeedConfig:
    """Return the equivalent Heed config, except values that `convert_model` takes from the weights."""
    _check_expressible(config)
    options = FAMILIES[config.model_type].heed_options(config)
    # transformers smooths labels in the trainer, not in the model.
    return HeedConfig(**options, vocab_size=config.vocab_size, label_smoothing=0.0, bos_token_id=None)


def convert_model(theirs: PreTrainedModel) -> HeedForConditionalGeneration:
    """Return a Heed model with a `FAMILIES` model's weights; a `ValueError` names obstacles."""
    config = convert_config(theirs.config)
    weights = FAMILIES[theirs.config.model_type].heed_weights(theirs, config)
    source, target, output = (weights[name] for name in EMBEDDINGS)
    options = config.to_dict()
    options |= {"vocab_size": source.shape[0], "decoder_vocab_size": target.shape[0]}
    one_source, one_output = source.data_ptr() == target.data_ptr(), target.data_ptr() == output.data_ptr()
    options |= {"share_encoder_decoder_embeddings": one_source, "tie_output_embeddings": one_output}
    options |= {"tie_word_embeddings": one_source or one_output, "output_bias": "lm_head.bias" in weights}
    # On the meta device, where no initial weights are drawn.
    with torch.device("meta"):
        ours = HeedForConditionalGeneration(HeedConfig(**options))
    ours.load_state_dict({name: value.clone() for name, value in weights.items()}, strict=True, assign=True)
    ours.tie_weights()
    return ours.eval()


@torch.no_grad()
def largest_difference(
    theirs: PreTrainedModel, ours: HeedForConditionalGeneration, tokens: int | None = None
) -> float:
    """Return the largest relative logit difference over random padded sentences from the first `tokens`."""
    config: Any = ours.config
    length, pad = config.max_position_embeddings, config.pad_token_id
    generator = torch.Generator().manual_seed(0)
    inputs: dict[str, Any] = random_sources(tokens or config.vocab_size, min(12, length), pad, generator)
    target = random_ids(tokens or config.decoder_vocab_size, min(7, length), pad, generator)
    target[:, 0] = config.decoder_start_token_id
    inputs |= {"decoder_input_ids": target, "use_cache": False}
    expected, found = (model.eval()(**inputs).logits[..., :tokens] for model in (theirs, ours))
    return relative_difference(expected, found)


def random_ids(tokens: int, length: int, pad: int, generator: torch.Generator) -> torch.Tensor:
    """Return three random sentences without padding, `(3, length)`."""
    allowed = torch.arange(tokens)[torch.arange(tokens) != pad]
    return allowed[torch.randint(len(allowed), (3, length), generator=generator)]


def random_sources(tokens: int, length: int, pad: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return random sentences with their mask, each three tokens shorter than the last."""
    ids = random_ids(tokens, length, pad, generator)
    mask = torch.arange(length) < length - 3 * torch.arange(len(ids))[:, None]
    return {"input_ids": ids.masked_fill(~mask, pad), "attention_mask": mask.long()}


def relative_difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Return the largest logit difference, relative for logits above 1."""
    return ((expected - found).abs().max() / expected.abs().max().clamp(min=1)).item()


def _check_expressible(config: PreTrainedConfig) -> None:
    if config.model_type not in FAMILIES:
        hint = "`--decoder-layers` gives such an encoder a decoder" * (config.model_type in ENCODERS)
        raise wrong("model_type", f"be one of {', '.join(FAMILIES)}", config.model_type, advice=hint)
    family = FAMILIES[config.model_type]
    others = set(config.architectures or ()) - {family.model_class}
    faults = [str(wrong("architectures", f"be {family.model_class}", name)) for name in sorted(others)]
    choices = {"is_encoder_decoder": (True,), "is_decoder": (False,), **family.read_choices(config)}
    faults += field_faults(config, choices)
    missing = (name for name in SPECIAL_IDS if getattr(config, name, None) is None)
    faults += [str(wrong(name, "be set", None)) for name in missing]
    if (quantized := getattr(config, "quantization_config", None)) is not None:
        faults.append(str(wrong("quantization_config", "be absent", quantized)))
    if faults:
        raise ValueError("The model cannot be converted: " + " ".join(faults))


def read_config(source: str) -> Any:
    """Read a checkpoint's config without running code from its folder."""
    if Path(source).is_dir():
        check_files(Path(source))
    with reading(source):
        return AutoConfig.from_pretrained(source, trust_remote_code=False)


def load_checkpoint(source: str, kind: Any, config: Any, read: str = "", **options: Any) -> PreTrainedModel:
    """Load a checkpoint by `load_weights`, unless it is smaller than its config requires."""
    with reading(source):
        with torch.device("meta"), init.no_init_weights():
            shape = kind.from_config(config)
            shape.tie_weights()
        asked = shape.num_parameters()
        held = sum(path.stat().st_size for path in Path(source).glob("*") if path.suffix in (".safetensors", ".bin"))
        if Path(source).is_dir() and asked > held:  # each takes at least a byte
            raise ValueError(f"its config has {asked:,} parameters, but its weights only {held:,} bytes")
    return load_weights(source, kind, read, may_lack="final_logits_bias", **options)  # which is zero then


def _load(source: str) -> tuple[PreTrainedModel, torch.dtype]:
    config = read_config(source)
    _check_expressible(config)
    # Under sdpa the decoder of umT5 looks ahead in transformers 5.17.
    options = {"attn_implementation": "eager"} if config.model_type == "umt5" else {}
    model = load_checkpoint(source, AutoModelForSeq2SeqLM, config, **options)
    dtype, ours = model.dtype, convert_config(config)
    model = model.float().eval()
    if ours.position_encoding == "sinusoidal" and dtype != torch.float32:
        for name, table in chain(model.named_parameters(), model.named_buffers()):
            if "embed_positions" in name:  # undo rounding; ours will be rounded too
                table.data.copy_(exact_sinusoids(name, table, ours, dtype))
    return model, dtype


def _generation_config(settings: dict[str, Any], config: HeedConfig) -> GenerationConfig:
    """Return a generation config with a maximum length; transformers' default is 20 tokens."""
    defaults = {name: getattr(config, name) for name in SPECIAL_IDS}
    if settings.get("max_new_tokens") is None:
        defaults["max_length"] = config.max_position_embeddings
    missing = {name: value for name, value in defaults.items() if settings.get(name) is None}
    return GenerationConfig.from_dict(settings | missing)


def write_card(folder: Path, conversion: Conversion) -> None:
    """Write README.md with the source card's license and languages, else `unknown` and `und`."""
    theirs, base_model = _metadata_of(conversion.source), _base_model(conversion.source)
    languages = list(dict.fromkeys(filter(None, map(code_of, conversion.languages))))
    languages = languages or _identifiers(theirs.get("language")) or [UNDETERMINED]
    about: dict[str, Any] = {name: next(iter(_identifiers(theirs.get(name))), None) for name in LICENSE_FIELDS}
    about |= {"license": about["license"] or "unknown", "base_model": base_model}
    metadata = metadata_of_card(conversion.folder.name, languages, [conversion.model_type], **about)
    facts: dict[str, Any] = {"version": version("heedful"), "source": base_model or Path(conversion.source).name}
    facts |= {"direction": " → ".join(conversion.languages or languages), "conversion": conversion}
    write_text(folder / CARD_FILE, render("conversion_card_template.md", metadata, **facts, **about))


def _identifiers(value: Any) -> list[str]:
    """Return the Hub identifiers and links in a foreign card's field."""
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, str) and IDENTIFIER.fullmatch(each)]


def _metadata_of(source: str) -> dict[str, Any]:
    try:
        path = cached_file(source, CARD_FILE, _raise_exceptions_for_missing_entries=False)
        return ModelCard.load(path, ignore_metadata_errors=True).data.to_dict() if path else {}
    except Exception:  # from the Hub, YAML or huggingface_hub: a missing or broken card
        return {}


def _base_model(source: str) -> str | None:
    if not Path(source).is_dir():
        return source
    remembered = read_object(Path(source) / "config.json").get("_name_or_path") or ""
    return remembered if HUB_ID.fullmatch(remembered) else None
