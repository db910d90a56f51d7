"""A stock model computes what the Heed model does, and becomes it again; what no stock class has is refused."""

import json
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from test_export_forms import OPTIONS, T5
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer
from typer.testing import CliRunner

from card_facts import card_facts
from guides import python_of
from heedful import HeedForConditionalGeneration
from heedful.cards import hub
from heedful.cards.model_card import write_model_card
from heedful.cli.main import app
from heedful.conversion.model_conversion import convert
from heedful.export import fresh_process
from heedful.export import transformers_export as exporter
from heedful.export.transformers_export import check_recipe, export_transformers, save, stock_config, stock_model
from heedful.training.recipe_file import read_recipe
from helpers import assert_error, assert_refused, change_json, rounding, sentences, shake, tiny_model
from memorised import PAIRS, saved_model
from tiny_runs import tiny_recipe

CONFIGURATION = Path(__file__).parents[2] / "configuration"
NO_T5 = {"norm_placement": "post", "norm_type": "layernorm", "feed_forward_bias": True, "attention_bias": True}
NO_T5 |= {"output_bias": True, "embedding_norm": True, "activation_function": "geglu", "attention_scoring": "additive"}
NO_T5 |= {"decoder_attention_heads": 2, "decoder_ffn_dim": 40, "decoder_layers": 3, "d_v": 4}
NO_T5 |= {"encoder_neighbourhood": 2, "decoder_key_value_heads": 1}
NO_T5 |= {"tie_word_embeddings": False, "share_encoder_decoder_embeddings": False}


def model_of(changes: dict) -> HeedForConditionalGeneration:
    return tiny_model(d_model=32, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder of a model of the paper's shape that ends its translations by itself."""
    options = {"norm_placement": "post", "encoder_layers": 1, "decoder_layers": 1}
    return saved_model(tmp_path_factory.mktemp("memorised") / "model", **options)


@pytest.fixture
def in_this_process(monkeypatch):
    def run(command, **_):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "heedful", None)
            fresh_process.answer(*command[3:])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(fresh_process.subprocess, "run", run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_is_compared_in_float32_and_keeps_its_size(folder, tmp_path, in_this_process, dtype):
    half = shutil.copytree(folder, tmp_path / "half")
    HeedForConditionalGeneration.from_pretrained(folder, dtype=dtype).save_pretrained(half)
    export = export_transformers(half, tmp_path / "out", list(PAIRS))
    assert export.quantization == str(dtype).removeprefix("torch.")
    assert export.difference < 1e-5
    # Sinusoids, and factors that are no power of two.
    for name in ("default", "pre_norm", "t5_of_transformers", "untied_t5"):
        ours = model_of(OPTIONS[name])
        shake(ours)
        save(stock_model(ours.to(dtype).float()), tmp_path / name, dtype)
        load = partial(AutoModelForSeq2SeqLM.from_pretrained, tmp_path / name)
        inputs = {"input_ids": sentences(9)[0][None], "decoder_input_ids": torch.tensor([[1, 5, 7]])}
        expected, found = (model.eval()(**inputs).logits for model in (ours, load(dtype=torch.float32)))
        assert (expected - found).abs().max() / expected.abs().max().clamp(min=1) < rounding(ours), name
        assert load().dtype == dtype
        weights = load_file(tmp_path / name / "model.safetensors").values()
        assert sum(weight.numel() for weight in weights if weight.dtype == dtype) > 0.7 * ours.num_parameters(), name


def test_the_sizes_of_t5s_have_the_published_numbers_of_parameters_and_a_stock_form():
    for name, rows, published in (
        ("t5-small", 32128, 60_506_624),
        ("flan-t5-small", 32128, 76_961_152),
        ("byt5-small", 384, 299_637_760),
    ):
        config = AutoConfig.from_pretrained(CONFIGURATION / "models" / name, vocab_size=rows)
        assert stock_config(config).model_type == "t5"
        with torch.device("meta"):
            assert HeedForConditionalGeneration(config).num_parameters() == published, name


def test_what_no_stock_class_has_is_refused_by_the_name_of_the_field():
    for field, value in NO_T5.items():
        kernel = "eager" if value == "additive" else "sdpa"
        config = tiny_model(d_model=32, attention=kernel, **T5 | {field: value}).config
        assert_error(f"not even as T5ForC[a-zA-Z]*, the nearest class: `{field}` must be", stock_config, config)
    config = model_of({"norm_type": "rmsnorm", "d_k": 4, "activation_function": "geglu"}).config
    assert_error(r"`norm_type` .* `d_k` .* `activation_function`", stock_config, config)
    config = model_of({"decoder_attention_heads": 2, "d_k": 16}).config  # which is the decoder's default alone
    assert_error("`d_k` must be None, but is 16", stock_config, config)
    config = stock_config(model_of(OPTIONS["tensor2tensor"]).config)  # whose class drops layers by default
    assert config.encoder_layerdrop == config.decoder_layerdrop == 0.0


def test_the_way_back_gives_the_first_model_and_the_folder_runs_without_heedful_as_its_card_says(
    folder, tmp_path, monkeypatch, capsys
):
    exported = tmp_path / "out"
    told = CliRunner().invoke(app, ["export", "transformers", str(folder), str(exported), "--count", "6"])
    assert told.exit_code == 0, told.output
    assert re.search(r"greedy: 0 of 6 .*\n5 beams: 0 of 6 .*\nlogits differ by \d\.\de-0[678] at most", told.output)
    convert(exported, tmp_path / "back")
    source, target = torch.tensor([[9, 8, 7, 2]]), torch.tensor([[1, 5, 6]])
    models = [HeedForConditionalGeneration.from_pretrained(each) for each in (folder, tmp_path / "back")]
    expected, found = (each(source, decoder_input_ids=target).logits for each in models)
    assert (expected - found).abs().max() / expected.abs().max().clamp(min=1) < rounding(models[0])
    ids = [AutoTokenizer.from_pretrained(each)(list(PAIRS))["input_ids"] for each in (folder, tmp_path / "back")]
    assert ids[0] == ids[1]
    assert not list(exported.glob("*.py"))
    assert "auto_map" not in (exported / "config.json").read_text()
    (code,) = python_of((exported / "README.md").read_text())
    code = code.replace('"out"', json.dumps(str(exported))).replace('"…"', '"비가 온다."')
    monkeypatch.setitem(sys.modules, "heedful", None)
    exec(code, {})
    assert capsys.readouterr().out == "It rains.\n"


@pytest.mark.usefixtures("in_this_process")
def test_a_push_as_transformers_sends_the_stock_form_with_the_models_own_card(folder, tmp_path, monkeypatch, printed):
    sent = {}

    def push(out, repository, **options):
        sent.update({path.name: path.read_text("utf-8") for path in out.iterdir() if path.suffix != ".safetensors"})
        return hub.Pushed(repository, "0123", "https://hub/me/stock")

    shutil.copytree(folder, tmp_path / "model")
    write_model_card(tmp_path / "model", card_facts(example={"source": 'Ein "Test".'}))
    monkeypatch.setattr(hub, "push", push)
    monkeypatch.setattr(exporter.comparison, "sentences_to_compare", lambda _: list(PAIRS))
    assert "me/stock at revision 0123" in printed("push", tmp_path / "model", "me/stock", "--as", "transformers")
    assert json.loads(sent["config.json"])["architectures"] == ["MarianMTModel"]
    own, card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8"), sent["README.md"]
    assert card.split("## How to use")[0] == own.split("## How to use")[0]
    assert card.split("## Training data")[1] == own.split("## Training data")[1]
    assert 'tokenizer(["Ein \\"Test\\"."]' in card
    assert "trust_remote_code" not in card


def test_a_card_gets_the_section_for_the_stock_form_and_keeps_what_its_owner_wrote(tmp_path):
    stock = stock_model(model_of({}))

    def written(card):
        if card:
            (tmp_path / "README.md").write_text(card, encoding="utf-8")
        exporter._write_card(tmp_path, "stock", tmp_path, stock, count=1000, difference=2e-7, read=90)
        return (tmp_path / "README.md").read_text(encoding="utf-8")

    bare = written("")
    assert bare.startswith("---\nlanguage:\n- und\n")
    said = "license: unknown", "\n# stock\n\n## How to use\n", "compared both on 1,000 sentences", '(["…"], return'
    assert [each for each in said if each not in bare] == []
    section = bare[bare.index("## How to use") :]
    assert written("# Mine\n\nMy words.\n") == f"# Mine\n\nMy words.\n\n{section}"
    own = "# Mine\n\n## How to use\n\nOld code.\n\n## Later\n\nMore.\n"
    assert written(own) == f"# Mine\n\n{section}\n## Later\n\nMore.\n"


def test_nothing_is_left_of_a_folder_that_computes_otherwise_or_cannot_run(folder, tmp_path, monkeypatch, request):
    def changed(ours):
        stock = stock_model(ours)
        stock.model.encoder.layers[0].fc1.weight.data[3, 4] += 1e-2
        return stock

    with monkeypatch.context() as patch:
        patch.setattr(fresh_process, "__file__", str(tmp_path / "nowhere" / "fresh_process.py"))
        message = r"transformers alone cannot run .*: .*fresh_process.py.*No such file"
        assert_error(message, export_transformers, folder, tmp_path / "out", list(PAIRS))
    request.getfixturevalue("in_this_process")
    monkeypatch.setattr(exporter, "stock_model", changed)
    with pytest.raises(ValueError, match=r"logits differ by .*, so no folder is written"):
        export_transformers(folder, tmp_path / "out", list(PAIRS))
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("in_this_process")
def test_the_stock_form_keeps_the_settings_of_the_generation_config(folder, tmp_path):
    asked = {"min_length": 9, "no_repeat_ngram_size": 1, "forced_bos_token_id": 50, "eos_token_id": [2, 60]}
    shutil.copytree(folder, tmp_path / "model")
    change_json(tmp_path / "model" / "generation_config.json", **asked, longest_trained_source=9)
    found = export_transformers(tmp_path / "model", tmp_path / "out", list(PAIRS)[:3])
    assert set(found.comparisons) == {"greedy", "5 beams"}  # in which nothing differs, or there was no folder
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written.items() >= asked.items()
    assert "longest_trained_source" not in written


def test_two_vocabularies_several_languages_and_a_folder_in_use_are_refused(folder, tmp_path):
    shared = {"encoder_layers": 1, "decoder_layers": 1}
    saved_model(tmp_path / "two", joint=False, target_vocab_size=260, **shared)
    saved_model(tmp_path / "several", PAIRS, "ko", languages=["ko", "en"], **shared)
    shutil.copytree(folder, tmp_path / "used")
    cases = [
        (("two", "out"), "`share_encoder_decoder_embeddings` must be True for transformers"),
        (("several", "out"), "must have one target language for transformers, but has ko, en"),
        (("used", "used"), "`target` must be a folder that does not exist yet"),
    ]
    assert_refused(cases, lambda names: export_transformers(*(tmp_path / name for name in names), list(PAIRS)))
    assert {path.name for path in tmp_path.iterdir()} == {"two", "several", "used"}


def test_recipes_are_judged_before_they_run_and_the_papers_search_is_what_no_class_can_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    also = ["publish.also=[transformers]"]
    # Settings of `generate()`, in place of the search of the paper's section 6.1.
    generates = ["decoding.length_penalty_form=power", "decoding.tokens_beyond_source=null"]
    recipe = read_recipe("paper-base", also)
    assert_error(r"`publish.also` must be empty.*`length_penalty_form`.*`tokens_beyond", check_recipe, recipe)
    check_recipe(read_recipe("paper-base", also + generates))
    also = {"publish.also": ["transformers"]}
    check_recipe(tiny_recipe(tmp_path / "good", also))
    for key, value in {
        "norm_type": {"model.options.norm_type": "rmsnorm"},
        "share_encoder_decoder_embeddings": {"tokenizer.joint": False},
        "publish.also": {"data.mixture": {"a": {"train": "a.tsv", "to": "ko"}}},
        "model_type": {"model.options": {"model_type": "heed_rnn", "cell": "gru"}},
    }.items():
        assert_error(f"`{key}` must be", check_recipe, tiny_recipe(tmp_path / key, also | value))
    saved_model(tmp_path / "several", PAIRS, "ko", languages=["ko", "en"], encoder_layers=1, decoder_layers=1)
    further = also | {"tokenizer": {}, "model": {"start_from": str(tmp_path / "several")}}
    assert_error(r"`publish.also` must be empty .*\(ko, en\)", check_recipe, tiny_recipe(tmp_path / "one", further))
    recipe = tiny_recipe(tmp_path / "used", also)
    (recipe.folder / "transformers").mkdir(parents=True)
    assert_error(r"`publish.also` must be empty because .* exists", check_recipe, recipe)
