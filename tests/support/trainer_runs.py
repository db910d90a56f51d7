"""A tiny model with either trainer, and pairs to learn by heart, for tests of options.

python trainer_runs.py FOLDER pushes to the stand-in that HF_ENDPOINT names, into repositories `me/STRATEGY`.
"""

import sys
from functools import cache
from pathlib import Path

import torch
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

from heedful import HeedForConditionalGeneration, HeedSeq2SeqTrainer
from heedful.data.tokenization import TokenizerPair
from heedful.data.tokenizer_training import train_tokenizers
from helpers import tiny_config
from memorised import PAIRS, encoded

TRAINERS = [Seq2SeqTrainer, HeedSeq2SeqTrainer]
SOURCES, TARGETS = list(PAIRS), list(PAIRS.values())
SEPARATE = {"vocab_size": 264, "decoder_vocab_size": 266, "share_encoder_decoder_embeddings": False}
PUSHES = ("every_save", "checkpoint", "all_checkpoints", "end")


@cache
def joint_tokenizers() -> TokenizerPair:
    return train_tokenizers(SOURCES, TARGETS, vocab_size=272)


def separate_tokenizers() -> TokenizerPair:
    return train_tokenizers(SOURCES, TARGETS, vocab_size=264, target_vocab_size=266, joint=False)


def encoded_pairs(tokenizers: TokenizerPair | None = None) -> list[dict[str, list[int]]]:
    """Return the six pairs as `input_ids` and `labels`; no two have as many labels."""
    return encoded(tokenizers or joint_tokenizers(), SOURCES, TARGETS)


def fresh_model(**changes) -> HeedForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"vocab_size": 272, "encoder_layers": 1, "decoder_layers": 1}
    return HeedForConditionalGeneration(tiny_config(**{**sizes, **changes}))


def collator(**options) -> DataCollatorForSeq2Seq:
    return DataCollatorForSeq2Seq(joint_tokenizers().source, **options)


def make_trainer(kind, folder: Path, model=None, given=None, **arguments):
    """Return a trainer of all six pairs in order, in one update after the other; `given` goes to it as it is."""
    settings = {"max_steps": 2, "logging_steps": 1, "save_strategy": "no", "learning_rate": 1e-3, **arguments}
    settings = {"per_device_train_batch_size": 6, "train_sampling_strategy": "sequential", **settings}
    given = {"train_dataset": encoded_pairs(), "eval_dataset": encoded_pairs(), **(given or {})}
    if "model_init" not in given:
        model = given["model"] = model or fresh_model()
    given.setdefault("data_collator", collator(model=model))
    folders = {"output_dir": str(folder), "report_to": "none", "disable_tqdm": True}
    return kind(args=Seq2SeqTrainingArguments(**folders, use_cpu=True, **settings), **given)


def logged(trainer, name: str = "loss") -> list[float]:
    """Return what the trainer logged under a name, one number per update."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def trained(kind, folder: Path, model=None, given=None, resume=None, **arguments):
    """Return a trainer that has trained, from a checkpoint on where one is to be resumed."""
    trainer = make_trainer(kind, folder, model, given, **arguments)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def same_weights(one, other) -> bool:
    """Return whether the models of two trainers are equal."""
    return all(map(torch.equal, one.model.parameters(), other.model.parameters()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    tokenizers = separate_tokenizers()
    given = {"processing_class": tokenizers, "train_dataset": encoded_pairs(tokenizers)}
    for strategy in PUSHES:
        folder, model = Path(sys.argv[1]) / strategy, fresh_model(**SEPARATE)
        options = {"hub_model_id": f"me/{strategy}", "hub_strategy": strategy, "hub_always_push": True}
        options |= {"push_to_hub": True, "save_strategy": "steps", "save_steps": 1}
        trainer = make_trainer(HeedSeq2SeqTrainer, folder, model, given, **options)
        # The weights of an earlier run, without their code.
        fresh_model(**SEPARATE, d_model=16).save_pretrained(folder)
        for path in folder.glob("*.py"):
            path.unlink()
        trainer.train()
        if strategy == "end":
            trainer.push_to_hub(language=["ko", "en"], license="apache-2.0")
