"""Sizes and options of recurrent encoder-decoders, which the Transformer replaced."""

from typing import Literal

from transformers.configuration_utils import strict

from .configuration_base_heed import HeedBaseConfig


@strict
class HeedRNNConfig(HeedBaseConfig):
    r"""Configuration of [`HeedRNNModel`] and [`HeedRNNForConditionalGeneration`].

    `HeedRNNConfig()` is Bahdanau's model (2015) in Luong's order (2015): a bidirectional GRU encoder, and a GRU
    decoder with input feeding. Every argument is keyword-only.

    Args:
        vocab_size, decoder_vocab_size, tie_word_embeddings, share_encoder_decoder_embeddings, tie_output_embeddings,
            source_word_dropout, target_word_dropout, pad_token_id, bos_token_id, eos_token_id,
            decoder_start_token_id, format_version: As in `HeedConfig`.
        embedding_size (`int`): Width of the embeddings and of the pre-softmax layer's input.
        hidden_size (`int`): Width of decoder states and encoder outputs; half per direction in bidirectional encoders.
        encoder_layers, decoder_layers (`int`): Number of recurrent layers.
        cell (`str`): `rnn` (Elman, 1990), `lstm` (Hochreiter and Schmidhuber, 1997, with Gers et al.'s forget gate,
            2000) or `gru` (Cho et al., 2014).
        activation_function (`str`): `tanh`, `relu`, `sigmoid` or `linear` for the cell `rnn`; torch has no fused cells
            with the last two. `lstm` and `gru` need `tanh`.
        bidirectional (`bool`): Whether encoder layers run in both directions (Schuster and Paliwal, 1997).
        attention (`str`): How the decoder's state q scores the encoder's state k: `dot` qᵀk, `scaled_dot`
            qᵀk/√hidden_size, `general` qᵀWk (Luong et al., 2015), `additive` vᵀtanh(Wq + Uk) (Bahdanau et al., 2015);
            or `none`: the decoder sees only the encoder's last state (Sutskever et al., 2014).
        input_feeding (`bool`): Whether the previous step's attention output is fed to the decoder with each token
            (Luong et al., 2015, section 3.3; training then runs step by step), or, without attention, the encoder's
            last state (Cho et al., 2014).
        num_attention_heads (`int`): 1, for prompt tuning with peft, whose `token_dim` is `embedding_size`.
        bridge (`str`): From the encoder's last state to the decoder's first: `linear` (a matrix per layer), `copy`, or
            `none` (zeros).
        reverse_source (`bool`): Whether the encoder begins at the source's end (Sutskever et al., 2014, section 3.3).
        use_fused_cells (`bool`): Whether torch's fused cells run, or the equations: slower, but differentiable twice.
        dropout (`float`): Dropout on embeddings, between layers and on the pre-softmax layer's input.
        label_smoothing (`float`): ε_ls in the training loss; evaluation uses the plain cross-entropy.
        use_cache (`bool`): Whether `generate()` continues from the last state instead of from the beginning.

    Raises:
        ValueError: If a field is out of range, does not fit another, or looks misspelt; the message names it.
    """

    model_type = "heed_rnn"
    attribute_map = {"d_model": "hidden_size", "num_hidden_layers": "encoder_layers"}
    # Not `layers.*`: with input feeding, each token would gather the decoder's layers.
    base_model_fsdp_plan = {"embed_tokens": "free_full_weight"}

    embedding_size: int = 512
    hidden_size: int = 1024
    encoder_layers: int = 1
    decoder_layers: int = 1
    cell: Literal["rnn", "lstm", "gru"] = "gru"
    activation_function: Literal["tanh", "relu", "sigmoid", "linear"] = "tanh"
    bidirectional: bool = True
    attention: Literal["none", "dot", "scaled_dot", "general", "additive"] = "additive"
    num_attention_heads: Literal[1] = 1
    input_feeding: bool = True
    bridge: Literal["linear", "copy", "none"] = "linear"
    reverse_source: bool = False
    use_fused_cells: bool = True
    dropout: float | int = 0.2

    def _check_own_fields(self) -> None:
        self._check_at_least_one("vocab_size", "decoder_vocab_size", "embedding_size", "hidden_size")
        self._check_at_least_one("encoder_layers", "decoder_layers")
        super()._check_own_fields()
        self._check_shares("dropout")
        is_met = self.cell == "rnn" or self.activation_function == "tanh"
        self._require(is_met, "activation_function", f"tanh with the cell {self.cell}")
        if self.bidirectional:
            rule = "even with a bidirectional encoder, each of whose directions has half of it"
            self._require(self.hidden_size % 2 == 0, "hidden_size", rule)
            self._require(not self.reverse_source, "reverse_source", "False with a bidirectional encoder")
        rule = "linear or copy without attention and input feeding, or nothing of the source reaches the decoder"
        self._require(self.attention != "none" or self.bridge != "none" or self.input_feeding, "bridge", rule)
        depths = f"decoder layers ({self.decoder_layers}) than encoder layers ({self.encoder_layers})"
        is_met = self.bridge != "copy" or self.encoder_layers >= self.decoder_layers
        self._require(is_met, "bridge", f"linear or none with more {depths}")
