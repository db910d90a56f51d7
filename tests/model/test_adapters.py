"""LoRA and its relatives with peft: trained, saved, switched, merged, and translated with."""

import copy
import json
import sys
from importlib.metadata import version

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, Seq2SeqTrainer, pipeline

import helpers
from heedful import HeedForConditionalGeneration, HeedSeq2SeqTrainer
from heedful.checksums_heed import CHECKSUMS_FILE
from heedful.data.epochs.micro_batches import collate
from heedful.data.tokenization import TokenizerPair
from heedful.decoding.loading import load_model
from heedful.decoding.translation import Translator
from helpers import VARIANTS, assert_near, loss_and_gradients, matrices_of, needs_peft_of_transformers, tiny_model
from memorised import learn_by_heart, saved_in, saved_model
from trainer_runs import make_trainer

peft = pytest.importorskip("peft")
torch.manual_seed(0)
ROWS = helpers.sentences(7, 4, 6)
SOURCE, MASK = helpers.padded(ROWS)
LABELS = torch.randint(14, 70, (3, 6))
LABELS[0, 2:] = -100
BATCH = {"input_ids": SOURCE, "attention_mask": MASK, "labels": LABELS}
TASK = {"task_type": "SEQ_2_SEQ_LM"}
LORA = {**TASK, "r": 4, "target_modules": ["q_proj", "v_proj"]}
# Every one of them trains weights beside the model's, and can be merged into them.
ADAPTERS = {
    "attention": peft.LoraConfig(**LORA),
    "all_linear": peft.LoraConfig(**{**LORA, "target_modules": "all-linear"}),
    "rank_stabilised": peft.LoraConfig(**LORA, use_rslora=True),
    "dora": peft.LoraConfig(**{**LORA, "target_modules": "all-linear"}, use_dora=True),
    "new_tokens": peft.LoraConfig(**LORA, trainable_token_indices=[20, 21]),
    "norms": peft.LNTuningConfig(**TASK, target_modules=["norm"]),  # of a post-norm model
    "projections": peft.LoraConfig(**{**LORA, "target_modules": ["q_proj", "k_proj", "out_proj"]}),
    "embeddings": peft.LoraConfig(**{**LORA, "target_modules": ["embed_tokens", "lm_head"]}),
    "ia3": peft.IA3Config(**TASK, target_modules=["k_proj", "v_proj", "fc2"], feedforward_modules=["fc2"]),
}
PROMPTS = {
    "prompt": peft.PromptTuningConfig(**TASK, num_virtual_tokens=4),
    "prefix": peft.PrefixTuningConfig(**TASK, num_virtual_tokens=4),
}


@torch.no_grad()
def logits_of(model):
    return model.eval()(**BATCH).logits


def trained(model, updates=6, learning_rate=2e-2):
    model.train()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    losses = []
    for _ in range(updates):
        optimizer.zero_grad()
        losses.append(model(**BATCH).loss)
        losses[-1].backward()
        optimizer.step()
    return [loss.item() for loss in losses]


def adapted(config, updates=3, **changes):
    """Return a trained adapter on a tiny model."""
    torch.manual_seed(1)
    model = peft.get_peft_model(tiny_model(**changes), copy.deepcopy(config))  # peft fills in the sizes of the model
    trained(model, updates)
    return model


# Every adapter; what has other linear layers than the default, or shares embeddings otherwise; the other family.
OTHERS = ("modern", "additive", "grouped", "bart", "unequal_stacks", "shared_layers")
SHARINGS = [helpers.SHARINGS[name] for name in ("own_output", "own_source", "separate_vocabularies_untied")]
MERGED = [(name, {"tie_word_embeddings": name != "embeddings"}) for name in ADAPTERS | PROMPTS]
MERGED += [("all_linear", changes) for changes in (*(VARIANTS[name] for name in OTHERS), *SHARINGS)]
RECURRENT = {"family": "recurrent"}
MERGED += [
    ("all_linear", RECURRENT),
    ("projections", RECURRENT),
    ("embeddings", {**RECURRENT, "tie_word_embeddings": False}),
]


@pytest.mark.parametrize(("name", "changes"), MERGED, ids=str)
def test_an_adapter_learns_the_model_under_it_stays_and_it_is_saved_loaded_and_merged(tmp_path, name, changes):
    model, plain = adapted((ADAPTERS | PROMPTS)[name], updates=0, **changes), tiny_model(**changes)
    before, matrices = {key: value.clone() for key, value in model.state_dict().items()}, matrices_of(plain)
    assert 0 < sum(p.numel() for p in model.parameters() if p.requires_grad) < model.num_parameters() / 2
    losses = trained(model, learning_rate=0.05 if "family" in changes else 0.02)
    assert losses[-1] < losses[0] - 0.05
    trainable = {key for key, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert set() < changed <= trainable
    model.save_pretrained(tmp_path / "adapter")
    expected = logits_of(model)
    assert not torch.allclose(expected, logits_of(plain), atol=1e-2)
    assert torch.equal(logits_of(peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")), expected)
    if name in ADAPTERS:
        merged = model.merge_and_unload()
        assert_near(logits_of(merged), expected, 2e-5)
        merged.save_pretrained(tmp_path / "merged")
        loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged")
        assert torch.equal(logits_of(loaded), logits_of(merged))
        assert matrices_of(loaded) == matrices_of(merged) == matrices
        files = {"config.json", "generation_config.json", "model.safetensors", CHECKSUMS_FILE}
        files |= helpers.closure_of(f"modeling_{plain.config.model_type}.py")
        assert {path.name for path in (tmp_path / "merged").iterdir()} == files


def test_activation_checkpointing_changes_no_gradient_of_an_adapter():
    model = adapted(ADAPTERS["all_linear"], updates=1)
    plain = loss_and_gradients(model, BATCH)
    for use_reentrant in (False, True):
        helpers.checkpoint_activations(model, use_reentrant=use_reentrant)
        if use_reentrant:  # else nothing before the adapters would ask for a gradient
            model.enable_input_require_grads()
        assert_near(loss_and_gradients(model, BATCH), plain, helpers.rounding(model, LABELS.numel()))


@pytest.mark.parametrize("trainer", helpers.slow_but([HeedSeq2SeqTrainer], [Seq2SeqTrainer, HeedSeq2SeqTrainer]))
def test_a_trainer_makes_the_same_update_of_two_micro_batches_as_of_one_batch(trainer, tmp_path):
    rows = [
        {"input_ids": source.tolist(), "labels": [label for label in labels.tolist() if label != -100]}
        for source, labels in zip([*ROWS, ROWS[0]], [*LABELS, LABELS[0]], strict=True)
    ]
    settings = {"save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2}
    given, found, losses = {"train_dataset": rows, "data_collator": lambda rows: collate(rows, helpers.PAD)}, [], []
    for size, parts in ((4, 1), (2, 2), (1, 4)):
        model, folder = adapted(ADAPTERS["attention"], updates=0), tmp_path / f"{size}"
        settings |= {"per_device_train_batch_size": size, "gradient_accumulation_steps": parts}
        losses.append(make_trainer(trainer, folder, model, given, **settings).train().training_loss)
        found.append(logits_of(model))
        # What the trainer saved is the adapter alone.
        assert not (folder / "checkpoint-2" / "model.safetensors").exists()
        assert torch.equal(logits_of(peft.PeftModel.from_pretrained(tiny_model(), folder / "checkpoint-2")), found[-1])
        assert_near(found[-1], found[0], 1e-4)
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)


@pytest.mark.parametrize(
    ("modules", "sharing", "matrices"),
    [
        (["embed_tokens"], "all_shared", [0, 1, 2]),
        (["lm_head"], "all_shared", [0, 0, 2]),
        (["embed_tokens", "lm_head"], "all_shared", [0, 1, 2]),
        (["lm_head"], "own_output", [0, 0, 2]),
        (["encoder.embed_tokens"], "separate_vocabularies", [0, 1, 1]),
        (["lm_head"], "separate_vocabularies", [0, 1, 2]),
    ],
)
@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied", "ignore:.*ensure_weight_tying")
def test_matrices_that_an_adapter_trains_apart_are_saved_apart(tmp_path, modules, sharing, matrices):
    config = peft.LoraConfig(**LORA, modules_to_save=modules)
    model = peft.get_peft_model(tiny_model(**helpers.SHARINGS[sharing]), config)
    trained(model)
    expected = logits_of(model)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path)
    assert_near(logits_of(merged), expected, 2e-5)
    loaded = HeedForConditionalGeneration.from_pretrained(tmp_path)
    assert matrices_of(loaded) == matrices
    assert torch.equal(logits_of(loaded), logits_of(merged))


def test_several_adapters_are_switched_disabled_and_generate_what_the_merged_model_does():
    model = adapted(ADAPTERS["attention"])
    base, first = logits_of(tiny_model()), logits_of(model)
    model.add_adapter("second", ADAPTERS["all_linear"])
    model.set_adapter("second")
    assert torch.equal(logits_of(model), base)  # untrained, it changes nothing
    trained(model)
    assert not torch.allclose(logits_of(model), first, atol=1e-2)
    with model.disable_adapter():
        assert torch.equal(logits_of(model), base)
    inputs = {"input_ids": SOURCE, "attention_mask": MASK, "max_new_tokens": 8}
    searches = [inputs, {**inputs, "num_beams": 3}, {**inputs, "num_beams": 3, "num_return_sequences": 2}]
    found = [model.eval().generate(**search) for search in searches]
    assert not torch.equal(found[0], tiny_model().generate(**inputs))
    merged = model.merge_and_unload()
    assert all(torch.equal(tokens, merged.generate(**search)) for tokens, search in zip(found, searches, strict=True))


@needs_peft_of_transformers
def test_transformers_own_roads_to_an_adapter_lead_to_the_same_model(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    base = logits_of(model)
    model.add_adapter(ADAPTERS["attention"])
    trained(model)
    expected = logits_of(model)
    model.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    loaded.load_adapter(tmp_path / "adapter")
    auto = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "adapter")
    by_peft = peft.AutoPeftModelForSeq2SeqLM.from_pretrained(tmp_path / "adapter")
    for other in (loaded, auto, by_peft):
        assert torch.equal(logits_of(other), expected)
    loaded.disable_adapters()
    assert torch.equal(logits_of(loaded), base)


@pytest.mark.skipif(not needs_peft_of_transformers.args[0], reason="only where they do not go together")
def test_virtual_tokens_beside_a_cache_that_peft_does_not_know_are_refused():
    model = adapted(PROMPTS["prefix"]).eval()
    with pytest.raises(ValueError, match=r"are two\. \(A peft that is too old .* 'heedful\[adapters\]'"):
        model.generate(input_ids=SOURCE, attention_mask=MASK, max_new_tokens=6)


def test_prompts_find_the_heads_of_a_recurrent_model():
    inputs = {"input_ids": SOURCE, "attention_mask": MASK}
    for kind in (peft.PromptTuningConfig, peft.PromptEncoderConfig):
        model = tiny_model(family="recurrent")
        wrapped = peft.get_peft_model(model, kind(**TASK, num_virtual_tokens=3, token_dim=model.config.embedding_size))
        wrapped(**inputs, labels=LABELS).loss.backward()
        assert wrapped.eval().generate(**inputs, max_new_tokens=3).shape[0] == len(SOURCE)


def test_versions_that_do_not_go_together_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "99.1")
    model = tiny_model()
    message = rf"^transformers {version('transformers')} goes with peft 99\.1 or newer, but peft {version('peft')} is"
    for road in (lambda: model.add_adapter(ADAPTERS["attention"]), lambda: model.load_adapter(tmp_path)):
        with pytest.raises(ImportError, match=rf"{message} installed: `pip install 'heedful\[adapters\]'` brings"):
            road()


@needs_peft_of_transformers
@pytest.mark.parametrize(
    ("file", "lost", "message"),
    [
        ("model/model.safetensors", "encoder.layers.0.feed_forward.fc1.weight", "model must hold the weights"),
        ("adapter/adapter_model.safetensors", "encoder.layers.0.self_attn.q_proj.lora_B.weight", "The adapter must"),
    ],
)
def test_an_adapter_is_refused_where_weights_are_lost_its_own_or_the_models(tmp_path, file, lost, message):
    tiny_model().save_pretrained(tmp_path / "model")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    model.add_adapter(ADAPTERS["attention"])
    model.save_pretrained(tmp_path / "adapter")
    path = tmp_path / file
    weights = load_file(path)
    kept = {name: weight for name, weight in weights.items() if not name.endswith(lost)}
    assert len(kept) == len(weights) - 1
    save_file(kept, path, metadata={"format": "pt"})
    told = lost.removesuffix(".weight").replace(".", r"\.")
    with pytest.raises(ValueError, match=rf"{message}.* but lacks .*{told}"):
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "adapter")


@pytest.mark.parametrize("variant", ["default", "rotary", "learned", "t5", "shaw", "separate_vocabularies"])
@pytest.mark.parametrize("name", ["prompt", pytest.param("prefix", marks=needs_peft_of_transformers)])
def test_virtual_tokens_are_seen_in_generating_as_in_training_and_do_not_mind_padding(name, variant):
    model = adapted(PROMPTS[name], **VARIANTS[variant]).eval()
    model.requires_grad_(False)
    inputs = {"input_ids": SOURCE, "attention_mask": MASK}
    tokens = model.generate(**inputs, max_new_tokens=6, eos_token_id=None, no_repeat_ngram_size=0)
    scores = model(**inputs, decoder_input_ids=tokens[:, :-1]).logits
    assert torch.equal(scores.argmax(-1), tokens[:, 1:])
    alone = model(input_ids=ROWS[1][None], decoder_input_ids=tokens[1:2, :-1]).logits
    assert_near(alone, scores[1:2])
    assert model.generate(**inputs, max_new_tokens=6, num_beams=3).shape[0] == 3


TURNED = {"네.": "It rains.", "비가 온다.": "Yes."}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model that knows the pairs, and an adapter that turned two of them around."""
    place = tmp_path_factory.mktemp("adapters")
    saved_model(place / "model", vocab_size=272)
    model, tokenizers = load_model(place / "model"), TokenizerPair.from_pretrained(place / "model")
    model = peft.get_peft_model(model, peft.LoraConfig(**{**LORA, "target_modules": "all-linear"})).train()
    learn_by_heart(model, tokenizers, TURNED, learning_rate=1e-2)
    model.save_pretrained(place / "adapter")
    saved_in(place / "merged", model.eval().merge_and_unload(), tokenizers)
    return place


@pytest.mark.parametrize("name", [pytest.param("adapter", marks=needs_peft_of_transformers), "merged"])
def test_the_translator_and_the_pipeline_take_an_adapters_folder_as_they_take_a_models(folders, name):
    translator, wanted = Translator.from_pretrained(folders / name), list(TURNED.values())
    assert type(translator.model) is HeedForConditionalGeneration
    assert not any("lora" in name for name, _ in translator.model.named_modules())
    assert [row[0].text for row in translator.translate(list(TURNED), num_beams=2)] == wanted
    translate = pipeline("heed-translation", model=str(folders / name), device="cpu")
    assert [row["translation_text"] for row in translate(list(TURNED))] == wanted
    before = Translator.from_pretrained(folders / "model").translate(list(TURNED))
    assert [row[0].text for row in before] == wanted[::-1]


def test_an_adapter_that_cannot_be_used_is_refused_by_its_reason(folders, tmp_path, monkeypatch):
    settings = json.loads((folders / "adapter" / "adapter_config.json").read_text())
    cases = [
        (json.dumps({**settings, "base_model_name_or_path": "gone/away"}), r"name_or_path` .* 'gone/away' is neither"),
        ("{", r"adapter_config.json must be JSON"),
        (json.dumps(settings), r"The adapter in .* cannot be loaded"),
    ]
    for name in (7, ["a"], "a\0b", "a" * 100_000, None):
        cases += [(json.dumps({**settings, "base_model_name_or_path": name}), "is neither a folder here nor a model")]
    endless = ["(.+)+$x", "((.+)+)+x", r"(\w|\.)*z", "a(.+){9}", "(.|.) +x", "+x", ".*.*.*.*x", "(?ix)(.+) #\n+x"]
    for key, form in {"target_modules": str, "exclude_modules": str, "modules_to_save": lambda pattern: [pattern],
                      "rank_pattern": lambda pattern: {pattern: 4}, "layers_pattern": str}.items():  # fmt: skip
        cases += [(json.dumps({**settings, key: form(each)}), f"`{key}` of .* must be names") for each in endless]
    numbers = {"r": 10**9, "init_lora_weights": "pissa_niter_100000", "loftq_config": {"loftq_iter": 10**9}}
    others = {"megatron_config": {"a": 1}, "adapters": {"a": "/etc"}, "target_modules": ["q_proj"] * 20_000}
    for key, value in (numbers | others).items():
        cases += [(json.dumps({**settings, key: value}), f"`{key}` of .* must be names, simple patterns and numbers")]

    def load(text):
        (tmp_path / "adapter_config.json").write_text(text)
        load_model(tmp_path)

    helpers.assert_refused(cases, load, (ValueError, FileNotFoundError))
    prompt = peft.get_peft_model(load_model(folders / "model"), copy.deepcopy(PROMPTS["prompt"]))
    prompt.save_pretrained(tmp_path / "prompt")
    with pytest.raises(ValueError, match=r"must be one that can be merged .*, but is PROMPT_TUNING instead"):
        load_model(tmp_path / "prompt")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"peft must be installed: pip install 'heedful\[adapters\]'"):
        load_model(folders / "adapter")
