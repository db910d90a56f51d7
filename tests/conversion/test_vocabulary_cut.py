"""In a smaller vocabulary texts keep their tokens, and the tokens their weights and logits."""

import re
from collections import Counter
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from guides import commands_of, run_commands, text_of
from heedful import TokenizerPair, Translator
from heedful.cards.hub import check_folder
from heedful.checksums_heed import changed_files, write_checksums
from heedful.conversion import vocabulary_cut
from heedful.conversion.model_conversion import convert
from heedful.data.tokenizer_training import train_tokenizers
from heedful.decoding.loading import load_model
from heedful.files import read_object
from helpers import assert_error, change_json, tiny_model
from memorised import saved_in
from pretrained_checkpoints import BUILDERS, ENGLISH, KOREAN, nllb
from tiny_runs import table_file

TEXTS = KOREAN[14:26] + ENGLISH[:12]


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    return tmp_path


def cut(source, target, keep=None):
    return vocabulary_cut.cut_vocabulary(source, Path(target), ["texts.txt"], keep, (None, None))


def tokens_of(pair, texts=TEXTS):
    sides = (pair.source, pair.encode_source(texts, *pair.languages[:1])), (pair.target, pair.encode_target(texts))
    return [[side.convert_ids_to_tokens(row) for row in ids] for side, ids in sides]


def named_tokens(pair, model):
    settings = model.generation_config.to_dict()
    named = {
        name: value for name, value in settings.items() if re.fullmatch(r"\w+_token_id|\w+_(ids|tokens|bias)", name)
    }
    return re.sub(r"(?<![\d.-])\d+(?!\.)", lambda id_: pair.target.convert_ids_to_tokens(int(id_[0])), str(named))


@torch.no_grad()
@pytest.mark.parametrize("family", ["marian", "marian_separate", "bart", "mbart", "nllb", "m2m100", "umt5", "madlad"])
def test_texts_keep_their_tokens_and_kept_tokens_their_weights_and_logits(place, family):
    convert(BUILDERS[family](place / family), "whole")
    change_json(Path("whole/generation_config.json"), suppress_tokens=[150], bad_words_ids=[[160, 161], [7]])
    change_json(Path("whole/generation_config.json"), sequence_bias=[[[162, 8], -12.5], [[9], 7.0]])
    result = cut("whole", "small")
    pairs = [TokenizerPair.from_pretrained(folder) for folder in ("whole", "small")]
    models = [load_model(folder) for folder in ("whole", "small")]
    assert tokens_of(pairs[0]) == tokens_of(pairs[1])
    assert named_tokens(pairs[0], models[0]) == named_tokens(pairs[1], models[1])
    old, new = ([one.get_vocab() | one.added_tokens_encoder for one in (pair.source, pair.target)] for pair in pairs)
    rows = [[old[side][token] for token in sorted(new[side], key=new[side].get)] for side in (0, 1)]
    assert len(rows[1]) == result.tokens < len(old[1])
    for side, tokenizer in enumerate((pairs[0].source, pairs[0].target)):
        special = {*tokenizer.added_tokens_encoder}
        letters = {*"".join(TEXTS)} & old[side].keys()
        assert special | letters <= new[side].keys()
        # Other texts have more tokens, and their known characters stay known.
        texts = [text for text in KOREAN + ENGLISH if {*text} <= letters | {" "}]
        before, after = ([*chain(*tokens_of(pair, texts)[side])] for pair in pairs)
        assert 0 < len(before) <= len(after)
        assert before.count("<unk>") == after.count("<unk>")
    logits, smaller = [], models[1].state_dict()
    for pair, model in zip(pairs, models, strict=True):
        source, target = pair.encode_source(TEXTS[:1], *pair.languages[:1]), pair.encode_target(TEXTS[:1])
        logits.append(model(torch.tensor(source), decoder_input_ids=torch.tensor(target)).logits)
    assert (logits[0][..., rows[1]] - logits[1]).abs().max() < 1e-5
    for name, weight in models[0].state_dict().items():
        has_rows = "embed_tokens" in name or "lm_head" in name
        assert torch.equal(weight[rows["encoder" not in name]] if has_rows else weight, smaller[name]), name
    assert changed_files(place / "small", "tokenizer") == []
    check_folder(place / "small")
    assert f"with a vocabulary of {result.tokens} tokens" in Path("small/README.md").read_text(encoding="utf-8")


def test_a_number_of_tokens_keeps_the_most_frequent_ones_or_adds_others(place):
    convert(nllb(place / "nllb"), "whole")
    whole = TokenizerPair.from_pretrained("whole")
    needed = cut("whole", "needed").tokens
    for keep, size in ((needed + 30, needed + 30), (10_000, len(whole.source))):
        result = cut("whole", f"keep{keep}", keep)
        assert (result.tokens, result.notes[-1]) == (size, "24 of 24 texts keep all their tokens.")
    result = cut("whole", "fewer", needed - 30)
    fewer = TokenizerPair.from_pretrained("fewer")
    assert needed - 33 <= result.tokens <= needed - 30
    frequent = Counter(chain(*chain(*tokens_of(whole)))).most_common(40)
    assert {token for token, _ in frequent} <= fewer.source.get_vocab().keys()
    same = [old == new for old, new in zip(tokens_of(whole)[0], tokens_of(fewer)[0], strict=True)]
    assert 0 < sum(same) == int(result.notes[-1].split()[0]) < 24


def test_a_tokenizer_without_an_unknown_token_is_cut(place):
    convert(BUILDERS["mt5"](place / "mt5"), "whole")
    state = read_object(Path("whole/tokenizer.json"))
    change_json(Path("whole/tokenizer.json"), model=state["model"] | {"unk_id": None})
    write_checksums("whole", "tokenizer")
    assert cut("whole", "small").notes[-1] == "24 of 24 texts keep all their tokens."


def test_half_precision_stays(place):
    convert(nllb(place / "nllb"), "whole")
    load_model("whole").to(torch.bfloat16).save_pretrained("half")
    TokenizerPair.from_pretrained("whole").save_pretrained("half")
    assert cut("half", "small").difference < 1e-5
    assert load_model("small").dtype == torch.bfloat16


def test_a_changed_token_or_logit_is_an_error_and_no_folder_is_left(place):
    convert(nllb(place / "nllb"), "whole")
    smaller_model = vocabulary_cut._smaller_model

    def shaken(*arguments):
        model = smaller_model(*arguments)
        model.lm_head.weight.data[20] += 0.01
        return model

    for name, defect in {"_smaller_model": shaken, "KINDS": {"BPE": False}}.items():
        with patch.object(vocabulary_cut, name, defect):
            assert_error("tokens or logits of '.*' would differ", cut, "whole", "small")
    assert not Path("small").exists()


def test_wrong_use_is_refused_by_name_and_nothing_is_left(place, refused):
    Path("empty.txt").write_text(" \n\n", encoding="utf-8")
    convert(nllb(place / "nllb"), "whole")
    convert(BUILDERS["byt5"](place / "byt5"), "bytes")
    pair = train_tokenizers(TEXTS, TEXTS, vocab_size=None, algorithm="word")
    saved_in(place / "words", tiny_model(vocab_size=len(pair.source), **pair.special_ids()), pair)
    given = ("--keep-tokens-of", "texts.txt")
    cases = [
        (("whole", "--keep-tokens-of", "empty.txt"), "`--keep-tokens-of` must hold texts, but empty.txt has none"),
        (("whole", "--keep-tokens-of", "none.txt"), "`--keep-tokens-of` must be a file that exists, but none.txt"),
        (("whole", *given, "--keep", 9), r"`--keep` must be at least \d+ for special tokens and letters, but is 9"),
        (("whole", *given, "--source-language", "ko"), "`--source-language` and .* must be left out for a Heed model"),
        (("whole", *given, "--add-language", "cs"), "`--add-language` must not come with --keep-tokens-of"),
        (("whole", "--keep", 900), "`--keep` must be left out without `--keep-tokens-of`"),
        (("bytes", *given), "tokenizer must be one of BPE, M2M100Tokenizer, .*, but is ByT5Tokenizer"),
        (("words", *given), "tokenizer must be one of BPE, M2M100Tokenizer, .*, but is WordLevel"),
    ]
    for (source, *options), message in cases:
        assert re.search(message, refused("convert", source, "small", *options)), message
    assert not Path("small").exists()


def test_the_guides_commands_cut_a_checkpoint_and_a_heed_model(place, printed):
    convert(nllb(place / "nllb"), "runs/nllb-ko-en")
    table_file(place / "pairs.tsv", zip(TEXTS[:12], TEXTS[12:], strict=True))
    section = text_of("terms_tags_documents").split("## A smaller vocabulary")[1].split("\n## ")[0]
    commands = [command.replace("facebook/nllb-200-distilled-600M", "nllb") for command in commands_of(section)]
    outputs = [*run_commands(printed, commands).values()]
    assert re.search(r"Target tokens: 705 before, \d+ after\.\nMB on disk: (.*\n){2}Milliseconds", outputs[0])
    assert "Target tokens: 705 before, 705 after." in outputs[1]
    for folder in ("runs/small", "runs/smaller"):
        assert Translator.from_pretrained(folder).translate(KOREAN[:1])[0][0].text
