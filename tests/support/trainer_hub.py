"""Train and push with either trainer and every strategy, for test_trainer_publishing.py: python trainer_hub.py FOLDER.

HF_ENDPOINT names the stand-in; the repositories are `me/TRAINER-STRATEGY`.
"""

import sys
from pathlib import Path

import torch
from transformers import Seq2SeqTrainer

from heedful import HeedSeq2SeqTrainer
from trainer_runs import SEPARATE, encoded_pairs, fresh_model, make_trainer, separate_tokenizers

# transformers' trainer is a measure of what ours sends, once before the end and there.
PUSHES = [(HeedSeq2SeqTrainer, strategy) for strategy in ("every_save", "checkpoint", "all_checkpoints", "end")]
PUSHES += [(Seq2SeqTrainer, strategy) for strategy in ("every_save", "end")]

if __name__ == "__main__":
    torch.set_num_threads(1)
    tokenizers = separate_tokenizers()
    for kind, strategy in PUSHES:
        name = f"{kind.__name__}-{strategy}"
        trainer = make_trainer(
            kind,
            Path(sys.argv[1]) / name,
            fresh_model(**SEPARATE),
            {"processing_class": tokenizers, "train_dataset": encoded_pairs(tokenizers)},
            push_to_hub=True,
            hub_model_id=f"me/{name}",
            hub_strategy=strategy,
            hub_always_push=True,
            save_strategy="steps",
            save_steps=1,
        )
        # The weights of an earlier run, without their code, which only our trainer is to send.
        fresh_model(**SEPARATE, d_model=16).save_pretrained(Path(sys.argv[1]) / name)
        for path in (Path(sys.argv[1]) / name).glob("*.py"):
            path.unlink()
        trainer.train()
        if strategy == "end":
            trainer.push_to_hub(language=["ko", "en"], license="apache-2.0")
