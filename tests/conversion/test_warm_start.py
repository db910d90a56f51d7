"""The encoder of a BERT, RoBERTa or XLM-R becomes a Heed model's; what no HeedConfig holds is refused by name."""

import json
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

from guides import commands_of, run_commands, text_of
from heedful import HeedForConditionalGeneration, TokenizerPair
from heedful.conversion.model_conversion import convert
from heedful.conversion.warm_start import warm_start
from helpers import assert_error, assert_refused, change_json, padded, shake
from pretrained_checkpoints import ENGLISH, KOREAN, unigram_pieces
from tiny_runs import tiny_tree

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def saved(folder, kind, **options):
    """Save a checkpoint of random weights, as those are that were trained to fill gaps, with its tokenizer."""
    folder.mkdir()
    if kind == "xlm-roberta":
        pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), *unigram_pieces(folder)]
        tokenizer = transformers.XLMRobertaTokenizer(vocab=[*pieces[:3], ("<unk>", 0.0), *pieces[3:]])
    else:
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys("".join(KOREAN + ENGLISH).lower())]
        vocabulary = {word: number for number, word in enumerate([*words, *(f"##{each}" for each in words[5:])])}
        tokenizer = transformers.BertTokenizer(vocab=vocabulary)
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "max_position_embeddings": 80}
    config = transformers.AutoConfig.for_model(kind, **SIZES | sizes | options)
    torch.manual_seed(0)
    model = transformers.AutoModelForMaskedLM.from_config(config)
    with torch.no_grad():
        shake(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta"])
@torch.no_grad()
def test_the_encoder_computes_what_the_checkpoint_does_and_the_tokenizer_gives_its_ids(tmp_path, kind):
    source = saved(tmp_path / kind, kind)
    result = warm_start(str(source), tmp_path / "heed", 1)
    ours, theirs = HeedForConditionalGeneration.from_pretrained(tmp_path / "heed"), AutoModel.from_pretrained(source)
    rows = [torch.randint(5, 60, (length,)) for length in (70, 9, 3)]
    ids, mask = padded(rows)
    ids = ids.masked_fill(mask == 0, ours.config.pad_token_id)
    given = {"input_ids": ids, "attention_mask": mask}
    found, expected = ours.eval().get_encoder()(**given)[0], theirs.eval()(**given)[0]
    assert expected.std() > 0.5
    assert (found - expected)[mask.bool()].abs().max() < 1e-5
    assert result.difference < 1e-5
    pair, tokenizer = TokenizerPair.from_pretrained(tmp_path / "heed"), AutoTokenizer.from_pretrained(source)
    rows = tokenizer(KOREAN[:20])["input_ids"]
    assert pair.encode_source(KOREAN[:20]) == rows
    assert pair.encode_target(KOREAN[:20]) == [row[1:] for row in rows]  # which begin with the token for sources
    assert ours.config.decoder_start_token_id == rows[0][0]
    assert ours.config.shares_source_and_target_embeddings


def test_it_is_the_same_each_time_and_the_guides_commands_train_it_further(tmp_path, monkeypatch, printed):
    section = text_of("convert").split("## An encoder alone")[1].split("\n## ")[0]
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "xlm", "xlm-roberta")
    Path("pairs.yaml").write_text(yaml.safe_dump(tiny_tree("runs/pairs", {"optimization.max_updates": 2})))
    commands = [command.replace("FacebookAI/xlm-roberta-base", "xlm") for command in commands_of(section)]
    assert len(commands) == 2
    first, _ = run_commands(printed, commands).values()
    assert "states of the encoder differ by" in first
    assert Path("runs/from-xlm/model/README.md").is_file()
    weights = [load_file(f"{warm_start('xlm', Path(name), 1).folder}/model.safetensors") for name in ("one", "two")]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


def test_checkpoints_that_lack_weights_or_hold_others_are_refused_in_a_sentence_and_nothing_is_left(tmp_path):
    bert = saved(tmp_path / "bert", "bert")
    file, config = bert / "model.safetensors", bert / "config.json"
    weights, settings = load_file(file), json.loads(config.read_text())
    first, words = "bert.encoder.layer.0.output.dense.weight", "bert.embeddings.word_embeddings.weight"
    numbers = weights[words].clone()
    numbers[7] = float("nan")
    cases = [
        ({name: value for name, value in weights.items() if name != first}, {}, "lack .*layer.0.output.dense.weight"),
        (weights | {first: weights[first][:9]}, {}, r"must have the shapes .* \(9, 48\) instead of \(32, 48\)"),
        (
            weights | {first.replace(".0.", ".2."): weights[first].clone()},
            {},
            "unknown to the model, .*layer.2.output",
        ),
        (weights | {words: numbers}, {}, "must be finite numbers, but are not in embeddings.word_embeddings.weight"),
        (weights, {"pad_token_id": None}, "`pad_token_id` must be set, but is None"),
        (weights, {"num_hidden_layers": 10**9}, "`num_hidden_layers` of .* must be at most 10,000"),
        (weights, {"max_position_embeddings": 10**12}, "config has 32,.* parameters, but its weights only .* bytes"),
        (weights, {"num_attention_heads": 0}, "cannot be loaded: ZeroDivisionError"),
    ]

    def try_to_start(case):
        save_file(case[0], file, metadata={"format": "pt"})
        config.write_text(json.dumps(settings | case[1]))
        warm_start(str(bert), tmp_path / "heed", 1)

    assert_refused([((held, changes), message) for held, changes, message in cases], try_to_start)
    assert [path.name for path in tmp_path.iterdir()] == ["bert"]


def test_what_no_heed_config_holds_and_wrong_use_are_refused_and_nothing_is_left(tmp_path, refused):
    bert = saved(tmp_path / "bert", "bert")
    modern = transformers.ModernBertConfig(vocab_size=50, hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
    modern.save_pretrained(tmp_path / "modern")
    transformers.ElectraConfig().save_pretrained(tmp_path / "electra")
    transformers.BartConfig().save_pretrained(tmp_path / "bart")
    for name in ("modern", "electra", "bart"):
        (tmp_path / name / "model.safetensors").touch()
    cases = [
        (("modern", 2), r"must be one of bert, roberta, xlm-roberta .* is modernbert instead: .* two kinds of rotary"),
        (("electra", 2), "is electra instead: its embeddings are projected"),
        (("bart", 2), r"is bart instead\."),
        (("bert", 0), "`--decoder-layers` must be at least 1, but is 0"),
    ]
    assert_refused(cases, lambda case: warm_start(str(tmp_path / case[0]), tmp_path / "heed", case[1]))
    assert_error("but is bert instead: `--decoder-layers` gives such", convert, bert, tmp_path / "heed")
    assert "must be left out with" in refused(
        *("convert", bert, tmp_path / "heed", "--decoder-layers", 1, "--target-language", "de")
    )
    change_json(bert / "config.json", is_decoder=True)
    assert_error("`is_decoder` must be False", warm_start, str(bert), tmp_path / "heed", 1)
    assert not (tmp_path / "heed").exists()
