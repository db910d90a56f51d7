"""What a user gets wrong, by every road that can meet it: an error that names it."""

import math
import pickle
import shutil
from functools import partial
from itertools import product

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, TextStreamer, pipeline

from heedful import BeamSearch, HeedEncoder, HeedForConditionalGeneration, HeedModel, MinimumBayesRisk, Translator
from heedful.cards.hub import check_folder
from heedful.data.tokenization import TARGET_FOLDER, TokenizerPair
from heedful.data.tokenizer_training import train_tokenizers
from heedful.decoding.loading import load_model
from heedful.pipeline_heed import TASK
from helpers import FAMILIES, SHARINGS, assert_error, assert_refused, change_json, each_once, ending_model, tiny_model
from memorised import PAIRS

WEIGHT = "model.encoder.layers.0.self_attn.q_proj.weight"
BARE = [AutoModelForSeq2SeqLM.from_pretrained, HeedForConditionalGeneration.from_pretrained]


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def set_config(folder, **changes):
    change_json(folder / "config.json", **changes)


def translated_by_pipeline(folder):
    return pipeline(TASK, model=str(folder), device="cpu")


DAMAGES = {
    "missing": (lambda f: change_weights(f, lambda w: w.pop(WEIGHT)), f"lack.* {WEIGHT}"),
    "extra": (lambda f: change_weights(f, lambda w: w.update(more=torch.ones(2))), "(unknown|holds).* more"),
    "shape": (
        lambda f: change_weights(f, lambda w: w.update({WEIGHT: torch.zeros(8, 32)})),
        rf"{WEIGHT} \(8, 32\) instead of \(32, 32\)",
    ),
    "more layers": (lambda f: set_config(f, encoder_layers=3), r"lack.* model\.encoder\.layers\.2.* and 9 more"),
    "fewer layers": (lambda f: set_config(f, decoder_layers=1), r"(unknown|holds).* model\.decoder\.layers\.1.*more"),
    "other sharing": (lambda f: set_config(f, tie_word_embeddings=False), r"lack.* lm_head\.weight"),
    **{
        f"the first {kept} bytes": (
            lambda f, kept=kept: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:kept]),
            "must hold whole safetensors files, but one is broken",
        )
        for kept in (20_000, 100, 0)
    },
}

# Of the roads that share a check, one shows all that it names.
ROADS = [translated_by_pipeline, load_model, Translator.from_pretrained, check_folder]
DAMAGED = each_once([*BARE, *ROADS], DAMAGES, [BARE[1], load_model, check_folder])


@pytest.mark.parametrize(("road", "damage"), DAMAGED)
def test_weights_that_are_not_the_models_are_named_by_every_road(folder, road, damage):
    do, message = DAMAGES[damage]
    do(folder)
    assert_error(message, road, folder, error=(ValueError, RuntimeError))


def test_a_command_names_them_in_one_line(folder, refused):
    pytest.importorskip("matplotlib")
    DAMAGES["shape"][0](folder)
    data = ["builtin:test:2", "--source", "ko", "--target", "en"]
    more = {"translate": ["네."], "embeddings": ["네"], "attention": ["네.", "-o", "map.png"], "push": ["me/model"]}
    for command, arguments in (more | {"evaluate": ["--data", *data], "score": data}).items():
        assert WEIGHT in refused(command, folder, *arguments).splitlines()[0], command


def test_what_is_asked_for_is_no_mistake(whole, tmp_path):
    for damage in ("missing", "extra", "more layers"):
        folder = shutil.copytree(whole, tmp_path / damage)
        DAMAGES[damage][0](folder)
        model, report = AutoModelForSeq2SeqLM.from_pretrained(folder, output_loading_info=True)
        assert isinstance(model, HeedForConditionalGeneration)
        assert report["missing_keys"] or report["unexpected_keys"], damage
    folder = shutil.copytree(whole, tmp_path / "shape")
    DAMAGES["shape"][0](folder)
    model = HeedForConditionalGeneration.from_pretrained(folder, ignore_mismatched_sizes=True)
    assert model.state_dict()[WEIGHT].shape == (32, 32)
    assert model.state_dict()[WEIGHT].any()
    weights = load_file(whole / "model.safetensors")  # which the user changes as he likes
    del weights[WEIGHT]
    assert HeedForConditionalGeneration.from_pretrained(None, config=model.config, state_dict=weights)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_a_model_without_its_head_and_a_head_on_such_a_model_load_as_everywhere(tmp_path, sharing):
    original = tiny_model(**SHARINGS[sharing], output_bias=True)
    original.save_pretrained(tmp_path / "whole")
    base = HeedModel.from_pretrained(tmp_path / "whole")
    name = "encoder.layers.0.feed_forward.fc1.weight"
    assert torch.equal(base.get_parameter(name), original.model.get_parameter(name))
    base.save_pretrained(tmp_path / "base")
    again, report = HeedForConditionalGeneration.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert {name.split(".")[0] for name in report["missing_keys"]} == {"lm_head"}
    HeedForConditionalGeneration.from_pretrained(tmp_path / "base")
    for name, weight in base.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], weight), name
    # The stacks are still looked at.
    change_weights(tmp_path / "base", lambda weights: weights.pop(WEIGHT.removeprefix("model.")))
    assert_error(f"lacks {WEIGHT}", HeedForConditionalGeneration.from_pretrained, tmp_path / "base")


def test_a_token_of_the_hub_is_never_written_nor_copied(whole, tmp_path):
    model = HeedForConditionalGeneration.from_pretrained(whole, token="hf_secret")
    model.save_pretrained(tmp_path)
    assert model.hub_access.token == "hf_secret"
    assert "hf_secret" not in repr(vars(model)) + repr(model.config)
    assert not [path for path in tmp_path.rglob("*") if b"hf_secret" in path.read_bytes()]
    assert b"hf_secret" not in pickle.dumps(model)
    assert pickle.loads(pickle.dumps(model)).hub_access.token is None


@pytest.mark.parametrize(("road", "value"), each_once(ROADS, [math.nan, math.inf, -math.inf], [check_folder]))
def test_weights_that_are_no_numbers_are_named(folder, road, value):
    change_weights(folder, lambda weights: weights[WEIGHT].view(-1)[7:8].fill_(value))
    assert_error(f"weights .*must be finite numbers, but are not in {WEIGHT}", road, folder)


def test_the_largest_numbers_of_a_type_are_numbers(tokenizers):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        model = ending_model(vocab_size=272).to(dtype)
        torch.nn.init.constant_(model.model.encoder.layers[0].feed_forward.fc1.weight, torch.finfo(dtype).max)
        assert pipeline(TASK, model=model, tokenizer=tokenizers.source, device="cpu")


def test_a_file_in_the_place_of_a_folder_a_broken_generation_config_and_such_an_index_are_named(folder, tmp_path):
    (tmp_path / "file").write_text("")
    saved = (folder / "generation_config.json").read_text()
    (folder / "generation_config.json").write_text("{")
    for road in (load_model, Translator.from_pretrained, check_folder):
        message = "file must be a folder with a model, but is a file"
        assert_error(message, road, tmp_path / "file", error=FileNotFoundError)
        assert_error(r"generation_config\.json must be JSON, but is not", road, folder)
    (folder / "generation_config.json").write_text(saved)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    cases = [
        ("{", "cannot be loaded: JSONDecodeError"),
        ("{}", "cannot be loaded: KeyError"),
        ('{"metadata": {}, "weight_map": {"a": "elsewhere.safetensors"}}', r"elsewhere\.safetensors"),
    ]
    index = folder / "model.safetensors.index.json"
    assert_refused(cases, lambda text: (index.write_text(text), check_folder(folder)), (ValueError, FileNotFoundError))


def test_types_of_the_config_are_told_whole_and_a_stack_alone_is_not_made_up_from_a_whole_models_folder(folder):
    lacking = "must hold the weights of its config's HeedEncoder, but lacks"
    assert_error(lacking, HeedEncoder.from_pretrained, folder)
    set_config(folder, d_model="32")
    message = r"'d_model': TypeError: Field 'd_model' expected int, got str \(value: '32'\)"
    assert_error(message, load_model, folder)


def test_the_pipeline_wants_an_encoder_decoder_that_generates_and_no_streamer_with_a_strategy(tokenizers, whole):
    def made(model):
        return pipeline(TASK, model=model, tokenizer=tokenizers.source, device="cpu")

    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=20))
    for model in (gpt, HeedModel.from_pretrained(whole)):
        message = f"`model` must be an encoder-decoder with `generate\\(\\)`, but is {type(model).__name__} instead"
        assert_error(message, made, model)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 272}
    config = transformers.BartConfig(**sizes, **tokenizers.special_ids())
    translate = made(transformers.BartForConditionalGeneration(config))
    with pytest.raises(ValueError, match="`streamer` must be None with a `custom_generate`"):
        translate("네.", custom_generate=BeamSearch(), streamer=TextStreamer(tokenizers.source))


def test_of_two_tokenizers_neither_is_replaced_by_the_other_but_one_can_be_saved_alone(tmp_path):
    pair = train_tokenizers(list(PAIRS), list(PAIRS.values()), vocab_size=264, joint=False)
    for each in (ending_model(vocab_size=264, share_encoder_decoder_embeddings=False), pair):
        each.save_pretrained(tmp_path)
    roads = (translated_by_pipeline, Translator.from_pretrained)
    assert all(road(tmp_path) for road in roads)
    source = TokenizerPair.from_pretrained(tmp_path).source
    TokenizerPair(source, source).save_pretrained(tmp_path / "one")
    assert TokenizerPair.from_pretrained(tmp_path / "one").is_joint
    shutil.rmtree(tmp_path / TARGET_FOLDER)
    for road in roads:
        assert_error(TARGET_FOLDER, road, tmp_path, error=FileNotFoundError)


@pytest.fixture(scope="module", params=FAMILIES)
def decoding(request):
    ids = torch.tensor([[14, 15, 16, 17, 18], [19, 20, 21, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long(), "max_new_tokens": 5}
    return ending_model(family=request.param, vocab_size=272), batch


def test_what_a_strategy_would_not_get_or_read_is_refused_but_at_its_default(decoding, tokenizers):
    model, batch = decoding
    given = {"streamer": TextStreamer(tokenizers.source), "assistant_model": model, "tokenizer": tokenizers.source}
    for strategy, (name, value) in product((BeamSearch(), lambda *_, **__: None), given.items()):
        message = f"`{name}` must be None with a `custom_generate`.*{type(value).__name__}"
        assert_error(message, model.generate, **batch, custom_generate=strategy, **{name: value})
    risk = {"custom_generate": MinimumBayesRisk(tokenizers.source), "num_return_sequences": 2}
    unread = {"num_beam_groups": 2, "diversity_penalty": 0.5, "force_words_ids": [[5]], "penalty_alpha": 0.5}
    for name, value in {**unread, "dola_layers": "low", "low_memory": True}.items():
        message = f"`{name}` must not be set with MinimumBayesRisk, but is"
        assert_error(message, model.generate, **batch, **risk, do_sample=True, **{name: value})
    assert len(model.generate(**batch, **risk, num_beams=2, num_beam_groups=1, diversity_penalty=0.0)) == 2


LIKE_BLEU = MinimumBayesRisk(train_tokenizers(["a"], ["b"], vocab_size=262), utility="bleu")
IMPOSSIBLE = [
    (BeamSearch, r"`custom_generate` must be an object such as BeamSearch\(…\), but is the cl"),
    (BeamSearch(models=tiny_model()), "`models` must be a list of models, but is a HeedFor"),
    (BeamSearch(models=["runs/a"]), r"`models\[0\]` must be a loaded model, but is 'ru"),
    (MinimumBayesRisk(None), "`tokenizer` must be a TokenizerPair or"),
    (LIKE_BLEU, "`utility` must be a function or None, but is 'bleu'"),
    (BeamSearch(models=[tiny_model()]), "with target size 272, but is 99 instead"),
]


def test_strategies_and_combinations_that_cannot_work_are_named(decoding):
    model, batch = decoding
    search = partial(model.generate, **batch, num_beams=2, num_return_sequences=2)
    assert_refused(IMPOSSIBLE, lambda strategy: search(custom_generate=strategy))
    assert_error("num_beam", search, num_beam=3)
    encoded = {"encoder_outputs": model.get_encoder()(**batch), "attention_mask": batch["attention_mask"]}
    for inputs, count in ((batch, 1), (encoded, 3)):
        message = f"`decoder_input_ids` must have a row for each of the 2 sources, but have {count}"
        assert_error(message, model.generate, **inputs, decoder_input_ids=torch.tensor([[1, 5]] * count))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_with_two_matrices_where_the_config_has_one_is_refused(tmp_path, family):
    tiny_model(family=family, tie_word_embeddings=False).save_pretrained(tmp_path)
    set_config(tmp_path, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"must hold one matrix for .* which the config ties, but holds two"):
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
