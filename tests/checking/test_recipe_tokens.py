"""Checks on tokenizers, what they make of pairs, and run lengths: each is given its defect, and something sound."""

import json

import pytest
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast

from heedful import HeedConfig, HeedForConditionalGeneration
from heedful.checking import tokens as checks
from heedful.checking.pairs import Pairs
from heedful.checking.run_length import check_run_length
from heedful.data.epochs.encoding import EncodedPairs, PairEncoder
from heedful.data.tokenization import TokenizerPair
from heedful.data.tokenizer_training import train_tokenizers
from heedful.training.start_checks import faults_of_targets
from heedful_lab.korean_english.pairs import korean_english_pairs
from helpers import tiny_config
from tiny_runs import tiny_recipe

PAIRS = [{"source": pair["ko"], "target": pair["en"]} for pair in korean_english_pairs("train", 300)]
SOURCES, TARGETS = ([pair[side] for pair in PAIRS] for side in ("source", "target"))


def split(pairs=PAIRS, name="train") -> Pairs:
    return Pairs.of(name, f"data.{name}", Dataset.from_list(pairs))


def rows_of(tokenizers, pairs=PAIRS) -> EncodedPairs:
    return EncodedPairs(PairEncoder(tokenizers).rows(pairs))


@pytest.fixture(scope="module")
def joint():
    return train_tokenizers(SOURCES, TARGETS, vocab_size=400)


@pytest.fixture(scope="module")
def words():
    return train_tokenizers(SOURCES, TARGETS, vocab_size=5000, algorithm="word", joint=False)


def given(**tokens) -> TokenizerPair:
    """Return a tokenizer of single words that somebody else made."""
    names = ["<pad>", "<s>", "</s>", "<unk>", "jump", "walk"]
    tokenizer = Tokenizer(models.WordLevel({name: id_ for id_, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **tokens}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    return TokenizerPair(fast, fast)


def with_a_word(folder, id_) -> TokenizerPair:
    """Return the tokenizer with "run" at an id, as it is loaded."""
    given().save_pretrained(folder)
    state = json.loads((folder / "tokenizer.json").read_text())
    state["model"]["vocab"]["run"] = id_
    (folder / "tokenizer.json").write_text(json.dumps(state))
    return TokenizerPair.from_pretrained(folder)


def test_a_trained_tokenizer_and_its_model_give_no_finding(joint, words):
    for tokenizers in (joint, words):
        sizes = {"vocab_size": len(tokenizers.source), "decoder_vocab_size": len(tokenizers.target)}
        config = tiny_config(**sizes, share_encoder_decoder_embeddings=False)
        model = HeedForConditionalGeneration(config)
        assert list(checks.check_special_ids(config, model.generation_config, "model")) == []
        assert list(checks.check_tokenizer_ids(tokenizers, "key")) == []
        assert list(checks.check_unknown_tokens(split(), tokenizers, "key")) == []
        assert list(faults_of_targets("key", tokenizers, TARGETS)) == []
        assert list(checks.check_normalization(split(), tokenizers, "key")) == []


def test_special_ids_that_contradict_each_other_are_told_but_several_end_tokens_may_contain_the_configs():
    config = HeedConfig(vocab_size=6, d_model=8, encoder_attention_heads=1, decoder_attention_heads=1)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    for generation, level, named in (
        ({"eos_token_id": 5}, "error", "never end"),
        ({"eos_token_id": None}, "error", "never end"),
        ({"decoder_start_token_id": 4}, "error", "1 in the config and 4 in the generation config"),
        ({"pad_token_id": 4}, "warning", "0 in the config and 4 in the generation config"),
        ({"decoder_start_token_id": None, "bos_token_id": None}, "error", "cannot start"),
    ):
        (finding,) = checks.check_special_ids(config, GenerationConfig(**ids | generation), "model")
        assert (finding.level, finding.where) == (level, "model")
        assert named in finding.message
    assert list(checks.check_special_ids(config, GenerationConfig(**ids | {"eos_token_id": [2, 4]}), "model")) == []


def test_special_tokens_with_one_id_tokens_with_one_id_and_holes_are_told(tmp_path):
    same = given(unk_token="</s>")
    assert any("`unk_token_id` and `eos_token_id`" in f.message for f in checks.check_tokenizer_ids(same, "key"))
    (finding,) = checks.check_tokenizer_ids(with_a_word(tmp_path, 40), "key")
    assert finding.level == "error"
    assert "ids up to 40" in finding.message
    if transformers.__version__.startswith("5.17."):
        pytest.skip("transformers 5.17 itself drops all but one token of an id when it loads a tokenizer")
    (finding,) = checks.check_tokenizer_ids(with_a_word(tmp_path, 5), "key")
    assert "'walk'" in finding.message
    assert "'run'" in finding.message


def test_unknown_words_are_named_for_each_side_and_an_error_where_they_are_most(words):
    pairs = [*PAIRS, {"source": "키보드", "target": PAIRS[0]["target"]}]
    (finding,) = checks.check_unknown_tokens(split(pairs), words, "tokenizer.vocab_size")
    assert finding.level == "note"
    assert "source tokens" in finding.message
    assert "'키보드'" in finding.message
    assert finding.examples[0].startswith("train row 301")
    findings = list(checks.check_unknown_tokens(split(), given(), "tokenizer.path"))
    assert [finding.level for finding in findings] == ["error", "error"]
    assert "target tokens" in findings[1].message


def test_a_vocabulary_too_large_for_the_data_is_a_warning_with_its_rare_types(joint, words):
    (finding,) = checks.check_vocabulary_use(rows_of(joint, PAIRS[:20]), joint, "tokenizer.vocab_size")
    assert finding.level == "warning"
    assert "would be enough" in finding.advice
    findings = list(checks.check_vocabulary_use(rows_of(words), words, "tokenizer.vocab_size"))
    assert [finding.message.split(" vocabulary")[0].split()[-1] for finding in findings] == ["source", "target"]
    tokenizers = given()
    frequent = rows_of(tokenizers, [{"source": "jump walk", "target": "walk jump"}] * 30)
    assert list(checks.check_vocabulary_use(frequent, tokenizers, "key")) == []
    # Of a word that is one token the parts are never seen, and nothing could be made of it without them.
    words = [{"source": "abcdefghij", "target": "abcdefghij"}] * 30
    pieces = train_tokenizers(["abcdefghij"] * 30, ["abcdefghij"] * 30, vocab_size=275, joint=True)
    assert list(checks.check_vocabulary_use(rows_of(pieces, words), pieces, "key")) == []


def test_a_tokenizer_that_does_not_compose_text_is_told(joint):
    state = json.loads(joint.source.backend_tokenizer.to_str()) | {"normalizer": None}
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), **special)
    (finding,) = checks.check_normalization(split(), TokenizerPair(fast, fast), "tokenizer.path")
    assert float(finding.message.split(" costs ")[1].split()[0]) > 1.5


# The length of a run.
# 1,000 updates of which 100 make an epoch, with validations and checkpoints on the way.
SOUND = {"optimization.schedule": "linear", "optimization.warmup_updates": 100, "optimization.max_updates": 1000}
SOUND |= {"validation.every_updates": 100, "checkpoints.every_updates": 100, "validation.patience": 5}
PLAN = (100, 0.5)  # updates of an epoch, and seconds of an update
PAPER = {"optimization.schedule": "paper", "optimization.warmup_updates": 4000}
NEVER, OF_BEST = {"validation.every_updates": 1001}, {"validation.patience": None, "checkpoints.publish": "best"}
CASES = [  # the plan, changes of the recipe, the findings, and what their texts say
    (PLAN, {}, [], []),
    ((), {}, [], []),
    (PLAN, {"optimization.warmup_updates": 2000}, [("error", "optimization.warmup_updates")], ["50 % of its peak"]),
    (PLAN, {"optimization.warmup_updates": 600}, [("warning", "optimization.warmup_updates")], []),
    (PLAN, PAPER, [("error", "optimization.warmup_updates")], ["25 % of its peak"]),
    *(
        (PLAN, {limit: value}, [("warning", "optimization.max_updates")], ["after 600 updates", f"`{limit}`", "44 %"])
        for limit, value in (("optimization.max_epochs", 6), ("optimization.max_minutes", 5))
    ),
    ((4,), {}, [("warning", "optimization.max_updates")], ["250 times"]),
    (PLAN, NEVER | {"validation.patience": None}, [("warning", "validation.every_updates")], []),
    (PLAN, NEVER, [("error", "validation.every_updates")], []),
    (PLAN, NEVER | OF_BEST, [("error", "validation.every_updates")], []),
    (PLAN, {"checkpoints.every_updates": 2000}, [("warning", "checkpoints.every_updates")], ["nothing is averaged"]),
    (  # a warm-up that the data end first
        *(PLAN, {"optimization.max_epochs": 3, "optimization.warmup_updates": 400}),
        [("error", "optimization.warmup_updates"), ("warning", "validation.patience")],
        ["after 300 updates (`optimization.max_epochs`)"],
    ),
    (  # what the speed of this machine decides is no error
        *(PLAN, {"optimization.max_minutes": 0.5, "validation.patience": None}),
        [("warning", f"{key}_updates") for key in ("optimization.warmup", "validation.every", "checkpoints.every")],
        ["by the speed measured here"],
    ),
    (
        *((1,), {}),  # an update larger than the data
        [("warning", f"optimization.{key}") for key in ("tokens_per_update", "max_updates")],
        ["all updates are alike"],
    ),
    (PLAN, {"validation.patience": 9}, [], []),
    (PLAN, {"checkpoints.publish": "last"}, [("warning", "checkpoints.publish")], ["but publishes the last weights"]),
    (PLAN, {"validation.patience": 10}, [("warning", "validation.patience")], []),
]


def test_a_sound_run_gives_no_finding_and_what_is_wrong_is_named_by_its_key(tmp_path):
    for plan, changes, expected, texts in CASES:
        recipe = tiny_recipe(tmp_path / "run", {**SOUND, **changes})
        found = list(check_run_length(recipe.optimization, recipe.validation, recipe.checkpoints, 32, *plan))
        assert [(finding.level, finding.where) for finding in found] == expected, (plan, changes)
        assert all(text in " ".join(finding.message for finding in found) for text in texts), found
