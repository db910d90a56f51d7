"""Tiny models that have learned a few pairs by heart, so that a test's translations make sense."""

import copy
from pathlib import Path

import torch

from heedful import HeedConfig, HeedForConditionalGeneration
from heedful.data.epochs.micro_batches import collate
from heedful.data.tokenization import TokenizerPair
from heedful.data.tokenizer_training import train_tokenizers

PAIRS = {
    "고양이가 잔다.": "The cat sleeps.",
    "개가 공원에서 달린다.": "The dog runs in the park.",
    "나는 사과를 먹는다.": "I eat an apple.",
    "네.": "Yes.",
    "그녀는 책을 읽는다.": "She reads a book.",
    "비가 온다.": "It rains.",
}
# What the documents let the quickstart's model translate, and what it says, whatever its seed.
SHOWN = {
    "제 이모는 변호사예요.": "My aunt is a lawyer.",
    "여자는 친절했어요.": "The woman was kind.",
    "버섯은 뜨겁지 않았다.": "The mushroom was not hot.",
    "누가 사탕을 맛보고 있었어요?": "Who was tasting the candy?",
    "용감한 화가는 아픈 호랑이를 천천히 그릴 수 있다.": "The brave painter can draw the sick tiger slowly.",
}
MARGIN, MOST_STEPS = 4.0, 300  # nats; after 60 steps there may be none, and processors disagree
# The weights of the models that this process has trained: several test files want the same.
KNOWN: dict[str, dict[str, torch.Tensor]] = {}


def memorised_model(tokenizers: TokenizerPair, pairs: dict[str, str], language: str | None = None, **options):
    """Return a Heed model of two layers that translates the pairs, in evaluation mode."""
    torch.manual_seed(0)
    sizes = {
        **{"vocab_size": len(tokenizers.source), "decoder_vocab_size": len(tokenizers.target), "d_model": 48},
        **{"encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "dropout": 0.0, "encoder_layers": 2, "decoder_layers": 2},
        **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "norm_placement": "pre"},
    }
    sharing = {"share_encoder_decoder_embeddings": tokenizers.is_joint}
    config = HeedConfig(**{**sizes, **sharing, **tokenizers.special_ids(), **options})
    model = HeedForConditionalGeneration(config)
    weights = KNOWN.get(key := repr([config, pairs, language, sorted(tokenizers.source.get_vocab().items())]))
    if weights is not None:
        model.load_state_dict(weights)
        return model.eval()
    learn_by_heart(model, tokenizers, pairs, language)
    KNOWN[key] = copy.deepcopy(model.state_dict())
    return model.eval()


def encoded(tokenizers: TokenizerPair, sources, targets, language: str | None = None) -> list[dict[str, list[int]]]:
    """Return texts as rows of `input_ids` and `labels`."""
    columns = tokenizers.encode_source(list(sources), language), tokenizers.encode_target(list(targets))
    return [{"input_ids": source, "labels": target} for source, target in zip(*columns, strict=True)]


def learn_by_heart(model, tokenizers: TokenizerPair, pairs: dict[str, str], language=None, learning_rate=5e-3):
    """Train a model until it translates the pairs with a margin, so that no rounding changes a translation."""
    batch = collate(encoded(tokenizers, pairs, pairs.values(), language), model.config.pad_token_id)
    optimizer = torch.optim.Adam(model.parameters(), learning_rate)
    for step in range(1, MOST_STEPS + 1):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 and margin_of(model, batch) >= MARGIN:
            return
    raise AssertionError(f"After {MOST_STEPS} steps the margin is {margin_of(model, batch)}, and not {MARGIN}.")


@torch.no_grad()
def margin_of(model, batch: dict[str, torch.Tensor]) -> float:
    """Return how far the logit of a right token is above the next one, at least."""
    was_training, labels = model.training, batch["labels"]
    logits = model.eval()(**batch).logits
    model.train(was_training)
    places = labels.clamp(min=0)[..., None]
    others = logits.scatter(-1, places, -torch.inf).amax(-1)
    return float((logits.gather(-1, places)[..., 0] - others)[labels >= 0].min())


def saved_model(folder: Path, pairs: dict[str, str] = PAIRS, language: str | None = None, **options) -> Path:
    """Save a model that translates the pairs, with its tokenizers, and return the folder; options are of both."""
    known = {name: options.pop(name) for name in ("joint", "languages", "target_vocab_size") if name in options}
    size = options.pop("vocab_size", 270)
    tokenizers = train_tokenizers(list(pairs), list(pairs.values()), vocab_size=size, **known)
    return saved_in(folder, memorised_model(tokenizers, pairs, language, **options), tokenizers)


def saved_in(folder: Path | str, *parts) -> Path:
    """Save a model and its tokenizers in a folder, and return it."""
    for part in parts:
        part.save_pretrained(folder)
    return Path(folder)
