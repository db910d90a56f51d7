"""A trained encoder with a new decoder: "BERT2RND" of Rothe et al., 2020, with shared embeddings."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from transformers import AutoModel

from heedful.configuration_heed import HeedConfig
from heedful.conversion import model_conversion as models
from heedful.conversion.families import ENCODERS, field_faults
from heedful.conversion.tokenizer_conversion import load_tokenizer, plain_fast
from heedful.data.tokenization import TokenizerPair, tokenizing
from heedful.files import check_at_least, check_is_new, new_folder
from heedful.messages_heed import wrong
from heedful.modeling_heed import HeedForConditionalGeneration

WHY_NOT = {
    "modernbert": "its layers use two kinds of rotary positions, and only some attend to all tokens",
    "deberta-v2": "its scores combine positions and contents",
    "electra": "its embeddings are projected",
}
OPTIONS: dict[str, Any] = {"position_encoding": "learned", "embedding_norm": True, "attention_bias": True}
OPTIONS |= {"scale_embedding": False, "norm_placement": "post", "bos_token_id": None}
NAMES = {
    **{f"attention.self.{part}": f"self_attn.{part[0]}_proj" for part in ("query", "key", "value")},
    "attention.output.dense": "self_attn.out_proj",
    "attention.output.LayerNorm": "self_attn_residual.norm",
    "intermediate.dense": "feed_forward.fc1",
    "output.dense": "feed_forward.fc2",
    "output.LayerNorm": "feed_forward_residual.norm",
}
READ = r"encoder\.layer|embeddings\.(?!position_ids)"  # names of weights, without heads
TOLERANCE = 1e-5  # encoder states; relative for states above 1


def warm_start(source: str, target: Path, decoder_layers: int) -> models.Conversion:
    """Write a Heed model with a checkpoint's encoder, tokenizer and embeddings, and a random decoder.

    The decoder has the encoder's number of heads and widths. Source, target and output share the embeddings. Targets
    start and end with the same tokens as sources. For `source`, `target` and the errors see `convert`.
    """
    check_is_new(target)
    check_at_least(1, **{"--decoder-layers": decoder_layers})
    config = models.read_config(source)
    if config.model_type not in ENCODERS:
        must = f"be one of {', '.join(ENCODERS)} for `--decoder-layers`"
        raise wrong("model_type", must, config.model_type, advice=WHY_NOT.get(config.model_type, ""))
    faults = list(field_faults(config, {"is_decoder": (False,), "position_embedding_type": ("absolute",)}))
    faults += [str(wrong("pad_token_id", "be set", None))] * (config.pad_token_id is None)
    if faults:
        raise ValueError("The encoder cannot be converted: " + " ".join(faults))
    theirs = models.load_checkpoint(source, AutoModel, config, READ, add_pooling_layer=False).float().eval()
    with tokenizing("be converted"):
        tokenizer = load_tokenizer(source)
        if tokenizer is None:
            raise ValueError(f"{source} must hold a tokenizer for `--decoder-layers`, but has none.")
        ours = _model_of(theirs, tokenizer, decoder_layers)
        pair = _pair_of(tokenizer, ours.config)
    pad, length = config.pad_token_id, min(12, ours.config.max_position_embeddings)
    given = models.random_sources(config.vocab_size, length, pad, torch.Generator().manual_seed(0))
    mask = given["attention_mask"].bool()
    with torch.no_grad():
        difference = models.relative_difference(theirs(**given)[0][mask], ours.get_encoder()(**given)[0][mask])
    if not difference <= TOLERANCE:
        raise ValueError(f"The converted encoder's states differ by {difference:.1e} from those in {source}.")
    notes = ("The decoder is new: train the model before you use it.",)
    conversion = models.Conversion(source, target, config.model_type, ours.num_parameters(), difference, (), notes)
    with new_folder(target) as folder:  # no card before training
        ours.save_pretrained(folder)
        pair.save_pretrained(folder)
    return conversion


def _model_of(theirs: Any, tokenizer: Any, decoder_layers: int) -> HeedForConditionalGeneration:
    config = theirs.config
    first = 0 if config.model_type == "bert" else config.pad_token_id + 1  # row of the first position
    both = {"attention_heads": config.num_attention_heads, "ffn_dim": config.intermediate_size}
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in both.items()}
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        ours = HeedForConditionalGeneration(
            HeedConfig(
                **OPTIONS, **sizes, d_model=config.hidden_size, encoder_layers=config.num_hidden_layers,
                decoder_layers=decoder_layers, vocab_size=config.vocab_size, layer_norm_eps=config.layer_norm_eps,
                max_position_embeddings=config.max_position_embeddings - first, activation_function=config.hidden_act,
                dropout=config.hidden_dropout_prob, attention_dropout=config.attention_probs_dropout_prob,
                pad_token_id=config.pad_token_id, eos_token_id=tokenizer.sep_token_id,
                decoder_start_token_id=tokenizer.cls_token_id,
            )
        )  # fmt: skip
        weights, state = ours.get_encoder().state_dict(), theirs.state_dict()
        weights["embed_tokens.weight"].copy_(state["embeddings.word_embeddings.weight"])
        # All tokens have the first type, so positions include its vector.
        kind = state["embeddings.token_type_embeddings.weight"][0]
        weights["embed_positions.weight"].copy_(state["embeddings.position_embeddings.weight"][first:] + kind)
        for part in ("weight", "bias"):
            weights[f"embedding_norm.{part}"].copy_(state[f"embeddings.LayerNorm.{part}"])
            for number in range(config.num_hidden_layers):
                for name, own in NAMES.items():
                    weights[f"layers.{number}.{own}.{part}"].copy_(state[f"encoder.layer.{number}.{name}.{part}"])
    return ours.eval()


def _pair_of(tokenizer: Any, config: Any) -> TokenizerPair:
    """Return the checkpoint's tokenizer for sources, and one without a first token for targets."""
    if not tokenizer.is_fast:
        must = "a fast one (of the library `tokenizers`) for `--decoder-layers`"
        raise ValueError(f"The tokenizer must be {must}, but is a {type(tokenizer).__name__} instead.")
    tokenizer.eos_token = tokenizer.sep_token
    source, target = (plain_fast(tokenizer, config.vocab_size, tokenizer.cls_token) for _ in range(2))
    end = tokenizer.sep_token
    target.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.sep_token_id)]
    )
    pair = TokenizerPair(source, target)
    config.bos_token_id = pair.special_ids()["bos_token_id"]
    pair.check_config(config)
    return pair
