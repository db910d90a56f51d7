"""The `heedful` command: one model is trained through the real entry point, and everything else uses it."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import yaml
from huggingface_hub.errors import StrictDataclassFieldValidationError

from heedful.cli import main as cli
from heedful.data.korean_english.pairs import korean_english_pairs
from heedful.training.processes.collectives import ProcessLostError
from heedful.training.processes.signals import TrainingInterrupted
from heedful.training.run_folder.folder import foreign_files
from helpers import CODE
from tiny_runs import logged, tiny_tree

SIZES = {"d_model": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
SIZES |= {"encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "encoder_layers": 1, "decoder_layers": 1}
LEARNING = {
    "data.train": "builtin:train:3000",
    "data.test": {"unseen": "builtin:test:20"},
    "tokenizer.vocab_size": 600,
    "model.options": {**SIZES, "dropout": 0.0, "label_smoothing": 0.0},
    "optimization.schedule": "linear",
    "optimization.learning_rate": 0.006,
    "optimization.warmup_updates": 20,
    "optimization.max_updates": 1,  # until the command line says more
    "optimization.tokens_per_update": 3000,
    "validation.every_updates": 50,
    "checkpoints.every_updates": 170,
    "decoding.max_length": 40,
}


def process(*arguments, **options):
    """Run the command as a user would."""
    options = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "timeout": 200, **options}
    command = [sys.executable, "-m", "heedful", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=False, **options)


def write_recipe(folder, changes=None):
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(tiny_tree(folder / "run", changes), allow_unicode=True), encoding="utf-8")
    return path


ALSO = "publish.also=[transformers]"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished `heedful train`, with the process's answer and the folder of the run."""
    folder = tmp_path_factory.mktemp("trained")
    finished = process("train", write_recipe(folder, LEARNING), "optimization.max_updates=210", "seed=3", ALSO)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished, folder / "run"


@pytest.fixture(scope="module")
def model(trained):
    return trained[1] / "model"


@pytest.fixture
def heedful(heedful_command):
    return heedful_command


@pytest.fixture
def refused(heedful):
    """Run the command, which must be a user's mistake: exit code 2, one message, no traceback."""

    def run(*arguments):
        code, output, errors = heedful(*arguments)
        assert (code, output) == (2, ""), arguments
        assert "Traceback" not in errors
        assert errors.count("heedful: ") == len(re.findall("^heedful: ", errors, re.MULTILINE)) == 1
        return errors[errors.index("heedful: ") :].strip()

    return run


def test_training_learns(trained):
    losses = logged(trained[1], "validation/loss")
    training = logged(trained[1], "train/loss")
    assert training[0] > 5
    assert losses[-1] < 0.45 * training[0]
    assert losses[-1] < 0.5 * max(losses[0], 5)
    metrics = json.loads((trained[1] / "model" / "metrics.json").read_text())
    assert metrics["unseen"]["chrf"] > 18
    assert metrics["validation"]["loss"] < 2.5


def test_training_tells_what_it_made(trained):
    finished, run = trained
    lines = finished.stdout.splitlines()
    told = ["validation", "unseen", lines[2], "model", "card", "learning curve", "as a class of transformers' own"]
    assert [line.split(":")[0] for line in lines] == told
    assert lines[2].startswith("210 updates")
    assert str(run / "model") in lines[3]
    assert Path(lines[4].removeprefix("card: ")) == run / "model" / "README.md"
    assert "3000 training pairs" in finished.stderr


# What `heedful train` tells: its data, its bar, its validations, its warnings, its weights.
TOLD = (
    r"training the tokenizer|`vocab_size` is |3000 training pairs|kept |.*% *\||update \d+ \(|warning: |publishing |$"
)


def test_training_writes_no_line_that_is_not_ours(trained):
    lines = trained[0].stderr.replace("\r", "\n").splitlines()
    assert len(lines) > 10
    assert [line for line in lines if line.strip() and not re.match(TOLD, line)] == []


def test_a_run_is_plotted_and_all_of_it_is_its_own(trained, model, heedful, refused, tmp_path):
    assert foreign_files(trained[1] / "model") == []  # so that a run that goes on replaces the picture too
    picture = tmp_path / "curve.svg"
    assert heedful("plot", trained[1], "-o", picture) == (0, f"{picture}\n", "")
    assert "validation/loss" in picture.read_text(encoding="utf-8")
    assert "has no log.jsonl" in refused("plot", model, "-o", tmp_path / "a.png")
    assert "(train/loss, " in refused("plot", trained[1], "-o", tmp_path / "a.png", "--metric", "speed")
    assert "must end in one of .png, .svg" in refused("plot", trained[1], "-o", tmp_path / "a.pdf")


def test_the_published_folder_is_complete(model):
    assert {path.name for path in model.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        *("recipe.yaml", "metrics.json", "README.md", "learning_curve.png", "heed_checksums.json"),
        *CODE,
    }
    assert "tiny" in (model / "README.md").read_text(encoding="utf-8")
    written = yaml.safe_load((model / "recipe.yaml").read_text())
    assert (written["optimization"]["max_updates"], written["seed"]) == (210, 3)  # as the command line said


def test_what_the_run_was_to_publish_besides_lies_beside_the_model(trained, refused):
    stock = trained[1] / "transformers"
    assert json.loads((stock / "config.json").read_text())["architectures"] == ["MarianMTModel"]
    assert "# tiny\n" in (stock / "README.md").read_text(encoding="utf-8")
    assert f"as a class of transformers' own: {stock}" in trained[0].stdout
    recipe = trained[1] / "recipe.yaml"
    assert "`publish.also` must be empty where there is" in refused("train", recipe, "resume=true")


SENTENCES = [pair["ko"] for pair in korean_english_pairs("test", 5)]


def test_translations_keep_the_order_from_arguments_and_from_a_pipe(model, heedful):
    code, output, _ = heedful("translate", model, *SENTENCES)
    assert code == 0
    alone = [heedful("translate", model, sentence)[1].strip() for sentence in SENTENCES]
    assert output.splitlines() == alone
    assert len(set(alone)) > 2
    assert heedful("translate", model, stdin="\n".join(SENTENCES))[1].splitlines() == alone
    code, output, _ = heedful("translate", model, stdin=f"\n{SENTENCES[0]}\n\n")
    assert (code, output.split("\n")) == (0, ["", alone[0], "", ""])  # an empty line stays one


def test_a_file_that_is_not_quite_clean_is_translated_and_what_is_wrong_told_with_its_line(model, heedful, tmp_path):
    alone = heedful("translate", model, *SENTENCES)[1].splitlines()
    first, broken, _, *rest = (sentence.encode() for sentence in SENTENCES)
    text = b"\n".join([b"\xef\xbb\xbf" + first, broken[:3] + b"\xff" + broken[3:], b"x" * 10_000, *rest, b""])
    (tmp_path / "in.txt").write_bytes(text)
    with pytest.warns(UserWarning, match="too long") as told:
        found = heedful("translate", model, "--input", tmp_path / "in.txt", "--output", tmp_path / "out.txt")
    assert found[:2] == (0, "")
    found = (tmp_path / "out.txt").read_text(encoding="utf-8").splitlines()
    assert found == [*alone[:2], "", *alone[3:]]
    byte, length = (str(warning.message) for warning in told)
    assert byte == "Line 2 must be UTF-8, but has byte 0xff at position 3: the byte is left out."
    assert length.startswith("Sentence 3, of 10001 tokens, is too long to be translated")
    with pytest.warns(UserWarning, match="UTF-8"):
        assert heedful("translate", model, stdin=text)[1].splitlines() == found


def test_many_bad_lines_are_counted_and_another_encoding_is_named(model, heedful):
    with pytest.warns(UserWarning, match="UTF-8") as told:
        heedful("translate", model, stdin=b"\xff\n" * 9)
    assert len(told) == 4
    assert "6 more lines are not UTF-8" in str(told[3].message)
    for text, encoding, line in ((SENTENCES[0], "UTF-16", 1), ("네.\n질문 하나\n", "CP949", 2)):
        code, output, errors = heedful("translate", model, stdin=text.encode(encoding))
        assert (code, output) == (2, "")
        like = f"it looks like {encoding}; `iconv -f {encoding} -t UTF-8"
        assert f"Standard input must be UTF-8, but line {line} is not: {like}" in errors


def test_the_published_model_knows_its_longest_source_and_warns_of_longer_ones(model, heedful):
    longest = json.loads((model / "generation_config.json").read_text())["longest_trained_source"]
    assert 10 < longest < 100
    text = " ".join(SENTENCES * 3)
    with pytest.warns(UserWarning, match=f"longer than the {longest} tokens"):
        heedful("translate", model, text)
    code, output, _ = heedful("translate", model, text, "--split")
    assert code == 0
    alone = heedful("translate", model, *SENTENCES)[1].splitlines()
    assert output.strip() == " ".join(alone * 3)


def test_what_a_command_could_not_end_with_is_told_before_the_model_is_loaded(refused, tmp_path):
    (tmp_path / "in.txt").write_text("x")
    (tmp_path / "pairs.tsv").write_text("ko\ten\n")
    missing, pairs = tmp_path / "no" / "out.txt", tmp_path / "pairs.tsv"
    evaluate = ["evaluate", "no/model", "--data", "builtin:test:20", "--source", "ko", "--target", "en"]
    sentences = ["none", tmp_path / "out", "--sentences", tmp_path / "none.txt"]
    for arguments, message in (
        ([*evaluate, "--predictions", "no/folder/x"], "`--predictions` must lie in an existing folder"),
        ([*evaluate, "--tokenize", "nope"], "`--tokenize` must be one of"),
        ([*evaluate, "--bootstrap", 3], "`--bootstrap` must be 0 or at least 40"),
        (["translate", "none", "x", "--output", missing], "`--output` must lie in an existing folder"),
        (["translate", "none", "x", "--output", tmp_path], "`--output` must be a file to write"),
        (["translate", "none", "--input", missing], "`--input` must be a file"),
        (["translate", "none", "x", "--input", tmp_path / "in.txt"], "`--input` must be left out where sentences are"),
        (["translate", "none", "a\udcff"], "must be UTF-8, but 'a\\udcff' is not"),
        (["init", "--data", pairs, "--output", pairs], "`--output` must be a file that does not exist yet"),
        (["train", tmp_path], "The recipe must be a YAML file, but"),
        (["verify", "none", "--data", tmp_path], "`--data` must be a text file"),
        (["export", "onnx", *sentences], "`--sentences` must be a text file, but"),
        (["export", "ctranslate2", *sentences], "`--sentences` must be a text file, but"),
    ):
        assert message in refused(*arguments)


def test_at_a_terminal_each_line_is_answered_before_the_next_is_read(model, heedful, monkeypatch, capsys):
    seen = []

    class Terminal(io.BytesIO):
        def isatty(self):
            return True

        def readline(self, *size):
            seen.append(sys.stdout.getvalue().count("\n"))
            return super().readline(*size)

    lines = "".join(f"{sentence}\n" for sentence in SENTENCES[:3]).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Terminal(lines)))
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert heedful("translate", model)[0] == 0
    assert seen == [0, 1, 2, 3]


def test_a_terminal_is_told_that_sentences_are_read(model, heedful, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO())
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", stream)
    assert "Sentences, one a line; Ctrl-D ends." in heedful("translate", model)[2]


def test_a_reader_that_leaves_ends_the_command_quietly_which_imported_little_and_collected_none_of_it(model):
    script = (
        "import gc, sys\nfrom heedful.cli.main import main\ntry: main()\nfinally:\n"
        f" print([n for n in {HEAVY} if sys.modules.get(n)], gc.get_freeze_count() > 0, file=sys.stderr)"
    )
    command = [sys.executable, "-W", "error", "-c", script, "translate", model, "--max-new-tokens", "2"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        running.stdin.write(f"{SENTENCES[0]}\n" + "\n" * 70_000)  # more than a pipe holds
        running.stdin.close()
        assert running.stdout.readline().strip()
        running.stdout.close()
        assert (running.stderr.read(), running.wait(60)) == ("[] True\n", 0)


# What a translation does not need, and what would take a second of it.
HEAVY = [
    *("torchao", "torchvision", "datasets", "evaluate", "pandas", "pyarrow", "sklearn", "scipy", "peft"),
    *("sacrebleu", "tensorboard", "matplotlib", "transformers.pipelines", "transformers.trainer"),
    *("heedful.pipeline_heed", "heedful.training.run", "heedful.training.trainer", "ctranslate2", "onnx"),
]


def test_a_sentence_may_begin_with_a_dash(model, heedful):
    code, output, _ = heedful("translate", model, "--", f"-{SENTENCES[0]}")
    assert (code, len(output.splitlines())) == (0, 1)
    code, output, errors = heedful("translate", model, f"-{SENTENCES[0]}")
    assert (code, output) == (2, "")
    assert "comes last, after --" in errors


def test_who_gives_a_files_name_as_a_text_is_told_how_its_lines_are_read(model, heedful, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text(SENTENCES[0])
    with pytest.warns(UserWarning, match=r"in\.txt is taken as a text.*`--input in\.txt`") as told:
        code, output, _ = heedful("translate", model, "in.txt", SENTENCES[0])
    assert (code, len(output.splitlines()), len(told)) == (0, 2, 1)


def test_no_command_writes_over_what_it_reads(refused, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"source": "a", "target": "b"}\n')
    for arguments in (
        ["translate", "none", "--input", path, "-o", path],
        ["evaluate", "none", "--data", path, "--predictions", path],
        ["score", "none", path, "-o", path],
        ["distill", "none", "--data", path, "-o", path],
    ):
        assert f"must be another file than those that are read, but {path} is one of them" in refused(*arguments)


def test_the_n_best_come_with_their_scores_best_first(model, heedful):
    arguments = ["translate", model, "--num-beams", 4, "--n-best", 3, "--scores"]
    code, output, _ = heedful(*arguments, *SENTENCES[:2])
    rows = [line.split("\t") for line in output.splitlines()]
    assert (code, len(rows)) == (0, 6)
    scores = [float(score) for score, _ in rows]
    assert scores[:3] == sorted(scores[:3], reverse=True)
    assert scores[3:] == sorted(scores[3:], reverse=True)
    assert max(scores) < 0
    assert len({text for _, text in rows[:3]}) == 3


def test_evaluation_as_json_is_what_training_measured(model, heedful, tmp_path):
    data = ["--data", "builtin:test:20", "--source", "ko", "--target", "en"]
    code, output, _ = heedful(
        "evaluate", model, *data, "--bootstrap", 0, "--json", "--predictions", tmp_path / "out.txt"
    )
    scores = json.loads(output)
    measured = json.loads((model / "metrics.json").read_text())["unseen"]
    assert code == 0
    assert scores == measured
    assert len((tmp_path / "out.txt").read_text(encoding="utf-8").splitlines()) == 20


def test_an_evaluation_shows_how_many_sentences_are_done(model, heedful, monkeypatch, tmp_path):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    sentences = tmp_path / "sentences.txt"
    sentences.write_text("".join(f"{sentence}\n" for sentence in SENTENCES[:3]))
    data = ["--data", "builtin:test:3", "--source", "ko", "--target", "en", "--bootstrap", "0"]
    for words in (["evaluate", model, *data], ["translate", model, "--input", sentences, "-o", tmp_path / "out.txt"]):
        code, _, errors = heedful(*words, "--token-budget", "1")
        assert code == 0
        assert "0/3 [" in errors


def test_an_evaluation_in_the_other_direction_than_the_trainings_is_warned_of(model, heedful):
    settings = ["--data", "builtin:test:2", "--bootstrap", "0", "--max-new-tokens", "2"]
    told = f"`--source` and `--target` should be ko and en, as {model} was trained, but are en and ko instead."
    with pytest.warns(UserWarning, match=re.escape(told)):
        heedful("evaluate", model, *settings, "--source", "en", "--target", "ko")
    with pytest.warns(UserWarning, match="cut off") as record:
        heedful("evaluate", model, *settings, "--source", "ko", "--target", "en")
    assert not any("should be" in str(each.message) for each in record)


def test_evaluation_for_people_has_every_score_with_its_interval(model, heedful, tmp_path):
    for name, key in (("a.ko", "ko"), ("a.en", "en")):
        lines = [pair[key] + "\n" for pair in korean_english_pairs("test", 6)]
        (tmp_path / name).write_text("".join(lines), encoding="utf-8")
    data = ["--data", tmp_path / "a.ko", "--data", tmp_path / "a.en"]
    code, output, _ = heedful("evaluate", model, *data, "--bootstrap", 40)
    lines = output.splitlines()
    assert code == 0
    assert lines[0] == "6 pairs"
    assert [line.split()[0] for line in lines[1:]] == ["BLEU", "chrF", "TER", "exact", "token", "character"]
    assert all("(95 %:" in line for line in lines[1:])
    assert "tok:13a" in lines[1]


def test_help_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['heedful', '--help']\n"
        "from heedful.cli.main import main\ntry: main()\nexcept SystemExit as e:\n"
        " assert not e.code\nprint([n for n in ('torch', 'transformers', 'numpy', 'datasets') if n in sys.modules])"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert finished.stdout.splitlines()[-1] == "[]"
    for command in ("train", "evaluate", "translate", "attention"):
        assert command in finished.stdout


def test_the_versions_are_told(heedful):
    code, output, _ = heedful("version")
    assert code == 0
    assert [line.split()[0] for line in output.splitlines()][:3] == ["heedful", "transformers", "torch"]
    assert heedful("--version") == (0, output, "")


def test_a_warning_is_shown_without_the_line_of_code_that_warned(capsys):
    cli.run(lambda: sys.stderr.write(warnings.formatwarning("too long", UserWarning, "file.py", 3)))
    assert capsys.readouterr().err == "warning: too long\n"


def test_a_shell_completes_commands(heedful, monkeypatch):
    for name, value in {"_HEEDFUL_COMPLETE": "complete_bash", "COMP_WORDS": "heedful tr", "COMP_CWORD": "1"}.items():
        monkeypatch.setenv(name, value)
    assert heedful()[1].split() == ["train", "translate"]


def test_no_help_has_a_picture_in_place_of_a_word(heedful):
    for command in ([], *([name] for name in cli.PLACES), ["pairs", "scan"], ["export", "onnx"]):
        code, output, _ = heedful(*command, "--help")
        assert code == 0, command
        assert not [letter for letter in output if ord(letter) > 0x1F000], command


def test_help_shows_every_command_in_its_panel_but_hidden_ones(heedful):
    panels = re.split("╭─ (.*?) ─+╮", heedful("--help")[1])
    shown = {
        title: re.findall("^│ ([a-z][a-z-]*)  ", rows, re.M)
        for title, rows in zip(panels[1::2], panels[2::2], strict=True)
    }
    assert {title: rows for title, rows in shown.items() if title != "Options"} == {
        title: [*names] for title, names in cli.PANELS.items() if title
    }


def fail_with(error, *_):
    raise error


def test_a_module_that_is_missing_is_told_with_its_command(monkeypatch, refused, tmp_path):
    error = ModuleNotFoundError("No module named 'yaml'", name="yaml.safe")
    monkeypatch.setattr("heedful.training.recipe_file.read_recipe", partial(fail_with, error))
    assert refused("train", tmp_path).endswith("No module named 'yaml': pip install pyyaml")


def test_a_missing_recipe_is_named(refused, tmp_path):
    line = refused("train", tmp_path / "nowhere.yaml")
    assert line.startswith(f"heedful: The recipe {tmp_path / 'nowhere.yaml'} does not exist: `heedful recipes` lists")


def table(path, rows, header="ko\ten"):
    path.write_text("".join(line + "\n" for line in [header, *rows]), encoding="utf-8")
    return str(path)


def test_an_unknown_key_is_refused(refused, tmp_path):
    message = refused("train", write_recipe(tmp_path, {"optimization.max_update": 5}))
    assert message == (
        "heedful: `optimization.max_update` is not a key of a recipe; did you mean `optimization.max_updates`?"
    )
    assert "did you mean `seed`" in refused("train", write_recipe(tmp_path), "sed=5")


def test_data_and_sizes_that_cannot_be_trained_on_are_named(refused, tmp_path):
    train = table(tmp_path / "a.tsv", ["하나\tone"])
    rows = [{"translation": {"ko": "하나", "en": "one"}}, {"translation": {"ko": "둘", "en": None}}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, count in (("a.ko", 3), ("a.en", 2)):
        (tmp_path / name).write_text("x\n" * count)
    here, same = {"data.folder": str(tmp_path)}, {"data.train": train, "data.validation": train}
    for changes, *messages in (
        (here | {"data.train": "none.tsv"}, str(tmp_path / "none.tsv")),
        (same | {"data.target": "de"}, "'de'", "a.tsv"),
        ({"data.train": str(tmp_path / "a.jsonl")}, "'en' must be text in every row, but is None in row 2"),
        (here | {"data.train": ["a.ko", "a.en"]}, "the same number of lines, but have 3 and 2"),
        (same, "must leave at least one pair", "overlap"),
        ({"model.options.encoder_attention_heads": 5}, "`d_model` must be divisible by `encoder_attention_heads`"),
        ({"model.options.dropout": "much"}, "dropout"),
    ):
        found = refused("train", write_recipe(tmp_path, changes))
        assert all(message in found for message in messages), found


def test_an_output_folder_that_is_not_empty_is_refused(refused, trained, tmp_path):
    message = refused("train", write_recipe(tmp_path), f"output={trained[1]}")
    assert "resume=true" in message
    assert "overwrite=true" in message
    (tmp_path / "run").write_text("")
    assert "`output` must be a folder" in refused("train", write_recipe(tmp_path))


def test_a_gpu_that_is_not_there_is_refused(refused, tmp_path, model, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "`optimization.device`" in refused("train", write_recipe(tmp_path), "optimization.device=cuda")
    assert "`--device` must be one that this machine has" in refused("translate", model, "x", "--device", "cuda")


def test_a_model_folder_that_is_missing_is_named(refused, tmp_path):
    evaluate = ["--data", "builtin:test:2", "--source", "ko", "--target", "en"]
    for command, *rest in (["translate", "x"], ["evaluate", *evaluate], ["attention", "x", "-o", "map.png"]):
        assert "nowhere must be a folder with a model" in refused(command, tmp_path / "nowhere", *rest)


@pytest.fixture
def copy(model, tmp_path):
    return shutil.copytree(model, tmp_path / "copy")


def test_half_a_model_folder_is_refused(refused, copy):
    weights = (copy / "model.safetensors").read_bytes()
    for length in (0, 5, 1000):
        (copy / "model.safetensors").write_bytes(weights[:length])
        assert "copy cannot be loaded" in refused("translate", copy, "x")
    for missing, message in (
        ("model.safetensors", "must hold the weights of a model"),
        ("config.json", "has no config.json"),
        ("tokenizer_config.json", "has no tokenizer_config.json"),
        ("tokenizer.json", "tokenizer"),
    ):
        shutil.move(copy / missing, copy.parent)
        assert message in refused("translate", copy, "x"), missing
        shutil.move(copy.parent / missing, copy)
        (copy / "model.safetensors").write_bytes(weights)


def test_options_that_a_model_cannot_follow_are_refused(refused, model):
    assert "`--to`" in refused("translate", model, "x", "--to", "xx")
    message = refused("translate", model, "x", "--n-best", 3, "--num-beams", 2)
    assert "`--n-best` must be at most `--num-beams` (2), but is 3" in message


def test_every_kind_of_end_has_its_exit_code(monkeypatch, heedful, tmp_path):
    for error, code in (
        (FloatingPointError("diverged"), 1),
        (ProcessLostError("a process has ended"), 1),
        (MemoryError("too large"), 1),
        (KeyboardInterrupt(), 130),
        (TrainingInterrupted("stopped"), 130),
        (ImportError("pip install"), 2),
        (StrictDataclassFieldValidationError("dropout", TypeError("no number")), 2),
        (FileNotFoundError("nowhere"), 2),
    ):
        monkeypatch.setattr("heedful.training.recipe_file.read_recipe", partial(fail_with, error))
        ended, _, errors = heedful("train", tmp_path / "recipe.yaml")
        assert ended == code, error
        assert "Traceback" not in errors
        assert str(error) in errors


def test_an_interrupted_training_ends_with_130_and_tells_how_to_go_on(monkeypatch, heedful, tmp_path):
    from heedful.training.loop.engine import TrainingEngine

    step = TrainingEngine.step

    def step_and_be_told(engine, rate, norm, number):
        step(engine, rate, norm, number)
        if number == 2:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(TrainingEngine, "step", step_and_be_told)
    code, output, errors = heedful("train", write_recipe(tmp_path))
    assert (code, output) == (130, "")
    assert "heedful: stopped after update 2; continue with resume=true" in errors


def test_a_bug_keeps_its_traceback(monkeypatch, tmp_path):
    monkeypatch.setattr("heedful.training.recipe_file.read_recipe", partial(fail_with, KeyError("ours")))
    monkeypatch.setattr(sys, "argv", ["heedful", "train", str(tmp_path)])
    with pytest.raises(KeyError, match="ours"):
        cli.main()
