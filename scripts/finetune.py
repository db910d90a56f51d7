"""Go on training a saved Heed model with HeedSeq2SeqTrainer, transformers' Seq2SeqTrainer with exact results.

    python scripts/finetune.py runs/quickstart/model --train builtin:train:2000 --validation builtin:validation:200 \
        --source ko --target en --output runs/finetuned

The recipe's loop (`heedful train`, `model.start_from`) does more for long runs; this is the road for those who have a
Trainer set-up already, and a pattern to copy from. `--tokens-per-update` batches pairs of similar length.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import Seq2SeqTrainingArguments, set_seed

from heedful import HeedSeq2SeqTrainer
from heedful.cli.main import run
from heedful.data.sources import read_pairs
from heedful.data.tokenization import TokenizerPair
from heedful.evaluation.metrics import score_translations
from heedful.inference.loading import load_model


def finetune(
    model: Annotated[Path, typer.Argument(help="Folder of a saved model.")],
    train: Annotated[str, typer.Option(help="Training pairs: a file, a Hub dataset, builtin:SPLIT:COUNT.")],
    validation: Annotated[str, typer.Option(help="Validation pairs, likewise.")],
    source: Annotated[str, typer.Option(help="Source language or column.")],
    target: Annotated[str, typer.Option(help="Target language or column.")],
    output: Annotated[Path, typer.Option(help="Folder to save into; it must not hold anything yet.")],
    epochs: Annotated[float, typer.Option(help="Passes over the training pairs.")] = 1.0,
    batch_size: Annotated[int, typer.Option(help="Pairs per device and step.")] = 64,
    accumulation: Annotated[int, typer.Option(help="Steps per update.")] = 1,
    learning_rate: Annotated[float, typer.Option(help="Peak of the inverse square root schedule.")] = 5e-4,
    warmup_steps: Annotated[int, typer.Option(help="Updates up to the peak.")] = 100,
    seed: Annotated[int, typer.Option(help="Of dropout and order.")] = 1,
    tokens_per_update: Annotated[int | None, typer.Option(help="Padded tokens, in place of --batch-size.")] = None,
):
    """Fine-tune, validate with BLEU and chrF, save."""
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"`--output` must be an empty folder, but {output} is not.")
    set_seed(seed)
    network = load_model(model)
    tokenizers = TokenizerPair.from_pretrained(model)

    def encode(pairs):
        inputs = tokenizers.encode_source(pairs["source"])
        return {"input_ids": inputs, "labels": tokenizers.encode_target(pairs["target"])}

    def read(location, split):
        pairs = read_pairs(location, source=source, target=target, split=split)
        return pairs.map(encode, batched=True, remove_columns=pairs.column_names)

    def scores(results):
        texts, references = (tokenizers.decode_target(ids) for ids in (results.predictions, results.label_ids))
        values = score_translations(texts, references, metrics=("bleu", "chrf", "exact_match"))
        return {name: values[name] for name in ("bleu", "chrf", "exact_match")}

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
        model=network,
        args=arguments,
        train_dataset=read(train, "train"),
        eval_dataset=read(validation, "validation"),
        processing_class=tokenizers,
        compute_metrics=scores,
        tokens_per_update=tokens_per_update,
    )
    trainer.train()
    print({name: round(value, 3) for name, value in trainer.evaluate().items()})
    trainer.save_model()
    print(f"model: {output}")


if __name__ == "__main__":
    run(lambda: typer.run(finetune))
