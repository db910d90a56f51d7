"""Tiny models and batches that several test files use."""

import torch

from heedful import HeedConfig, HeedForConditionalGeneration

PAD, START = 0, 1
# The files of code that are saved with a model of each family, and those of the pipeline alone.
PIPELINE_CODE = {"configuration_base_heed.py", "generation_heed.py", "pipeline_heed.py"}
SHARED_CODE = PIPELINE_CODE | {"fast_paths_heed.py", "loss_heed.py", "pretrained_heed.py"}
CODE = SHARED_CODE | {"attention_heed.py", "configuration_heed.py", "modeling_heed.py", "positions_heed.py"}
RNN_CODE = SHARED_CODE | {"cells_heed.py", "configuration_heed_rnn.py", "modeling_heed_rnn.py"}
# Many end tokens, so that the sentences of a batch end at different steps.
ENDS = list(range(2, 14))
FIRST_WORD = 14
# Each is an option, or a combination of options, that changes what positions, masks or caches have to do.
VARIANTS = {
    "default": {},
    "modern": {"norm_placement": "pre", "norm_type": "rmsnorm", "activation_function": "swiglu"},
    "rotary": {"position_encoding": "rotary"},
    "learned": {"position_encoding": "learned"},
    "no_positions": {"position_encoding": "none"},
    "dot": {"attention_scoring": "dot", "sinusoid_layout": "concatenated"},
    "additive": {"attention_scoring": "additive", "attention_bias": True},
    "neighbourhoods": {"encoder_neighbourhood": 2, "decoder_neighbourhood": 3},
    "grouped": {"d_k": 6, "d_v": 10, "encoder_key_value_heads": 1, "decoder_key_value_heads": 2},
    "separate_vocabularies": {"decoder_vocab_size": 71, "share_encoder_decoder_embeddings": False},
    "bart": {"position_encoding": "learned", "embedding_norm": True, "output_bias": True, "attention_bias": True},
    "m2m100": {"sinusoid_layout": "tensor2tensor", "position_offset": 2, "norm_placement": "pre"},
    "unequal_stacks": {"decoder_layers": 3, "decoder_attention_heads": 2, "decoder_ffn_dim": 48},
}
SHARINGS = {
    "all_shared": {},
    "nothing_shared": {"tie_word_embeddings": False},
    "own_source": {"share_encoder_decoder_embeddings": False},
    "own_output": {"tie_output_embeddings": False},
    "own_source_and_output": {"share_encoder_decoder_embeddings": False, "tie_output_embeddings": False},
    "separate_vocabularies": VARIANTS["separate_vocabularies"],
    "separate_vocabularies_untied": {"decoder_vocab_size": 71, "tie_word_embeddings": False},
}


def tiny_config(**changes) -> HeedConfig:
    """Return a config of two layers without dropout, so that training mode is deterministic too."""
    sizes = {
        **{"vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0},
        **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
        **{"max_position_embeddings": 64},
    }
    return HeedConfig(**{**sizes, **changes})


@torch.no_grad()
def shake(module: torch.nn.Module):
    """Draw every parameter anew, biases and norms included: fresh weights hide what is zero or one."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=2.0 * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.2)


def tiny_model(config: HeedConfig | None = None, seed: int = 0, attention: str | None = None, **changes):
    """Return a tiny model in evaluation mode whose outputs depend on everything it reads."""
    torch.manual_seed(seed)
    model = HeedForConditionalGeneration._from_config(config or tiny_config(**changes), attn_implementation=attention)
    shake(model)
    # The library's default embeddings: larger ones would drown the positions.
    torch.nn.init.normal_(model.model.encoder.embed_tokens.weight, std=model.config.d_model**-0.5)
    if not model.config.shares_source_and_target_embeddings:
        torch.nn.init.normal_(model.model.decoder.embed_tokens.weight, std=model.config.d_model**-0.5)
    model.generation_config.eos_token_id = ENDS
    # Untrained models like one token best; its successors depend on all that is read.
    model.generation_config.no_repeat_ngram_size = 1
    return model.eval()


def sentences(*lengths: int, vocab_size: int = 71) -> list[torch.Tensor]:
    """Return random token ids of the given lengths."""
    return [torch.randint(FIRST_WORD, vocab_size, (length,)) for length in lengths]


def padded(rows: list[torch.Tensor], side: str = "right") -> tuple[torch.Tensor, torch.Tensor]:
    """Stack rows to `(batch, longest)` ids and the mask that is 0 at padding."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad(rows, batch_first=True, padding_value=PAD, padding_side=side)
    mask = pad([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)
    return ids, mask


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-5):
    """Compare to a tolerance relative to the largest number, and absolute below one."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * max(1.0, theirs.abs().max().item()))
