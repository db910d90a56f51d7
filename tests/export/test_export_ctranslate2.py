"""CTranslate2: the tokens of `generate()`, and what it cannot do is refused by name."""

import copy
import re
import shutil
import sys
from functools import partial

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from guides import printing_of, text_of
from heedful.data.tokenizer_training import train_tokenizers
from heedful.decoding.translation import Translator
from heedful.export import comparison
from heedful.export import ctranslate2_export as exporter
from heedful.export.comparison import compare, encode, refuse
from heedful.export.ctranslate2_export import check_compute_type, check_settings, export_ctranslate2
from heedful.export.ctranslate2_specification import TABLE_ROWS, positions_of_table
from heedful.files import new_folder
from helpers import assert_error, assert_refused, shake, tiny_config
from memorised import PAIRS, SHOWN, memorised_model, saved_in, saved_model

ctranslate2 = pytest.importorskip("ctranslate2")
pytestmark = pytest.mark.filterwarnings("ignore:.*cut off:UserWarning")


@pytest.fixture(scope="module")
def memorised_folder(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("memorised") / "model", encoder_layers=1, decoder_layers=1)


def test_a_setting_that_ctranslate2_cannot_express_is_refused_by_name():
    def check_both(config):
        comparison.check_settings(config, "CTranslate2")
        check_settings(config, tiny_config())

    greedily = {"do_sample": True, "penalty_alpha": 0.6, "forced_bos_token_id": 9, "forced_eos_token_id": 2}
    greedily |= {"encoder_no_repeat_ngram_size": 2, "sequence_bias": [[[5], 1.0]], "guidance_scale": 2.0}
    greedily |= {"eos_token_id": None, "decoder_start_token_id": 5, "max_time": 3.0}
    with_beams = {"eos_token_id": [2, 3], "no_repeat_ngram_size": 2}
    with_beams |= {"repetition_penalty": 1.2, "min_new_tokens": 3, "diversity_penalty": 1.0}
    for beams, cases in ((1, greedily), (3, with_beams)):
        for name, value in cases.items():
            config = GenerationConfig(num_beams=beams, early_stopping=beams > 1, eos_token_id=2)
            setattr(config, name, value)
            assert_error(f"`{name}` must ", check_both, config)


def test_longer_sequences_than_there_are_positions_are_refused_and_a_source_is_never_cut(tmp_path):
    tokenizers = train_tokenizers(list(PAIRS), list(PAIRS.values()), vocab_size=270)
    for encoding, said, limit in (("learned", 20, 20), ("sinusoidal", 20, 20), ("sinusoidal", 512, TABLE_ROWS)):
        config = tiny_config(position_encoding=encoding, max_position_embeddings=said)
        assert positions_of_table(config) == limit
        assert_error(f"Sentence 2 must have at most {limit} tokens", encode, tokenizers, ["a", "near " * limit], limit)
    model = saved_in(tmp_path / "model", memorised_model(tokenizers, PAIRS), tokenizers)
    text = " ".join(PAIRS) * 17  # CTranslate2's own limit is 1,024 tokens
    assert len(tokenizers.encode_source([text])[0]) > 1024
    export_ctranslate2(model, tmp_path / "out", [text])  # which compares the two


def test_the_command_exports_and_tells_how_it_compared(memorised_folder, tmp_path, heedful_command):
    (tmp_path / "sentences.txt").write_text("".join(f"{text}\n" for text in PAIRS), encoding="utf-8")
    words = ["--quantization", "int8", "--sentences", tmp_path / "sentences.txt"]
    _, output, errors = heedful_command("export", "ctranslate2", memorised_folder, tmp_path / "out", *words)
    assert re.match(r"greedy: \d of 6 sentences differ", output), errors
    assert "in int8" in output
    assert ctranslate2.Translator(str(tmp_path / "out"), device="cpu").compute_type.startswith("int8")


def test_plain_ctranslate2_gives_the_same_and_a_translator_says_whose_the_folder_is(memorised_folder, tmp_path):
    exported = export_ctranslate2(memorised_folder, tmp_path / "out", list(PAIRS)).folder
    tokenizer, engine = AutoTokenizer.from_pretrained(exported), ctranslate2.Translator(str(exported), device="cpu")
    sources = [tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) for text in PAIRS]
    results = engine.translate_batch(sources, beam_size=1, min_decoding_length=0)
    ids = [tokenizer.convert_tokens_to_ids(result.hypotheses[0]) for result in results]
    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == list(PAIRS.values())
    assert_error("a transformers model, but holds one for CTranslate2: run it", Translator.from_pretrained, exported)


def test_the_guide_runs_as_it_is_written(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "runs" / "quickstart"
    model = saved_model(folder / "model", SHOWN, encoder_layers=1, decoder_layers=1)
    export_ctranslate2(model, folder / "ctranslate2", list(SHOWN))
    monkeypatch.chdir(tmp_path)
    section = text_of("serve").split("\n## CTranslate2\n")[1].split("\n## ")[0]
    blocks, names = printing_of(section), {}
    assert len(blocks) == section.count("```python") == 1
    for code, printed in blocks:
        exec(code, names)
        assert capsys.readouterr().out == printed


def test_exports_that_differ_or_lose_the_model_are_refused_and_leave_nothing(memorised_folder, tmp_path, monkeypatch):
    save = exporter.specification.save_model

    def save_another(model, *arguments, change):
        other = copy.deepcopy(model)
        change(other)
        save(other, *arguments)

    def negate(model):
        model.model.decoder.layers[0].feed_forward.fc2.weight.data.neg_()

    for change, quantization, message in (
        (negate, "float32", r"differs from generate\(\)'s for \d of 6 sentences.* The first is sentence"),
        (shake, "int8", "`quantization` int8 ruins the model"),
    ):
        monkeypatch.setattr(exporter.specification, "save_model", partial(save_another, change=change))
        assert_error(message, export_ctranslate2, memorised_folder, tmp_path / "out", list(PAIRS), quantization)
    assert list(tmp_path.iterdir()) == []


def test_a_type_a_device_or_a_package_that_is_not_there_is_refused_by_name(memorised_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(ctranslate2, "get_supported_compute_types", lambda *device: {"float32", "int8"})
    types = [("int16", r"`quantization` must be one of float32, int8, .*'int16'"), ("int4", r"float32, .*'int4'")]
    assert_refused(types, lambda each: export_ctranslate2(memorised_folder, tmp_path / "out", list(PAIRS), each))
    with pytest.raises(ValueError, match="`device` must be cpu or cuda for CTranslate2, but is 'mps'"):
        check_compute_type("float32", torch.device("mps"))
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    extra = r"pip install 'heedful\[ctranslate2\]'"
    assert_error(extra, export_ctranslate2, tmp_path, tmp_path / "out", ["a"], error=ImportError)
    assert list(tmp_path.iterdir()) == []


def test_a_comparison_names_the_first_sentence_that_differs_and_a_folder_appears_whole_or_not_at_all(tmp_path):
    refuse({"greedy": compare(["one"], [(1, 2)], [[1, 2]])}, "it", "float32")
    comparison = compare(["one", "two", "three"], [(1, 2), (3, 2), (4, 2)], [[1, 2], [5, 2], [6, 2]])
    message = r"2 of 3 sentences.* is sentence 2, 'two': .* \[3, 2\], it \(greedy\) tokens"
    assert_error(message, refuse, {"greedy": comparison}, "it", "float32")
    with pytest.raises(FileNotFoundError), new_folder(tmp_path / "out") as folder:
        shutil.copy(tmp_path / "none", folder)
    assert list(tmp_path.iterdir()) == []
    with new_folder(tmp_path / "a" / "out") as folder:
        (folder / "file").write_text("whole")
        assert not (tmp_path / "a" / "out").exists()
    assert (tmp_path / "a" / "out" / "file").read_text() == "whole"
    cases = [
        (tmp_path / "a", "`target` must be a folder that does not exist yet"),
        (tmp_path / "a" / "out" / "file" / "b", "`target` must be writable"),
    ]
    assert_refused(cases, lambda target: new_folder(target).__enter__())
    with pytest.raises(ValueError, match="`target` must be a folder that does not exist yet"):
        export_ctranslate2(tmp_path / "none", tmp_path, ["a"])  # before anything is loaded
