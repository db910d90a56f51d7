"""A random checkpoint with COMET's architecture."""

import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, XLMRobertaConfig, XLMRobertaModel

WIDTH, LAYERS = 8, 3
SETTINGS = {"class_identifier": "regression_metric", "pretrained_model": "xlm-roberta-large", "pool": "avg"}
SETTINGS |= {"layer": "mix", "layer_transformation": "sparsemax", "layer_norm": False, "activations": "Tanh"}
WORDS = ["a", "cat", "sleeps", "eine", "Katze", "schläft", "the", "Dog"]


def comet_checkpoint(folder, **changes):
    """Write a checkpoint with random weights, as `unbabel-comet` does, and return its encoder and other weights."""
    torch.manual_seed(3)
    settings = SETTINGS | changes
    config = XLMRobertaConfig(
        vocab_size=12, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=2, intermediate_size=16
    )
    encoder = XLMRobertaModel(config, add_pooling_layer=False).eval()
    (folder / "encoder").mkdir(parents=True)
    config.save_pretrained(folder / "encoder")
    vocabulary = {token: number for number, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "encoder")
    inputs = 6 if settings["class_identifier"] == "regression_metric" else 4
    others = {f"layerwise_attention.scalar_parameters.{n}": torch.randn(1) for n in range(LAYERS + 1)}
    others |= {"layerwise_attention.gamma": torch.tensor([1.3])}
    for number, (wide, narrow) in zip((0, 3, 6), ((inputs * WIDTH, 10), (10, 6), (6, 1)), strict=True):
        others[f"estimator.ff.{number}.weight"] = torch.randn(narrow, wide)
        others[f"estimator.ff.{number}.bias"] = torch.randn(narrow)
    state = {f"encoder.model.{name}": value for name, value in encoder.state_dict().items()} | others
    (folder / "checkpoints").mkdir()
    torch.save({"state_dict": state, "epoch": 1}, folder / "checkpoints" / "model.ckpt")
    (folder / "hparams.yaml").write_text(yaml.safe_dump(settings))
    return encoder, others
