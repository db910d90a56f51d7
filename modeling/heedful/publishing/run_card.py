"""The facts of a finished run, for the card of the model it made."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from heedful.inference.translation import Translator
from heedful.publishing.learning_curve import CURVE_FILE, leave_learning_curve
from heedful.publishing.model_card import BUILTIN, REQUIRED_VERSIONS, RunFacts, code, write_model_card
from heedful.training.publication import language_codes
from heedful.training.recipe import Recipe
from heedful.training.run import RunResult

BUILTIN_LICENSE = "apache-2.0"


def publish_run(result: RunResult) -> Iterator[str]:
    """Write a run's card and what `publish.also` asks for, and yield what to tell: scores, cost, places."""
    card = write_run_card(result)
    for name, values in result.metrics.items():
        scores = ", ".join(f"{key} {value:.2f}" for key, value in values.items() if isinstance(value, float))
        yield f"{name}: {scores}"
    done = result.progress
    yield f"{done.update:,} updates, {done.target_tokens:,} target tokens, {done.seconds / 60:.1f} min"
    yield f"model: {result.folder}\ncard: {card}"
    if (curve := card.with_name(CURVE_FILE)).is_file():
        yield f"learning curve: {curve}"
    if result.recipe.publish.also:
        from heedful.publishing.exports.transformers_export import export_run

        yield f"as a class of transformers' own: {export_run(result)}"


def write_run_card(result: RunResult) -> Path:
    """Write the card of a run's published model into its folder, and beside it the run's learning curve, if it can.

    Args:
        result: What `train` returned.

    Returns:
        The path of the card, README.md beside the weights.

    Raises:
        ValueError: If a fact that the card tells is empty or impossible, such as a language's code.
    """
    facts = facts_of(result)
    curve = leave_learning_curve(result.recipe.folder, result.folder)
    return write_model_card(result.folder, replace(facts, learning_curve=curve))


def facts_of(result: RunResult) -> RunFacts:
    """Collect what the card tells from the run itself and from what its recipe says for the card."""
    recipe, corpus = result.recipe, result.corpus
    source_language, target_language = language_codes(recipe)
    scores = {
        name: {key: value for key, value in values.items() if key not in ("loss", "perplexity")}
        for name, values in result.metrics.items()
        if "count" in values
    }
    trained = [recipe.data.train, *(part.train for part in recipe.data.mixture.values())]
    example = corpus.validation_pairs[0]["source"]
    translator = Translator.from_pretrained(result.folder)
    language = corpus.target_language
    translation = translator.translate([example], target_language=language)[0][0].text
    return RunFacts(
        name=recipe.name,
        source_language=source_language,
        target_language=target_language,
        license=recipe.card.license or (BUILTIN_LICENSE if all(BUILTIN in each for each in trained) else "unknown"),
        datasets=[recipe.card.dataset] if recipe.card.dataset else list(dict.fromkeys(map(str, trained))),
        pairs={
            "train": corpus.pairs if corpus.pairs is not None else corpus.report.kept,
            **{f"of these {key}": count for key, count in corpus.parts.items()},
            "validation": len(corpus.validation_pairs),
            **{name: values["count"] for name, values in scores.items() if name != "validation"},
        },
        cleaning=corpus.report.to_dict(),
        parameters=result.parameters,
        architecture=architecture_of(translator.model.config),
        vocabulary=_vocabulary(recipe, translator),
        joint_vocabulary=corpus.tokenizers.is_joint,
        recipe=_without_empty(asdict(recipe)),
        updates=result.progress.update,
        target_tokens=result.progress.target_tokens,
        seconds=result.progress.seconds,
        hardware=result.hardware,
        scores=scores,
        validation_loss=result.metrics["validation"]["loss"],
        versions={name: version(name) for name in REQUIRED_VERSIONS},
        example_source=example,
        example_translation=translation,
        sides=(_named("source", recipe.data.source), _named("target", recipe.data.target)),
        example_language=language,
        intended_use=recipe.card.intended_use or "",
        limits=[recipe.card.limits] if recipe.card.limits else [],
    )


def _named(side: str, column: str) -> str:
    """Return what a side is called in a sentence: the number of a column says nothing."""
    return side if column.isdigit() else code(column)


def architecture_of(config) -> str:
    """Describe a Heed model in one line."""
    if config.model_type == "heed_rnn":
        return _recurrent_architecture(config)
    return (
        f"Transformer encoder-decoder ({config.encoder_layers} + {config.decoder_layers} layers"
        f"{' that share their weights' if config.share_layers else ''}, "
        f"d_model {config.d_model}, {config.encoder_attention_heads} + {config.decoder_attention_heads} heads, "
        f"d_ff {config.encoder_ffn_dim} + {config.decoder_ffn_dim}, {config.norm_placement}-norm, "
        f"{config.position_encoding} positions)"
    )


def _recurrent_architecture(config) -> str:
    extras = {
        f"{config.activation_function} in place of tanh": config.activation_function != "tanh",
        "bidirectional encoder": config.bidirectional,
        "source read from its end": config.reverse_source,
        "input feeding": config.input_feeding,
    }
    attention = "no attention" if config.attention == "none" else f"{config.attention} attention"
    return (
        f"Recurrent encoder-decoder ({config.encoder_layers} + {config.decoder_layers} {config.cell} layers, "
        f"hidden size {config.hidden_size}, embeddings of {config.embedding_size}, {attention}"
        + "".join(f", {name}" for name, is_on in extras.items() if is_on)
        + f", {config.bridge} bridge)"
    )


def _vocabulary(recipe: Recipe, translator: Translator) -> str:
    kinds = {"bpe": "byte-level BPE pieces", "unigram": "byte-level Unigram pieces", "word": "words"}
    kinds |= {"character": "characters and bytes", "jamo": "jamo, characters and bytes"}
    tokenizers = translator.tokenizers
    source, target = (kinds[algorithm] for algorithm, _ in recipe.tokenizer.sides)
    if recipe.tokenizer.path is not None:
        source = target = "pieces of a given tokenizer"
    if tokenizers.is_joint:
        return f"{len(tokenizers.source):,} {source} for both sides"
    target = "" if target == source else f" {target}"
    return f"{len(tokenizers.source):,} {source} for the source, {len(tokenizers.target):,}{target} for the target"


def _without_empty(tree: dict[str, Any]) -> dict[str, Any]:
    """Leave out what says nothing: empty keys, and where the run's files lay."""
    kept = {}
    for name, value in tree.items():
        value = _without_empty(value) if isinstance(value, dict) else value
        if value not in (None, {}, [], "") and name not in ("card", "output", "folder", "resume", "overwrite"):
            kept[name] = value
    return kept
