"""Measure the contract's promises for Heed's loop, for HeedSeq2SeqTrainer, and for Marian with Seq2SeqTrainer.

The same code measures all three columns, on tiny models of equal sizes with random weights. The tests assert the
results, and `scripts/benchmarks/contract.py` prints them.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import transformers
from accelerate import Accelerator
from transformers import AutoModelForSeq2SeqLM, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

from heedful import HeedConfig, HeedForConditionalGeneration, HeedSeq2SeqTrainer, TokenizerPair, Translator
from heedful.data.epochs.batching import BatchingSettings, UpdateBatches
from heedful.data.epochs.encoding import EncodedPairs
from heedful.data.epochs.micro_batches import collate
from heedful.data.tokenizer_training import train_tokenizers
from heedful.evaluation.metrics import score_translations
from heedful.training.loop.loop import TrainingLoop
from heedful.training.loop.validation import translate_on_ranks, validation_loss
from heedful.training.preparation import prepare_corpus
from heedful.training.processes.devices import make_accelerator
from heedful.training.run_folder.checkpoints import checkpoint_path
from heedful_lab.korean_english.pairs import korean_english_pairs
from memorised import encoded
from tiny_runs import tiny_recipe

PAIRS, EVALUATION_PAIRS = 48, 21
SIZES = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
SIZES |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 400}
HUGE = 10**6  # padded tokens
STOP, END = 5, 6  # updates; an epoch has four


# What is measured on


def pairs_of_very_different_lengths(split: str, count: int, longest: int) -> list[dict[str, str]]:
    """Join 1, 2, …, `longest` built-in sentences to one, again and again."""
    sentences = iter(korean_english_pairs(split, count * longest))
    pairs = []
    for number in range(count):
        joined = [next(sentences) for _ in range(1 + number * 5 % longest)]
        pairs.append({side: " ".join(pair[side] for pair in joined) for side in ("ko", "en")})
    return pairs


@torch.no_grad()
def shake(model) -> None:
    """Draw all weights so large that untrained models translate different sentences differently."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dim() > 1:
            parameter.normal_(std=2.0 * parameter.shape[-1] ** -0.5)
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=model.config.d_model**-0.5)
    # Many tokens end a sentence, so that those of a batch end at different steps.
    model.generation_config.eos_token_id = list(range(2, 14))
    model.generation_config.no_repeat_ngram_size = 1
    model.generation_config.max_length = 24


def prepare(folder: Path, longest: tuple[int, int] = (9, 4)) -> None:
    """Write tokenizers, both models and the rows of as many sentences into a folder, once for all processes."""
    torch.manual_seed(1)
    training = pairs_of_very_different_lengths("train", PAIRS, longest[0])
    evaluation = pairs_of_very_different_lengths("validation", EVALUATION_PAIRS, longest[1])
    tokenizers = train_tokenizers([p["ko"] for p in training], [p["en"] for p in training], vocab_size=400)
    tokenizers.save_pretrained(folder / "tokenizer")
    heed = HeedForConditionalGeneration(HeedConfig(**SIZES, dropout=0.0, label_smoothing=0.0)).eval()
    ids = {name: getattr(heed.config, name) for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id")}
    options = {"dropout": 0.0, "max_position_embeddings": 512, "forced_eos_token_id": None, **ids}
    marian = transformers.MarianMTModel(transformers.MarianConfig(**SIZES, **options)).eval()
    rows = {"training": encode(tokenizers, training)}
    for name, model in (("heed", heed), ("marian", marian)):
        shake(model)
        model.save_pretrained(folder / name)
        tokenizers.save_pretrained(folder / name)
        # Two of three references are what the model says, so that BLEU is far from 0 and from 100.
        found = evaluation
        for number, row in enumerate(encode(tokenizers, evaluation)):
            if number % 3:
                tokens = model.generate(torch.tensor([row["input_ids"]]), num_beams=1)
                (text,) = tokenizers.decode_target(tokens)
                found = [*found[:number], {**found[number], "en": text or "."}, *found[number + 1 :]]
        rows[name] = [{**row, **pair} for row, pair in zip(encode(tokenizers, found), found, strict=True)]
    (folder / "rows.json").write_text(json.dumps(rows))


def encode(tokenizers: TokenizerPair, pairs: list[dict[str, str]]) -> list[dict[str, list[int]]]:
    """Turn pairs into `input_ids` and `labels`."""
    return encoded(tokenizers, *([pair[side] for pair in pairs] for side in ("ko", "en")))


def collator(pad: int):
    """Return a function that makes tensors of rows, ignoring their texts."""
    return lambda rows: collate([{name: row[name] for name in ("input_ids", "labels")} for row in rows], pad)


def tokens_per_update(rows: list[dict[str, list[int]]]) -> int:
    """Return the fewest padded tokens of an update of six buckets that holds all rows."""
    lengths = [[len(row[name]) for row in rows] for name in ("input_ids", "labels")]
    real = sum(map(sum, lengths))
    for tokens in range(real - real % 60, HUGE, 60):
        settings = BatchingSettings(tokens_per_update=tokens, buckets_per_update=6)
        if len(UpdateBatches(*lengths, settings).epoch(0)) == 1:
            return tokens
    raise AssertionError


def gradient_of(model) -> torch.Tensor:
    """Return all gradients of a model as one vector."""
    return torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None]).double()


# The columns


@dataclass
class WithTrainer:
    """A model with one of the trainers."""

    folder: Path
    kind: type
    model: str
    rows: dict[str, list] = field(default_factory=dict)

    def __post_init__(self):
        self.rows = json.loads((self.folder / "rows.json").read_text())
        self.tokenizers = TokenizerPair.from_pretrained(self.folder / "tokenizer")
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.is_ours = self.kind is HeedSeq2SeqTrainer

    def trainer(self, model=None, options=None, **arguments):
        """Make a trainer on the training and evaluation rows."""
        model = model or AutoModelForSeq2SeqLM.from_pretrained(self.folder / self.model)
        settings = {"max_steps": 1, "logging_steps": 1, "save_strategy": "no", "learning_rate": 0.0}
        settings |= {"use_cpu": True, "max_grad_norm": 0.0, "report_to": "none", "disable_tqdm": True}
        settings |= {"remove_unused_columns": False, "dataloader_pin_memory": False, "predict_with_generate": True}
        args = Seq2SeqTrainingArguments(str(self.folder / f"{self.model}-{self.world}"), **settings | arguments)
        if not self.is_ours and args.device.type == "cpu":
            # transformers 5.17 cannot resume on a CPU with a number; HeedSeq2SeqTrainer sees to it by itself.
            args.__dict__["_setup_devices"] = torch.device("cpu")
        given = {"train_dataset": self.rows["training"], "eval_dataset": self.rows[self.model], **(options or {})}
        return self.kind(model, args, collator(model.config.pad_token_id), compute_metrics=self.scores, **given)

    def scores(self, results) -> dict[str, float]:
        """Score what the trainer collected."""
        texts, references = (self.tokenizers.decode_target(ids) for ids in (results.predictions, results.label_ids))
        return {name: score_translations(texts, references)[name] for name in ("bleu", "chrf")}

    def update(self, micro: int, accumulation: int, smoothing: float, by_tokens: bool):
        """Return loss and gradient of one update on all training rows."""
        found = []

        class Recorder(TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
                found.append(gradient_of(model))

        arguments = {"gradient_accumulation_steps": accumulation, "label_smoothing_factor": smoothing}
        options: dict[str, Any] = {"callbacks": [Recorder()]}
        if by_tokens:
            options |= {"tokens_per_update": tokens_per_update(self.rows["training"]), "buckets_per_update": 6}
        else:
            arguments["per_device_train_batch_size"] = micro
        trainer = self.trainer(options=options, **arguments)
        if smoothing and not self.is_ours:
            # LabelSmoother takes the labels away, of which Marian makes what the decoder reads.
            make, model = trainer.data_collator, trainer.model

            def collate_for_smoothing(rows):
                batch = make(rows)
                return {**batch, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(batch["labels"])}

            trainer.data_collator = collate_for_smoothing
        trainer.train()
        return trainer.state.log_history[0]["loss"], found[0]

    def evaluate(self, size: int) -> dict[str, Any]:
        """Evaluate in batches of `size`."""
        trainer = self.trainer(per_device_eval_batch_size=size)
        result = trainer.predict(self.rows[self.model], num_beams=1, metric_key_prefix="eval")
        labels = [[token for token in row if token >= 0 and token != 0] for row in result.label_ids.tolist()]
        return {
            "loss": result.metrics["eval_loss"],
            "scores": [result.metrics["eval_bleu"], result.metrics["eval_chrf"]],
            "predictions": self.tokenizers.decode_target(result.predictions),
            "in_order": labels[:EVALUATION_PAIRS] == [row["labels"] for row in self.rows[self.model]],
        }

    def resume(self, by_length: bool, **more: Any) -> float:
        """Return how far weights are off after training with a stop in the second epoch."""
        weights = []
        options: dict[str, Any] = {}
        arguments = {"max_steps": END, "save_strategy": "steps", "save_steps": STOP, "learning_rate": 1e-3, **more}
        if not by_length:
            arguments["per_device_train_batch_size"] = 12 // self.world
        elif self.is_ours:
            options = {"tokens_per_update": tokens_per_update(self.rows["training"]) // 3}
        else:
            arguments |= {"train_sampling_strategy": "group_by_length"}
            arguments |= {"per_device_train_batch_size": 12 // self.world}
        for start in (None, True):
            torch.manual_seed(3)
            model = AutoModelForSeq2SeqLM.from_pretrained(self.folder / self.model, dropout=0.1)
            trainer = self.trainer(model, options, **arguments)
            where = Path(trainer.args.output_dir) / f"checkpoint-{STOP}"
            trainer.train(resume_from_checkpoint=str(where) if start else None)
            weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]).double())
        return relative_difference(weights[1], weights[0])


@dataclass
class WithLoop(WithTrainer):
    """A Heed model with Heed's own loop."""

    def recipe(self, name: str, **optimization):
        """Make a recipe of few updates."""
        settings = {"learning_rate": 0.001, "warmup_updates": 0, "max_updates": END, "tokens_per_update": HUGE}
        changes = {f"optimization.{key}": value for key, value in {**settings, **optimization}.items()}
        changes["model"] = {"start_from": str(self.folder / self.model)}
        recipe = tiny_recipe(self.folder / f"{name}-{self.world}", changes)
        recipe.folder.mkdir(exist_ok=True)
        return recipe

    def loop(self, recipe) -> TrainingLoop:
        """Make the loop of a recipe."""
        accelerator = make_accelerator(recipe.optimization)
        corpus = prepare_corpus(recipe, self.folder / "tokenizer", accelerator)
        return TrainingLoop(recipe, corpus, accelerator)

    def update(self, micro: int, accumulation: int, smoothing: float, by_tokens: bool):
        """Return loss and gradient of one update on all training rows."""
        rows, found = self.rows["training"], []
        loop = self.loop(self.recipe("update", token_budget=1 if micro == 1 else HUGE))
        model = loop.engine.network
        model.config.label_smoothing = smoothing
        size = micro * self.world if accumulation == 1 else micro
        update = [rows[start : start + size] for start in range(0, len(rows), size)]
        if by_tokens:
            lengths = [[len(row[name]) for row in rows] for name in ("input_ids", "labels")]
            batches = UpdateBatches(*lengths, BatchingSettings(tokens_per_update(rows), buckets_per_update=6))
            update = [[rows[number] for number in bucket] for bucket in batches.epoch(0)[0]]
        loop.engine.optimizer.step = lambda *_: found.append(gradient_of(model))
        loop.engine.model.train()
        loop._train_on(loop._made(0, 1, update))
        window = loop.progress.window
        return window["loss"] / window["target_tokens"], found[0]

    def evaluate(self, size: int) -> dict[str, Any]:
        """Evaluate in batches of about `size`."""
        rows, accelerator = self.rows[self.model], Accelerator(cpu=True)
        translator = Translator.from_pretrained(self.folder / self.model, "cpu")
        budget = 1 if size == 1 else 30 * size
        sources, references = ([row[side] for row in rows] for side in ("ko", "en"))
        found = translate_on_ranks(translator, sources, accelerator, num_beams=1, token_budget=budget)
        texts = [best.text for best in found]
        scores = score_translations(texts, references)
        return {
            "loss": validation_loss(translator.model, EncodedPairs(rows), budget, accelerator),
            "scores": [scores["bleu"], scores["chrf"]],
            "predictions": texts,
            "in_order": True,
        }

    def resume(self, by_length: bool) -> float:
        """Return how far weights are off after training with a stop in the second epoch."""
        weights = []
        for name, end, resume in (("straight", END, False), ("stopped", STOP, False), ("stopped", END, True)):
            recipe = self.recipe(f"{name}-{by_length}", tokens_per_update=2000, max_updates=end)
            recipe.resume = resume
            loop = self.loop(recipe)
            loop.engine.network.config.dropout = 0.1
            loop.run()
            model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint_path(recipe.folder / "checkpoints", end))
            weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]).double())
        return relative_difference(weights[2], weights[0])


def column(name: str, folder: Path) -> WithTrainer:
    """Return a column that measures."""
    if name == "loop":
        return WithLoop(folder, HeedSeq2SeqTrainer, "heed")
    ours = name == "trainer"
    return WithTrainer(folder, HeedSeq2SeqTrainer if ours else Seq2SeqTrainer, "heed" if ours else "marian")


# Measuring


def relative_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the length of a difference, relative to what is compared to."""
    return ((ours - theirs).norm() / theirs.norm()).item()
