"""Every file under configuration/ can be used as it is."""

import ast
import gzip
import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForSeq2SeqLM

import heedful
from guides import text_of
from heedful.recipe_keys import keys_of
from heedful.training.model_of_recipe import MODEL_TYPES, read_config
from heedful.training.recipe import Recipe
from heedful.training.recipe_file import known_text, make_recipe, read_recipe, sizes, to_yaml
from helpers import assert_error, slow_but

CONFIGURATION = Path(__file__).parents[2] / "configuration"
RECIPES = sorted((CONFIGURATION / "recipes").glob("*.yaml"))
MODELS = sorted((CONFIGURATION / "models").glob("*/config.json"))
TOOL = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "upkeep" / "recipe_keys.py"))
# How the table of sizes tells a field.
NUMBERS = {
    "d_model": r"d_model (\d+)",
    "encoder_attention_heads": r"(\d+) heads",
    "encoder_ffn_dim": r"d_ff (\d+)",
    "encoder_layers": r"(\d+) \+ \d+",
    "hidden_size": r"layers? of (\d+)",
    "d_k": r"queries and keys of (\d+)",
    "dropout": r"dropout (0\.\d)",
    "label_smoothing": r"label smoothing (0\.\d)",
}


def test_every_recipe_and_size_is_listed_with_a_sentence_and_printed(printed):
    lines = dict(re.findall(r"^  (\S+) {2,}(\S.{6,})$", printed("recipes"), flags=re.MULTILINE))
    assert set(lines) == {path.stem for path in RECIPES} | {path.parent.name for path in MODELS}
    assert printed("recipes", "quickstart").startswith("# Korean to English on the built-in")
    assert json.loads(printed("recipes", "paper-C-N2"))["encoder_layers"] == 2


def test_what_the_table_says_of_a_size_is_so():
    for name, sentence in sizes().items():
        written = read_config(name)
        for field, pattern in NUMBERS.items():
            found = re.search(pattern, sentence)
            if found and field in written:
                assert written[field] == float(found[1]), (name, field)


def test_recipes_and_sizes_are_found_by_name_from_anywhere_and_a_file_wins_over_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart", "quickstart.yaml"):
        assert read_recipe(name).name == "heed-quickstart-ko-en"
    assert read_config("small")["d_model"] == 256
    Path("quickstart").write_text(to_yaml(read_recipe("quickstart", ["name=mine"])))
    Path("small").mkdir()
    assert read_config("small")["d_model"] == 256  # a folder without a config.json is none
    Path("small/config.json").write_text('{"d_model": 8}')
    assert read_recipe("quickstart").name == "mine"
    assert read_config("small") == read_config("small/config.json") == {"d_model": 8}


def test_an_unknown_name_is_answered_with_near_ones():
    for name in ("quikstart", "quikstart.yaml", "recipes/quikstart.yaml"):
        message = rf"The recipe {name} does not exist \(did you mean quickstart\?\)"
        assert_error(message, read_recipe, name, error=FileNotFoundError)
    with pytest.raises(FileNotFoundError, match=r"config smal \(`model.config`\) does not exist \(did you mean small"):
        read_config("smal")
    assert_error(r"`NAME` must be .* but is 'paper-C-N3' \(did you mean paper-C-N", known_text, "paper-C-N3")


def test_every_recipe_is_one_and_its_model_can_be_built():
    for path in RECIPES:
        recipe = read_recipe(path)
        assert make_recipe(yaml.safe_load(to_yaml(recipe))) == recipe
        assert Path(recipe.output).parts[0] == "runs"
        options = read_config(recipe.model.config) if recipe.model.config else {}
        assert options.get("model_type", "heed") in MODEL_TYPES
        options |= recipe.model.options
        with torch.device("meta"):
            config = AutoConfig.for_model(options.pop("model_type", "heed"), **options)
            model = AutoModelForSeq2SeqLM.from_config(config)
        assert model.num_parameters() > 0
        assert {name: getattr(model.config, name) for name in recipe.model.options} == recipe.model.options


def test_a_run_that_the_comments_of_a_recipe_name_can_be_read_and_goes_on_from_a_run_before_it():
    known = {Path(read_recipe(path).output) for path in RECIPES}
    for path in RECIPES:
        lines = re.findall(r"^#   heedful train (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        for recipe in (read_recipe(name, changes) for name, *changes in map(shlex.split, lines)):
            assert not recipe.model.start_from or Path(recipe.model.start_from).parent in known, recipe.output
            known.add(Path(recipe.output))


def test_every_model_config_loads_and_builds():
    kinds = {"heed": "HeedForConditionalGeneration", "heed_rnn": "HeedRNNForConditionalGeneration"}
    for path in MODELS:
        config = AutoConfig.from_pretrained(path.parent)
        with torch.device("meta"):
            assert type(AutoModelForSeq2SeqLM.from_config(config)).__name__ == kinds[config.model_type]
        written = read_config(path)
        assert {name: getattr(config, name) for name in written} == written


def test_the_listing_is_a_recipe_with_every_key_its_default_and_its_meaning_and_so_is_the_table_of_the_docs(printed):
    listed = printed("recipes", "keys")
    recipe = make_recipe(yaml.safe_load(listed))
    data = {"train": "pairs.tsv", "source": "1", "target": "2"}
    assert recipe == make_recipe({"name": "mine", "data": data, "optimization": {"max_updates": 10000}})
    for key in keys_of(Recipe):
        assert re.search(rf"^ *{key.name.rpartition('.')[2]}:", listed, re.MULTILINE), key
        assert len(key.meaning) > 5, key
        assert " ".join(key.meaning.split()[:3]) in listed, key
    page = TOOL["page"]()
    assert TOOL["PAGE"].read_text(encoding="utf-8") == page, "python scripts/upkeep/recipe_keys.py --write"


FEW = " optimization.max_updates=2 optimization.tokens_per_update=500 optimization.mixed_precision=no"
FEW += " optimization.warmup_updates=1 validation.sentences=2 decoding.bootstrap=0 decoding.max_length=3"
FEW += " data.cleaning.drop_overlap=false"
WORDS = ["a", "bad", "cab", "dab", "ebb"]
TASK_RECIPES = ["cmudict-g2p", "cmudict-p2g", "korean-spacing", "numbers", "reverse", "scan", "spelling"]


def lay_out(folder):
    """Lay out little of what the recipes of other tasks than translation read: texts, and rows as CMUdict has them."""
    rows = [" ".join(WORDS[: 1 + number % 5]) + f" {number}" for number in range(60)]
    texts = [{"translation": {"ko": text, "en": text}} for text in rows]
    sounds = [{"grapheme": text, "phoneme": text.upper().replace("E", "EH1")} for text in rows]
    pronounced = [{"translation": pair, "alternatives": [pair["phoneme"]]} for pair in sounds]
    for name in ("train", "test"):
        actions = "".join(f"IN: {text} OUT: {text.upper()}\n" for text in map(" ".join, (WORDS, WORDS[:3])))
        (folder / f"tasks_{name}_simple.txt").write_text(actions, encoding="utf-8")
    for name, content in (("texts", texts), ("train", pronounced), ("validation", pronounced)):
        with gzip.open(folder / f"{name}.jsonl.gz", "wt", encoding="utf-8") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in content)


@pytest.mark.parametrize("name", slow_but(["cmudict-g2p", "numbers", "scan"], TASK_RECIPES))
def test_what_the_recipe_of_a_task_says_first_makes_its_pairs_and_trains(name, tmp_path, monkeypatch, printed):
    if name == "numbers":
        pytest.importorskip("num2words")
    monkeypatch.chdir(tmp_path)
    lay_out(tmp_path)
    text = (CONFIGURATION / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    lines = re.findall(r"^#   heedful (.+)$", text, re.MULTILINE)
    assert lines[-1].startswith(f"train {name} data.folder=")
    for line in lines:
        # Enough to train on that they have all words of the others.
        line = re.sub(r"--count \d+", "--count 2000" if "/train." in line else "--count 20", line)
        line = re.sub(r"path/to/\w+\.jsonl\.gz", "texts.jsonl.gz", line).replace("path/to/cmudict", ".")
        line = line.replace("path/to/SCAN/simple_split/", "") + FEW * line.startswith("train")
        printed(*shlex.split(line))
    assert json.loads(Path(f"runs/{name}/model/metrics.json").read_text())["validation"]["loss"] > 0


GUIDE = text_of("text_to_text")
GUIDED = re.findall(r"^heedful (?:pairs|train) .+$", GUIDE, re.MULTILINE)


def test_the_guide_to_other_tasks_names_recipes_and_their_first_lines():
    cells = re.findall(r"^\| (`[^|]+`) \|", GUIDE, re.MULTILINE)
    assert {name for cell in cells for name in re.findall("`(.+?)`", cell)} == set(TASK_RECIPES)


def test_cutoffs_of_length_in_the_guide_part_the_tasks_of_scan(tmp_path, monkeypatch, printed):
    monkeypatch.chdir(tmp_path)
    tasks = (f"IN: {'jump ' * count}now OUT: {'I_JUMP ' * count}I_NOW\n" for count in range(48))
    Path("tasks.txt").write_text("".join(tasks), encoding="utf-8")
    for line in (line for line in GUIDED if line.startswith("heedful pairs scan")):
        printed(*shlex.split(line.replace("path/to/SCAN/", ""))[1:])
    train, test = (Path(f"scan26/{name}.jsonl").read_text().splitlines() for name in ("train", "test"))
    assert (len(train), len(test)) == (26, 22)
    assert len(json.loads(train[-1])["target"].split()) == 26
    (trained,) = (line for line in GUIDED if line.startswith("heedful train scan"))
    assert read_recipe("scan", shlex.split(trained)[3:]).output == "runs/scan26"


def test_the_guide_mixes_korean_texts_with_others_that_have_nouns_of_a_dictionary(tmp_path, monkeypatch, printed):
    monkeypatch.chdir(tmp_path)
    Path("nouns.txt").write_text("학교/25\n바다/25\n", encoding="utf-8")
    Path("train.jsonl").write_text((json.dumps({"ko": "나는 학교에 간다."}) + "\n") * 20, encoding="utf-8")
    make, train = (shlex.split(line) for line in GUIDED[-2:])
    printed(*(part.replace("path/to/train.jsonl.gz", "train.jsonl") for part in make[1:]))
    made = set(Path("spacing/nouns5.jsonl").read_text(encoding="utf-8").splitlines())
    assert made == {'{"source": "나는바다에간다.", "target": "나는 바다에 간다."}'}
    assert read_recipe(train[2], train[3:]).data.mixture["nouns"].train == "nouns5.jsonl"


def test_functions_take_the_group_of_a_recipe_that_they_read():
    parameters = [
        (path.name, function.name)
        for path in Path(heedful.__file__).parent.rglob("*.py")
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        for node in ast.walk(each)
        if "Recipe" in (getattr(node, "id", None), getattr(node, "value", None))  # also in quotes
    ]
    assert ("run.py", "train") in parameters
    assert len(parameters) <= 15, parameters
