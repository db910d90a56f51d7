"""`heedful verify`: a sound model passes every check, and each planted defect fails the check that is meant for it."""

import json
import re
import shutil
from operator import attrgetter
from pathlib import Path
from types import MethodType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from heedful import HeedForConditionalGeneration, attending_heed
from heedful.checking.findings import ModelFinding
from heedful.data.tokenization import TokenizerPair
from heedful.data.tokenizer_training import train_tokenizers
from heedful.verification import verification as checks
from heedful.verification.samples import INPUTS, make_sample
from heedful_lab.korean_english.pairs import korean_english_pairs
from helpers import SHARINGS, ending_model, tiny_model

DOCUMENT = Path(__file__).parents[2] / "docs" / "verify.md"
# The first column of the table, in which one row may name two checks.
EVERY_CHECK = {
    name
    for row in re.findall(r"^\| ([^|]+) \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    for name in row.split(", ")
} - {"check"}
SIZES = {
    **{"vocab_size": 99, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 64},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
}


def korean_and_english(count):
    pairs = list(korean_english_pairs("train", count))
    return [pair["ko"] for pair in pairs], [pair["en"] for pair in pairs]


def model_of(size=400, **options):
    return ending_model(vocab_size=size, **options)


@pytest.fixture(scope="module")
def tokenizers():
    return train_tokenizers(*korean_and_english(300), vocab_size=400)


@pytest.fixture
def folder(tmp_path, tokenizers):
    """A sound model with its tokenizer and code."""
    for each in (model_of(encoder_layers=1, decoder_layers=1), tokenizers):
        each.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def bare(folder, monkeypatch):
    """The same folder without code, whose process is spared as all checks are that generate."""
    monkeypatch.setattr(checks.samples, "INPUTS", {})
    for path in folder.glob("*.py"):
        path.unlink()
    monkeypatch.setattr(checks, "MODEL_CHECKS", ())
    return folder


def test_a_sound_model_passes_every_check(printed, folder):
    lines = printed("verify", folder).splitlines()
    table = lines[lines.index("") + 1 :]
    assert {line.split("  ")[0] for line in table[1:24]} == EVERY_CHECK
    assert "HeedForConditionalGeneration" in lines[0]
    assert "in float32 on cpu" in lines[0]
    assert lines[-1] == "23 passed, 0 failed, 0 skipped"


def test_heed_passes_every_check_and_each_leaves_the_model_as_it_was():
    model = tiny_model().train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    settings = model.generation_config.to_dict()
    for check in (*checks.MODEL_CHECKS, checks.check_saving):
        finding = check(model).assert_passed()
        assert finding.figure <= min(finding.limit, 1e-5), finding
    assert model.training
    assert model.generation_config.to_dict() == settings
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    for options in SHARINGS.values():
        checks.check_tied_weights(tiny_model(**options)).assert_passed()
    finding = checks.check_left_padding(tiny_model().to(torch.bfloat16)).assert_passed()
    assert finding.figure < finding.limit == 5e-2  # some processors round all rows alike: 0


def test_two_tokenizers_of_a_kind_each_are_both_tried():
    options = {"vocab_size": 400, "target_vocab_size": 350, "joint": False, "algorithm": "unigram"}
    two = train_tokenizers(*korean_and_english(300), **options)
    model = model_of(decoder_vocab_size=350, share_encoder_decoder_embeddings=False)
    for finding in (
        checks.check_special_ids(model, two),
        checks.check_round_trip(two),
        checks.check_special_text(two),
    ):
        finding.assert_passed()
    assert checks.check_special_ids(model, TokenizerPair(two.target, two.source)).figure == 2


def marian():
    return transformers.MarianMTModel(transformers.MarianConfig(**SIZES, pad_token_id=98, decoder_start_token_id=98))


def t5():
    sizes = {"vocab_size": 99, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


LACKING = {"attention weights", "loss of a split update"}
OTHERS = {"marian": (marian, {*LACKING, "left padding"}), "t5": (t5, LACKING)}


@pytest.mark.parametrize(("make", "faults"), OTHERS.values(), ids=OTHERS)
def test_another_model_fails_where_it_is_known_to_and_nowhere_else(tmp_path, make, faults):
    make().save_pretrained(tmp_path)
    found = checks.verify(tmp_path)
    assert {*found.failed} == faults
    only_of_heed = {"code in the folder", "files as saved", "engines"}
    assert skipped(found) == only_of_heed | {"tokenizer round trip", "special tokens in a text", *INPUTS}


def skipped(verification) -> set[str]:
    return {finding.check for finding in verification.findings if finding.level == "skipped"}


def test_a_tokenizer_that_takes_text_for_control_tokens_is_caught(tokenizers):
    special = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>"}
    plain = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.source.backend_tokenizer, **special)
    finding = checks.check_special_text(TokenizerPair(plain, plain))
    assert finding.level == "FAIL"
    assert "<s>" in finding.message


@pytest.fixture
def model():
    return tiny_model()


PADDING = [checks.check_batch, checks.check_right_padding, checks.check_left_padding]
BY_PLACE = 0.1 * torch.arange(99)[:, None, None]
DEFECTS = {  # what is replaced, by what is made of it, the checks that fail, what they say, and checks that pass
    "positions ignore the cache": (
        *("positions_of", lambda old: lambda length, past, *rest: old(length, 0, *rest)),
        *([checks.check_cache], "of 12 generated sentences differ", []),
    ),
    "positions count padding": (
        *("positions_of", lambda old: lambda length, past, *_: (torch.arange(length) + past)[None]),
        *(PADDING[2:], "", [*PADDING[:2], checks.check_cache]),
    ),
    "the padding mask is ignored": (
        *("model.model.forward", lambda old: lambda **given: old(**given | {"attention_mask": None})),
        *(PADDING, "", []),
    ),
    "a row reads its neighbour": (
        *("model.model.encoder.add_positions", lambda old: lambda states, at: old(states, at) + BY_PLACE[: len(at)]),
        *([checks.check_order, checks.check_batch], "", []),
    ),
    "attention weights are not returned": (
        *("model.model.encoder.attention_settings", lambda old: lambda _: tiny_model().config),
        *([checks.check_attentions], "^encoder_attentions: nothing is returned under sdpa", []),
    ),
    "chance in evaluation mode": (
        *("model.model.encoder.dropout.forward", lambda old: lambda states: torch.nn.functional.dropout(states, 0.1)),
        *([checks.check_determinism], "", []),
    ),
    "logits are no numbers": (
        *("model.lm_head.weight", lambda old: torch.nn.Parameter(old.detach() * float("nan"))),
        *([checks.check_right_padding], "", []),
    ),
    "an error": (
        *("model.model.forward", lambda old: Mock(side_effect=RuntimeError("no such kernel"))),
        *([checks.check_batch], "^RuntimeError: no such kernel", []),
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_fails_the_checks_that_are_meant_for_it(model, monkeypatch, defect):
    path, made, failing, told, passing = DEFECTS[defect]
    owner, _, name = path.rpartition(".")
    where = attrgetter(owner)(SimpleNamespace(model=model)) if owner else attending_heed
    monkeypatch.setattr(where, name, made(getattr(where, name)))
    for check in failing:
        finding = check(model)
        assert finding.level == "FAIL", finding
        assert re.search(told, finding.message)
    for check in passing:
        check(model).assert_passed()


def test_a_loss_that_ignores_its_count_or_counts_padding_is_caught(model):
    loss = HeedForConditionalGeneration.loss
    model.loss = MethodType(lambda self, logits, labels, *_: loss(self, logits, labels), model)
    assert checks.check_loss_split(model).figure == pytest.approx(2, abs=0.2)
    checks.check_loss_padding(model).assert_passed()
    for counted in (
        lambda self, logits, labels, count=None, _=None: loss(self, logits, labels, count or labels.numel()),
        lambda self, logits, labels, count=None, _=None: loss(self, logits, labels.clamp(min=0), count),
    ):
        model.loss = MethodType(counted, model)
        assert checks.check_loss_padding(model).figure > 0.01


def test_embeddings_that_are_shared_or_not_against_the_config_are_caught(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    finding = checks.check_tied_weights(model)
    assert (finding.level, finding.figure) == ("FAIL", 1)
    assert "target and output embeddings separate (wrong)" in finding.message
    model = tiny_model(tie_word_embeddings=False)
    model.model.decoder.embed_tokens.weight = model.model.encoder.embed_tokens.weight
    assert "source and target embeddings shared (wrong)" in checks.check_tied_weights(model).message


def test_a_weight_that_is_not_saved_is_caught(model):
    name = "model.encoder.layers.0.feed_forward.fc1.bias"
    model._keys_to_ignore_on_save, model._keys_to_ignore_on_load_missing = [name], None
    save_pretrained = model.save_pretrained

    def save(folder, **settings):
        save_pretrained(folder, **settings)
        (path,) = Path(folder).glob("*.safetensors")
        save_file({key: weight for key, weight in load_file(path).items() if key != name}, path, {"format": "pt"})

    model.save_pretrained = save
    finding = checks.check_saving(model)
    assert (finding.level, finding.figure) == ("FAIL", 1)
    assert f"missing: {name}" in finding.message


def test_a_tensor_missing_from_the_file_one_too_many_and_one_of_another_shape_are_named(heedful_command, bare):
    tensors = load_file(bare / "model.safetensors")
    lost, short = (f"model.decoder.layers.0.cross_attn.{name}_proj.weight" for name in "qk")
    del tensors[lost]
    tensors |= {"extra": torch.zeros(2), short: torch.zeros(8, 32)}
    save_file(tensors, bare / "model.safetensors", {"format": "pt"})
    code, output, errors = heedful_command("verify", bare, "--json")
    assert (code, "Traceback" in errors) == (1, False)
    finding = next(each for each in json.loads(output)["verdicts"] if each["check"] == "weights complete")
    assert finding["figure"] == 3
    assert finding["message"].startswith(f"missing: {lost}; unknown: extra; misshapen: ('{short}'")


def test_special_ids_and_vocabularies_that_differ_are_named(tokenizers):
    for name, others in {
        "pad_token_id": "0 in the generation config, 0 in the tokenizer",
        "eos_token_id": "2 in the generation config, 2 in the tokenizer",
        "decoder_start_token_id": "1 in the generation config",
    }.items():
        model = model_of()
        checks.check_special_ids(model, tokenizers).assert_passed()
        setattr(model.config, name, 7)
        assert f"{name}: 7 in the config, {others}" in checks.check_special_ids(model, tokenizers).message
    finding = checks.check_special_ids(model_of(size=410), tokenizers)
    assert "source vocabulary: 400 tokens in the tokenizer, 410 rows in the model" in finding.message


def test_a_tokenizer_with_another_padding_id_or_a_broken_one_is_a_failed_check(heedful_command, bare):
    path = bare / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "pad_token": "<unk>"}))
    code, output, _ = heedful_command("verify", bare)
    assert code == 1
    assert "pad_token_id: 0 in the config, 0 in the generation config, 3 in the tokenizer" in output
    (bare / "tokenizer.json").write_text("{}")
    found = checks.verify(bare)
    assert {*found.failed} == {"special ids", "files as saved"}
    assert skipped(found) == {"tokenizer round trip", "special tokens in a text", "code in the folder"}


def test_the_first_text_that_comes_back_changed_is_shown():
    words = train_tokenizers(["a b c"], ["d e"], vocab_size=100, algorithm="word")
    checks.check_round_trip(words, ["a b", "e d c"]).assert_passed()
    finding = checks.check_round_trip(words, ["a b", "a x", "a y"])
    assert finding.figure == 2
    assert finding.message == "2 of 3 texts come back changed: 'a x' as 'a'"
    checks.check_special_text(words).assert_passed()


def test_code_that_is_not_the_installed_package_runs_only_when_trusted_and_is_compared(folder, tmp_path):
    marker, model = tmp_path / "ran", HeedForConditionalGeneration.from_pretrained(folder).eval()
    path = folder / "positions_heed.py"
    code = path.read_text()
    assert code.count("math.log(10000.0)") == 1
    code = code.replace("math.log(10000.0)", "math.log(1000.0)")
    path.write_text(f"{code}\nimport pathlib\npathlib.Path({str(marker)!r}).touch()\n")
    finding = checks.check_remote_code(folder, model)
    assert (finding.level, marker.exists()) == ("skipped", False)
    assert "--trust-remote-code" in finding.message
    finding = checks.check_remote_code(folder, model, trust_remote_code=True)
    assert (finding.level, marker.exists()) == ("FAIL", True)
    assert finding.figure > 1e-3


def test_texts_of_the_user_are_tried(printed, bare, tmp_path):
    (tmp_path / "texts.txt").write_text("one\n\ntwo  three\n", encoding="utf-8")
    output = printed("verify", bare, "--text", "zero", "--data", tmp_path / "texts.txt")
    assert "3 texts encoded and decoded" in output


def test_a_mistake_of_the_user_is_named_in_one_line(refused, bare, tmp_path):
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1))
    gpt.save_pretrained(tmp_path / "gpt2")
    marian().save_pretrained(tmp_path / "marian")
    (tmp_path / "empty.txt").write_text("\n")
    broken = shutil.copytree(bare, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"123")
    for arguments, expected in (
        ([tmp_path / "nothing"], "must be a folder with a model, but does not exist"),
        ([tmp_path / "gpt2"], "an encoder-decoder is needed, but 'gpt2' is none"),
        ([bare, "--data", tmp_path / "empty.txt"], "has none"),
        ([bare, "--device", "cuda:99"], "`--device`"),
        ([broken], "cannot be loaded"),
        ([tmp_path / "marian", "--text", "x"], "without a tokenizer to encode them"),
    ):
        assert expected in refused("verify", *arguments).splitlines()[0]


def test_a_model_with_few_positions_gets_short_sentences():
    model = tiny_model(position_encoding="learned", max_position_embeddings=12)
    sample = make_sample(model)
    assert max(map(len, sample.sources)) == 6
    checks.check_batch(model, sample).assert_passed()
    checks.check_left_padding(model, sample).assert_passed()
    with pytest.raises(ValueError, match="at least 10 positions"):
        make_sample(tiny_model(position_encoding="learned", max_position_embeddings=8))
    with pytest.raises(AssertionError, match=r"batch: .*the reason"):  # only a passed finding can be asserted
        ModelFinding("batch", "skipped", "the reason").assert_passed()
