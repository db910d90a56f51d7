"""Train a saved Heed model further with HeedSeq2SeqTrainer, transformers' Seq2SeqTrainer with exact results.

    python scripts/finetune.py runs/quickstart/model --train builtin:train:2000 --validation builtin:validation:200 \
        --source ko --target en --output runs/finetuned

Use it if you already have a Trainer. For long runs, `heedful train` with `model.start_from` does more.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import Seq2SeqTrainingArguments, set_seed

from heedful import HeedSeq2SeqTrainer
from heedful.cli.main import run
from heedful.data.epochs.encoding import PairEncoder
from heedful.data.sources import read_pairs
from heedful.data.tokenization import TokenizerPair
from heedful.decoding.loading import load_model
from heedful.evaluation.metrics import score_translations

METRICS = ("bleu", "chrf", "exact_match", "token_error_rate", "character_error_rate")


def finetune(
    model: Annotated[Path, typer.Argument(help="Folder with a saved model.")],
    train: Annotated[str, typer.Option(help="Training pairs: a file, a Hub dataset, builtin:SPLIT:COUNT.")],
    validation: Annotated[str, typer.Option(help="Validation pairs, likewise.")],
    source: Annotated[str, typer.Option(help="Source language or column.")],
    target: Annotated[str, typer.Option(help="Target language or column.")],
    output: Annotated[Path, typer.Option(help="Output folder; it must be new or empty.")],
    epochs: Annotated[float, typer.Option(help="Passes over the training pairs.")] = 1.0,
    batch_size: Annotated[int, typer.Option(help="Pairs per device and step.")] = 64,
    accumulation: Annotated[int, typer.Option(help="Steps per update.")] = 1,
    learning_rate: Annotated[float, typer.Option(help="Peak of the inverse square root schedule.")] = 5e-4,
    warmup_steps: Annotated[int, typer.Option(help="Updates until the peak learning rate.")] = 100,
    seed: Annotated[int, typer.Option(help="Random seed of dropout and order.")] = 1,
    tokens_per_update: Annotated[int | None, typer.Option(help="Padded tokens, instead of --batch-size.")] = None,
):
    """Fine-tune, validate with BLEU and chrF, save."""
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"`--output` must be an empty folder, but {output} is not.")
    set_seed(seed)
    tokenizers = TokenizerPair.from_pretrained(model)

    def rows(location, split):  # a list of {"input_ids": […], "labels": […]}
        return list(PairEncoder(tokenizers).rows(read_pairs(location, source=source, target=target, split=split)))

    def scores(results):
        texts, references = (tokenizers.decode_target(ids) for ids in (results.predictions, results.label_ids))
        values = score_translations(texts, references, metrics=METRICS)
        return {name: values[name] for name in METRICS}

    arguments = Seq2SeqTrainingArguments(
        output_dir=str(output),
        num_train_epochs=epochs,
        **({} if tokens_per_update else {"per_device_train_batch_size": batch_size}),
        per_device_eval_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        learning_rate=learning_rate,
        lr_scheduler_type="inverse_sqrt",
        warmup_steps=warmup_steps,
        adam_beta2=0.98,  # section 5.3 of the paper
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=20,
        predict_with_generate=True,
        report_to="none",
        dataloader_pin_memory=torch.cuda.is_available(),
        seed=seed,
    )
    trainer = HeedSeq2SeqTrainer(
        model=load_model(model),
        args=arguments,
        train_dataset=rows(train, "train"),
        eval_dataset=rows(validation, "validation"),
        processing_class=tokenizers,
        compute_metrics=scores,
        tokens_per_update=tokens_per_update,
    )
    trainer.train()
    print({name: round(value, 3) for name, value in trainer.evaluate().items()})
    trainer.save_model()
    print(f"model: {output}\nBefore `heedful push`, `heedful card {output}` writes its card.")


if __name__ == "__main__":
    run(lambda: typer.run(finetune))
