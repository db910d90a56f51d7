"""Registration of the tested models, and adapters to tests for decoders."""

import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.auto import modeling_auto

from heedful import HeedConfig, HeedForConditionalGeneration, HeedRNNConfig, HeedRNNForConditionalGeneration

# Tests look up a class's name here to decide whether it gets `labels`, and silently skip missing classes.
for model_type, kind in {"heed": "Heed", "heed_rnn": "HeedRNN"}.items():
    modeling_auto.MODEL_MAPPING_NAMES[model_type] = f"{kind}Model"
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES[model_type] = f"{kind}ForConditionalGeneration"

# The tests of sharded training make their model with AutoModelForCausalLM.
for config_class, model_class in {
    HeedConfig: HeedForConditionalGeneration,
    HeedRNNConfig: HeedRNNForConditionalGeneration,
    MarianConfig: MarianMTModel,
    BartConfig: BartForConditionalGeneration,
    T5Config: T5ForConditionalGeneration,
}.items():
    AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)


class DecodesItsInputs:
    """`input_ids` without targets, from a test of decoders, are source and target prefix."""

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        decoder_input_ids=None,
        encoder_outputs=None,
        labels=None,
        **kwargs,
    ):
        """Take `(batch, length)` ids."""
        if decoder_input_ids is None and labels is None:
            decoder_input_ids = input_ids
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            encoder_outputs=encoder_outputs,
            labels=labels,
            **kwargs,
        )


class ContinuesATarget:
    """The training test's text is the target, its first token the source; a prompt is a target's beginning."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, encoder_outputs=None, **kwargs):
        """Take `(batch, length)` ids."""
        source = input_ids if labels is None else input_ids[:, :1]
        return super().forward(
            input_ids=source, attention_mask=attention_mask, labels=labels, encoder_outputs=encoder_outputs, **kwargs
        )

    def generate(self, prompt, **kwargs):
        """Continue a `(batch, length)` prompt, which begins the result, as with a decoder."""
        start = torch.full_like(prompt[:, :1], self.config.decoder_start_token_id)
        return super().generate(prompt[:, :1], decoder_input_ids=torch.cat([start, prompt], dim=1), **kwargs)[:, 1:]


class HeedDecodesItsInputs(DecodesItsInputs, HeedForConditionalGeneration):
    """Heed under the tensor-parallel tests."""


class HeedContinuesATarget(ContinuesATarget, HeedForConditionalGeneration):
    """Heed under the training test."""


class HeedRNNDecodesItsInputs(DecodesItsInputs, HeedRNNForConditionalGeneration):
    """A recurrent Heed under the tensor-parallel tests."""


class HeedRNNContinuesATarget(ContinuesATarget, HeedRNNForConditionalGeneration):
    """A recurrent Heed under the training test."""


class MarianDecodesItsInputs(DecodesItsInputs, MarianMTModel):
    """Marian under the tensor-parallel tests."""


class MarianContinuesATarget(ContinuesATarget, MarianMTModel):
    """Marian under the training test."""


class BartDecodesItsInputs(DecodesItsInputs, BartForConditionalGeneration):
    """BART under the tensor-parallel tests."""


class BartContinuesATarget(ContinuesATarget, BartForConditionalGeneration):
    """BART under the training test."""


class T5DecodesItsInputs(DecodesItsInputs, T5ForConditionalGeneration):
    """T5 under the tensor-parallel tests."""


class T5ContinuesATarget(ContinuesATarget, T5ForConditionalGeneration):
    """T5 under the training test."""
