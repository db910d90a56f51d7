"""Folders, recipes and outputs made by somebody who means harm: no code of theirs runs, and nothing elsewhere is read.

Each case changes a sound folder; code that ran would leave a file behind.
"""

import ast
import io
import json
import math
import pickle
import re
import shutil
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, pipeline

from heedful import HeedForConditionalGeneration, TokenizerPair, Translator
from heedful.cards.hub import check_folder
from heedful.checksums_heed import CHECKSUMS_FILE, changed_files
from heedful.cli import main as cli
from heedful.cli import options
from heedful.data.tokenization import TARGET_FOLDER, options_inside
from heedful.data.tokenizer_training import train_tokenizers
from heedful.decoding.loading import load_model
from heedful.pipeline_heed import TASK
from heedful.training.run_folder.checkpoints import load_state
from heedful.verification.verification import check_files, check_remote_code
from helpers import assert_error, assert_refused, ending_model, tiny_model
from memorised import PAIRS
from tiny_runs import recipe_file

KOREAN, ENGLISH = list(PAIRS), list(PAIRS.values())
EVIL = "from pathlib import Path\nPath({marker!r}).touch()\nclass X:\n    pass\n"
WEIGHTS, INDEX, SETTINGS = "model.safetensors", "model.safetensors.index.json", "tokenizer_config.json"


@pytest.fixture
def place(whole, tmp_path, monkeypatch):
    """A folder `model` to spoil, and `outside` what must not be read; standard input has the user's text."""
    shutil.copytree(whole, tmp_path / "model")
    shutil.copytree(whole, tmp_path / "outside")
    (tmp_path / "evil.py").write_text(EVIL.format(marker=str(tmp_path / "ran")))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    yield tmp_path
    assert not (tmp_path / "ran").exists(), "code of the folder ran"
    assert sys.stdin.tell() == 0, "somebody asked the user's text"
    outside, before = (
        {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        for folder in (tmp_path / "outside", whole)
    )
    assert outside == before


def change(path, **fields):
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | fields))


class Bomb:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


def code_in_the_tokenizer(place, reference, folder=""):
    shutil.copy(place / "evil.py", place / "model" / folder)
    change(place / "model" / folder / SETTINGS, tokenizer_class="EvilTok", auto_map={"AutoTokenizer": reference})


def code_in_the_targets_tokenizer(place, reference):
    shutil.copytree(place / "outside", place / "model" / TARGET_FOLDER, ignore=shutil.ignore_patterns("*.py"))
    change(place / "model" / SETTINGS, target_tokenizer=TARGET_FOLDER)
    code_in_the_tokenizer(place, reference, TARGET_FOLDER)


def code_in_the_model(place, reference, model_type="evil"):
    shutil.copy(place / "evil.py", place / "model")
    auto_map = dict.fromkeys(("AutoConfig", "AutoModelForSeq2SeqLM"), reference)
    change(place / "model" / "config.json", model_type=model_type, auto_map=auto_map)


def pickled(place, kind):
    (place / "model" / WEIGHTS).unlink()
    name = "a.bin" if kind == "in shards" else "pytorch_model.bin"
    torch.save({"a": Bomb(place / "ran")}, place / "model" / name)
    if kind == "in shards":
        change(place / "model" / "pytorch_model.bin.index.json", metadata={}, weight_map={"a": name})
    if kind == "garbage":
        (place / "model" / name).write_bytes(b"garbage" * 99)
    if kind == "alone":
        (place / "model" / name).write_bytes(pickle.dumps(Bomb(place / "ran")))


def sharded(place, name):
    weights = load_file(place / "model" / WEIGHTS)
    (place / "model" / WEIGHTS).unlink()
    change(place / "model" / INDEX, metadata={}, weight_map=dict.fromkeys(weights, name))


def linked(place, name, target=None):
    path = place / "model" / name
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.symlink_to(target or place / "outside" / name)


def written(place, texts):
    for name, text in texts.items():
        (place / "model" / name).write_text(text)


def changed(place, fields):
    for name, changes in fields.items():
        change(place / "model" / name, **changes)


def false_cache(place, name):
    """Make a folder that looks like the Hub's cache, but whose `blobs` are elsewhere."""
    blobs = place / name / "blobs"
    (place / name / "snapshots").mkdir(parents=True)
    blobs.symlink_to(place / "outside")
    (place / "model").rename(place / name / "snapshots" / "main")
    (place / "model").symlink_to(place / name / "snapshots" / "main")
    linked(place, WEIGHTS, Path("../../blobs") / WEIGHTS)


NEEDS_CODE = r"contains custom code \(`auto_map` in tokenizer_config.json\).*`TokenizerPair.from_pretrained\(….*trust"
MODEL_CODE = r"contains custom code, which is not run automatically.*trust_remote_code=True.*--trust-remote-code"
PICKLE = r"its weights \(\.bin\) are broken, or contain Python objects, which could run code.*as \.safetensors"
NAMES_OUT = "must name files in the model's folder, but names"
LINK = "must be a file in the model's folder, but is a link to"
OUTSIDE, OTHER_TOKENIZER = f"../outside/{WEIGHTS}", "../outside/tokenizer.4.0.json"
DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
REFUSED = [  # how a folder is spoiled, the message, and by what; {place} is where "model" and "outside" are
    (code_in_the_tokenizer, NEEDS_CODE, ["evil.X", "evil.X"], "evil.X", [None, "evil.X"], ["a/b--evil.X", None]),
    (code_in_the_tokenizer, NEEDS_CODE, ["{place}/evil.X", None]),
    (code_in_the_targets_tokenizer, NEEDS_CODE, ["evil.X", None]),
    (code_in_the_model, MODEL_CODE, "evil.X", "a/b--evil.X"),
    (code_in_the_model, f"{MODEL_CODE}|`auto_map` and .* must name a file in the folder", "{place}/evil.X"),
    (pickled, PICKLE, "alone", "in shards", "garbage"),
    (sharded, f"`weight_map` of .*{NAMES_OUT}", OUTSIDE, f"x/../../outside/{WEIGHTS}", ["a"]),
    (sharded, f"`weight_map` of .*{NAMES_OUT}", "{place}/outside/model.safetensors", f"..\\outside\\{WEIGHTS}"),
    (sharded, f"`weight_map` of .*{NAMES_OUT} 'C:a'", "C:a"),
    (sharded, f"`weight_map` of .*{NAMES_OUT} 7", 7),
    (changed, f"`transformers_weights` of .*{NAMES_OUT}", {"config.json": {"transformers_weights": OUTSIDE}}),
    (changed, f"`fast_tokenizer_files` of .*{NAMES_OUT}", {SETTINGS: {"fast_tokenizer_files": [OTHER_TOKENIZER]}}),
    (linked, LINK, WEIGHTS, "config.json", "tokenizer.json", CHECKSUMS_FILE, "generation_config.json"),
    (lambda place, names: linked(place, *names), LINK, [TARGET_FOLDER, "{place}/outside"]),
    (lambda place, names: linked(place, *names), LINK, [WEIGHTS, OUTSIDE], ["vocab.txt", "/no/such"]),
    (
        *(lambda place, names: [linked(place, *each) for each in names], LINK),
        [["one.json", "{place}/outside/config.json"], ["config.json", "{place}/model/one.json"]],
    ),
    (false_cache, LINK, "models--a--b", "backups"),
    *((written, f"{name} must be JSON", {name: DEEP}) for name in ("config.json", SETTINGS, CHECKSUMS_FILE)),
    (written, "must be a JSON object", {CHECKSUMS_FILE: "[]"}),
    (written, "must hold the checksums", {CHECKSUMS_FILE: '{"weights": 3}'}),
    (
        *(changed, f"must be unchanged since it was saved, but {OUTSIDE}, {WEIGHTS} changed"),
        {CHECKSUMS_FILE: {"weights": {OUTSIDE: "0"}}, "config.json": {"_weights_checksums": {}}},
    ),
]


@pytest.mark.parametrize(("spoil", "message", "how"), [(*case[:2], how) for case in REFUSED for how in case[2:]])
def test_a_hostile_folder_is_refused_by_name(place, spoil, message, how):
    spoil(place, json.loads(json.dumps(how).replace("{place}", str(place))))
    for road in (Translator.from_pretrained, check_folder):
        assert_error(message, road, place / "model", error=(ValueError, OSError))


def test_no_command_takes_the_users_text_for_an_answer(place, refused):
    code_in_the_tokenizer(place, ["evil.X", "evil.X"])
    data = ["builtin:test:2", "--source", "ko", "--target", "en"]
    more = {"translate": [], "attention": ["네.", "-o", "a.html"], "evaluate": ["--data", *data], "score": data}
    for name, arguments in more.items():
        assert "contains custom code" in refused(name, place / "model", *arguments)


def test_who_trusts_a_tokenizer_says_so_and_gets_it(place):
    folder = place / "model"
    code = "from transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast): pass\n"
    (folder / "own.py").write_text(code)
    change(folder / SETTINGS, tokenizer_class="Own", auto_map={"AutoTokenizer": [None, "own.Own"]})
    pair = TokenizerPair.from_pretrained(folder, trust_remote_code=True)
    assert type(pair.source).__name__ == "Own"
    assert Translator(load_model(folder), pair).translate(["네."])


# What a folder asks for and does not get, though it loads.
def custom_generate(place, folder="model"):
    (place / folder / "custom_generate").mkdir()
    shutil.copy(place / "evil.py", place / folder / "custom_generate" / "generate.py")


PASSED_OVER = {
    "local class": lambda p: code_in_the_model(p, "evil.X", "heed"),
    "generation": custom_generate,
    "pipeline": lambda p: (
        shutil.copy(p / "evil.py", p / "model"),
        change(p / "model/config.json", custom_pipelines={TASK: {"impl": "evil.X", "pt": ["AutoModel"]}}),
    ),
    "template": lambda p: (p / "model/chat_template.jinja").write_text("{{ ''.__class__.__mro__[1]() }}"),
    "tokenizer_file": lambda p: change(p / "model" / SETTINGS, tokenizer_file=str(p / "outside/tokenizer.json")),
    "code beside": lambda p: shutil.copy(p / "evil.py", p / "model" / "modeling_heed.py"),
}


@pytest.mark.parametrize("case", PASSED_OVER)
def test_what_no_loading_needs_is_passed_over(place, case):
    PASSED_OVER[case](place)
    assert Translator.from_pretrained(place / "model").translate(["네."])


def test_a_tokenizer_that_the_folder_lacks_is_not_taken_from_elsewhere(place):
    (place / "model" / "tokenizer.json").unlink()
    for key in ("tokenizer_file", "vocab_file"):
        change(place / "model" / SETTINGS, **{key: str(place / "outside" / "tokenizer.json")})
        assert_error("okenizer", Translator.from_pretrained, place / "model", error=(ValueError, OSError))
    named = dict.fromkeys(("tokenizer_file", "source_spm", "vocab", "merges"), "/etc/passwd")
    change(place / "model" / SETTINGS, **named)
    assert options_inside(place / "model") == dict.fromkeys([*named, "vocab_file"])  # in every road to a tokenizer


def test_a_target_tokenizer_of_the_pipeline_and_the_state_of_a_run_run_no_code(place):
    code_in_the_tokenizer(place, ["evil.X", "evil.X"])
    given = {"model": tiny_model(vocab_size=272), "tokenizer": AutoTokenizer.from_pretrained(place / "outside")}
    message = r"tokenizer in .* contains custom code.*pass it as `target_token"
    assert_error(message, pipeline, TASK, **given, target_tokenizer=str(place / "model"), device="cpu")
    state = place / "model" / "training_state"
    state.mkdir()
    torch.save({"a": Bomb(place / "ran")}, state / "optimizer.pt")
    (state / "progress.json").write_text("{}")
    assert_error(None, load_state, place / "model", error=(KeyError, pickle.UnpicklingError))


def test_an_adapter_is_judged_as_a_model_is(place):
    peft = pytest.importorskip("peft")
    adapter, settings = place / "adapter", peft.LoraConfig(target_modules=["q_proj"])
    adapted = peft.get_peft_model(load_model(place / "outside"), settings)
    adapted.peft_config["default"].base_model_name_or_path = str(place / "outside")
    adapted.save_pretrained(adapter)
    path = adapter / "adapter_model.safetensors"
    weights, unknown = load_file(path), {"base_model.model.model.x.lora_A.weight": torch.zeros(2)}
    assert load_model(adapter)
    for changed, message in (
        ({name: weight + math.nan for name, weight in weights.items()}, "must be finite numbers, but are not in .*q_"),
        ({name.replace("q_", "qq_"): each for name, each in weights.items()}, r"lack .*q_proj\.lora_A.* and \d+ more"),
        (weights | unknown, r"have, unknown to the model, .*model\.x\.lora_A"),
    ):
        save_file(changed, path)
        assert_error(f"weights in .*adapter {message}", load_model, adapter)
    path.unlink()
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps(Bomb(place / "ran")))
    assert_error(f"The adapter in .* cannot be loaded: {PICKLE}", load_model, adapter)
    shutil.copytree(adapter, place / "other")
    for bases in ({"adapter": "adapter"}, {"adapter": "other", "other": "adapter"}):
        for folder, base in bases.items():
            change(place / folder / "adapter_config.json", base_model_name_or_path=str(place / base))
        assert_error("must lead to a model, but leads to an adapter that leads back", load_model, adapter)


def test_sizes_without_bounds_are_refused_before_memory_is_taken(place):
    for field, size in (("num_labels", 100_000_000), ("encoder_layers", 1_000_000_000)):
        change(place / "model" / "config.json", **{field: size})
        assert_error(f"`{field}` of .* must be at most 10,000, but is {size:,} instead", load_model, place / "model")
        change(place / "model" / "config.json", **{field: 2})


def test_every_load_by_a_class_that_could_run_code_says_whom_it_trusts():
    package = Path(options.__file__).parents[1]
    files = [*package.rglob("*.py"), *(package.parents[1] / "scripts").rglob("*.py")]
    calls = [
        (path.name, node)
        for path in files
        if "conformance" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and re.fullmatch(r"(Auto\w+|loader)\.from_pretrained", ast.unparse(node.func))
    ]
    allowed = {"trust_remote_code", None}
    assert len(calls) >= 8
    assert [path for path, node in calls if not {keyword.arg for keyword in node.keywords} & allowed] == []


def test_code_elsewhere_and_what_a_link_leads_to_is_not_pushed(place):
    path, message = (
        place / "model" / "config.json",
        "`auto_map` and `custom_pipelines` of .* must name a file in the f",
    )
    sound = path.read_text()
    for reference in ("../evil.X", f"{place}/evil.X", "sub/evil.X", "evil", "", 7):
        for changes in ({"auto_map": {"AutoModel": reference}}, {"custom_pipelines": {TASK: {"impl": reference}}}):
            change(path, **changes)
            assert_error(message, check_folder, place / "model")
            path.write_text(sound)
    for name in ("a/b/notes.txt", "notes.txt", "README.md"):
        (place / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        linked(place, name, place / "evil.py")
        assert_error(f"{name} {LINK}", check_folder, place / "model")
        (place / "model" / name).unlink()


def test_verifying_runs_no_code_that_lies_elsewhere(place):
    shutil.copy(Path(options.__file__).parents[1] / "modeling_heed.py", place / "model")  # the installed package's
    classes = ("AutoConfig", "AutoModelForSeq2SeqLM")
    for number, spoil in enumerate(
        (
            lambda folder: change(folder / "config.json", auto_map=dict.fromkeys(classes, f"{place}/evil.X")),
            lambda folder: change(folder / "config.json", auto_map=dict.fromkeys(classes, "a/b--evil.X")),
            lambda folder: custom_generate(folder.parent, folder.name),
            lambda folder: change(folder / "adapter_config.json", base_model_name_or_path=str(place / "outside")),
        )
    ):
        folder = shutil.copytree(place / "model", place / str(number))
        spoil(folder)
        assert check_remote_code(folder, tiny_model()).level == "skipped"


def test_a_recipe_is_data_and_what_it_names_runs_no_code(place):
    def train(recipe, *overrides):
        return cli.app(["train", str(recipe), *overrides], standalone_mode=False)

    recipe = place / "recipe.yaml"
    for tag in (f"!!python/object/apply:os.mkdir [{place / 'ran'}]", "!!python/name:os.system"):
        recipe.write_text(f"name: {tag}\n")
        assert_error("must be YAML, but is not", train, recipe)
        recipe.write_text("name: a\n")
        assert_error("must be YAML, but '!!python", train, recipe, f"data={tag}")
    code_in_the_tokenizer(place, ["evil.X", "evil.X"])
    (place / "pairs.pkl").write_bytes(pickle.dumps(Bomb(place / "ran")))
    recipe = recipe_file(place, {"model.options": {}, "optimization.max_updates": 1})
    cases = [(f"{key}={place / 'model'}", "contains custom code") for key in ("tokenizer.path", "model.start_from")]
    cases += [(f"data.train={place / name}", "must be a file of a known kind") for name in ("pairs.pkl", "evil.py")]
    assert_refused(cases, lambda override: train(recipe, override))


@pytest.mark.parametrize("name", [WEIGHTS, "model-00001-of-00002.safetensors"])
def test_a_flipped_bit_is_told_by_the_file(place, name):
    folder = place / "model"
    if "-of-" in name:
        model = HeedForConditionalGeneration.from_pretrained(folder)
        (folder / WEIGHTS).unlink()
        model.save_pretrained(folder, max_shard_size=40_000)
        name = min(path.name for path in folder.glob("model-*"))
        assert load_model(folder)
    content = bytearray((folder / name).read_bytes())
    content[-100] ^= 1
    (folder / name).write_bytes(content)
    message = f"model in .* must be unchanged since it was saved, but {name} changed.*delete {CHECKSUMS_FILE}"
    assert_error(message, load_model, folder)
    assert name in check_files(folder).message
    if "-of-" in name:  # whole weights beside the shards, which transformers would prefer to these
        shutil.copy(place / "outside" / WEIGHTS, folder)
        assert_error(f"{WEIGHTS} changed", load_model, folder)
    (folder / CHECKSUMS_FILE).unlink()
    assert check_files(folder).level == "skipped"
    assert load_model(folder)


@pytest.mark.parametrize("side", ["", TARGET_FOLDER])
def test_the_tokenizer_of_another_model_is_told(place, side):
    folder = place / "model"
    ending_model(vocab_size=264, share_encoder_decoder_embeddings=False).save_pretrained(folder)
    for where, texts in ((folder, (KOREAN, ENGLISH)), (place / "other", (ENGLISH, KOREAN))):
        train_tokenizers(*texts, vocab_size=264, joint=False).save_pretrained(where)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Translator.from_pretrained(folder)
    shutil.copy(place / "other" / side / "tokenizer.json", folder / side)
    with pytest.warns(UserWarning, match=r"tokenizers in .* should be those .* but (target_t.*/)?tokenizer.json ch"):
        Translator.from_pretrained(folder)
    assert check_files(folder).level == "FAIL"
    TokenizerPair.from_pretrained(folder).save_pretrained(folder)
    assert check_files(folder).level == "pass"


@pytest.mark.filterwarnings("error", "ignore:.*cut off", "ignore:.*unknown token")
def test_who_saves_anew_by_any_road_is_not_locked_out(place):
    folder = place / "model"
    model, tokenizer = HeedForConditionalGeneration.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(folder)  # by transformers, unchanged
    Translator.from_pretrained(folder)
    tokenizer.add_tokens(["<new>"])
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with pytest.warns(UserWarning, match=r"but tokenizer.json changed since"):
        assert Translator.from_pretrained(folder).translate(["네."])
    pipeline(TASK, model=model, tokenizer=tokenizer, device="cpu").save_pretrained(folder)
    assert changed_files(folder, "weights") == changed_files(folder, "tokenizer") == []


@pytest.mark.filterwarnings("error", "ignore:.*cut off", "ignore:.*unknown token")
def test_the_hubs_cache_is_no_link_out_of_the_folder_and_all_may_read_weights_who_may_read_the_config(whole, tmp_path):
    modes = {path.name: path.stat().st_mode for path in whole.iterdir()}
    assert modes[WEIGHTS] == modes["config.json"] == modes["tokenizer.json"]
    snapshot, blobs = (tmp_path / "models--a--b" / name for name in ("snapshots/0123", "blobs"))
    blobs.mkdir(parents=True)
    (snapshot / "target_tokenizer").mkdir(parents=True)
    for path in whole.iterdir():
        shutil.copy(path, blobs)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
        if path.name.startswith("tokenizer"):
            (snapshot / "target_tokenizer" / path.name).symlink_to(f"../../../blobs/{path.name}")
    change(blobs / SETTINGS, target_tokenizer=TARGET_FOLDER)
    (snapshot / CHECKSUMS_FILE).unlink()  # as in a folder of old
    assert Translator.from_pretrained(snapshot).translate(["네."])
    (tmp_path / "latest").symlink_to(snapshot)
    assert load_model(tmp_path / "latest")
