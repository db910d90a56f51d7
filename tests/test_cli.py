"""The `heedful` command: one model is trained through the real entry point, and everything else uses it."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from heedful.cli import main as cli
from heedful.data.korean_english.pairs import korean_english_pairs
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
    "optimization.warmup_updates": 30,
    "optimization.max_updates": 1,  # until the command line says more
    "optimization.tokens_per_update": 3000,
    "validation.every_updates": 20,
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished `heedful train`, with the process's answer and the folder of the run."""
    folder = tmp_path_factory.mktemp("trained")
    finished = process("train", write_recipe(folder, LEARNING), "optimization.max_updates=260", "seed=3")
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished, folder / "run"


@pytest.fixture(scope="module")
def model(trained):
    return trained[1] / "model"


@pytest.fixture
def heedful(monkeypatch, capsys):
    """Run the command in this process; return its exit code, output and errors."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()

    def run(*arguments, stdin=None):
        monkeypatch.setattr(sys, "argv", ["heedful", *map(str, arguments)])
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        output = capsys.readouterr()
        return ended.value.code or 0, output.out, output.err

    yield run
    logging.set_verbosity(verbosity)
    if bars:
        logging.enable_progress_bar()


@pytest.fixture
def refused(heedful):
    """Run the command, which must be a user's mistake: exit code 2, one message, no traceback."""

    def run(*arguments):
        code, output, errors = heedful(*arguments)
        assert (code, output) == (2, "")
        assert "Traceback" not in errors
        messages = [line for line in errors.splitlines() if line.startswith("heedful: ")]
        assert len(messages) == 1
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
    assert [line.split(":")[0] for line in lines] == ["validation", "unseen", lines[2], "model", "card"]
    assert lines[2].startswith("260 updates")
    assert str(run / "model") in lines[3]
    assert Path(lines[4].removeprefix("card: ")) == run / "model" / "README.md"
    assert "3000 training pairs" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_the_overrides_are_in_the_published_recipe(trained):
    written = yaml.safe_load((trained[1] / "model" / "recipe.yaml").read_text())
    assert (written["optimization"]["max_updates"], written["seed"]) == (260, 3)


def test_the_published_folder_is_complete(model):
    assert {path.name for path in model.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        *("recipe.yaml", "metrics.json", "README.md"),
        *CODE,
    }
    assert "tiny" in (model / "README.md").read_text(encoding="utf-8")


SENTENCES = [pair["ko"] for pair in korean_english_pairs("test", 5)]


def test_translations_keep_the_order_from_arguments_and_from_a_pipe(model, heedful):
    code, output, _ = heedful("translate", model, *SENTENCES)
    assert code == 0
    alone = [heedful("translate", model, sentence)[1].strip() for sentence in SENTENCES]
    assert output.splitlines() == alone
    assert len(set(alone)) > 2
    piped = process("translate", model, input="\n".join([*SENTENCES, ""]))
    assert piped.returncode == 0
    assert piped.stdout.splitlines() == alone
    assert heedful("translate", model, stdin="\n".join(SENTENCES))[1].splitlines() == alone


def test_an_empty_line_stays_one(model, heedful):
    code, output, _ = heedful("translate", model, stdin=f"\n{SENTENCES[0]}\n\n")
    lines = output.split("\n")
    assert (code, len(lines)) == (0, 4)
    assert [bool(line) for line in lines] == [False, True, False, False]


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


def test_evaluation_for_people_has_every_score_with_its_interval(model, heedful, tmp_path):
    for name, key in (("a.ko", "ko"), ("a.en", "en")):
        lines = [pair[key] + "\n" for pair in korean_english_pairs("test", 6)]
        (tmp_path / name).write_text("".join(lines), encoding="utf-8")
    data = ["--data", tmp_path / "a.ko", "--data", tmp_path / "a.en"]
    code, output, _ = heedful("evaluate", model, *data, "--bootstrap", 40)
    lines = output.splitlines()
    assert code == 0
    assert lines[0] == "6 pairs"
    assert [line.split()[0] for line in lines[1:]] == ["BLEU", "chrF", "TER", "exact"]
    assert all("(95 %:" in line for line in lines[1:])
    assert "tok:13a" in lines[1]


@pytest.mark.parametrize("kind", ["cross", "encoder"])
def test_attention_is_drawn(model, heedful, tmp_path, kind):
    path = tmp_path / "map.png"
    code, output, _ = heedful("attention", model, SENTENCES[0], "-o", path, "--kind", kind)
    assert code == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 2000
    assert str(path) in output


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


def test_a_missing_recipe_through_the_real_process(tmp_path):
    finished = process("train", tmp_path / "nowhere.yaml")
    assert (finished.returncode, finished.stdout) == (2, "")
    # Other libraries may have said something while they were imported.
    assert finished.stderr.splitlines()[-1].startswith(
        f"heedful: The recipe {tmp_path / 'nowhere.yaml'} does not exist: `heedful recipes` lists"
    )
    assert "Traceback" not in finished.stderr


def table(path, rows, header="ko\ten"):
    path.write_text("".join(line + "\n" for line in [header, *rows]), encoding="utf-8")
    return str(path)


def test_an_unknown_key_is_refused(refused, tmp_path):
    message = refused("train", write_recipe(tmp_path, {"optimization.max_update": 5}))
    assert message == (
        "heedful: `optimization.max_update` is not a key of a recipe; did you mean `optimization.max_updates`?"
    )


def test_an_unknown_override_is_refused(refused, tmp_path):
    assert "did you mean `seed`" in refused("train", write_recipe(tmp_path), "sed=5")


def test_a_missing_data_file_is_named(refused, tmp_path):
    message = refused("train", write_recipe(tmp_path, {"data.folder": str(tmp_path), "data.train": "none.tsv"}))
    assert str(tmp_path / "none.tsv") in message


def test_a_missing_column_is_named(refused, tmp_path):
    train = table(tmp_path / "a.tsv", ["하나\tone"])
    message = refused(
        "train", write_recipe(tmp_path, {"data.train": train, "data.validation": train, "data.target": "de"})
    )
    assert "'de'" in message
    assert "a.tsv" in message


def test_a_language_that_is_not_in_every_row_is_named(refused, tmp_path):
    rows = [{"translation": {"ko": "하나", "en": "one"}}, {"translation": {"ko": "둘", "en": None}}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    message = refused("train", write_recipe(tmp_path, {"data.train": str(path)}))
    assert "`en` must be text in every row, but is None in row 2" in message


def test_unequal_text_files_are_refused(refused, tmp_path):
    for name, count in (("a.ko", 3), ("a.en", 2)):
        (tmp_path / name).write_text("x\n" * count)
    message = refused("train", write_recipe(tmp_path, {"data.train": ["a.ko", "a.en"], "data.folder": str(tmp_path)}))
    assert "the same number of lines, but have 3 and 2" in message


def test_nothing_left_after_cleaning_is_refused(refused, tmp_path):
    train = table(tmp_path / "a.tsv", ["하나\tone"])
    message = refused("train", write_recipe(tmp_path, {"data.train": train, "data.validation": train}))
    assert "must leave at least one pair" in message
    assert "overlap" in message


def test_sizes_that_do_not_divide_are_refused(refused, tmp_path):
    message = refused("train", write_recipe(tmp_path, {"model.options.encoder_attention_heads": 5}))
    assert "`d_model` must be divisible by `encoder_attention_heads`" in message


def test_an_option_of_another_type_is_refused(refused, tmp_path):
    assert "dropout" in refused("train", write_recipe(tmp_path, {"model.options.dropout": "much"}))


def test_an_output_folder_that_is_not_empty_is_refused(refused, trained, tmp_path):
    message = refused("train", write_recipe(tmp_path), f"output={trained[1]}")
    assert "resume=true" in message
    assert "overwrite=true" in message


def test_a_gpu_that_is_not_there_is_refused(refused, tmp_path, model, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "`optimization.device`" in refused("train", write_recipe(tmp_path), "optimization.device=cuda")
    assert "`device` must be one that this machine has" in refused("translate", model, "x", "--device", "cuda")


def test_an_output_folder_that_is_a_file_is_refused(refused, tmp_path):
    (tmp_path / "run").write_text("")
    assert "`output` must be a folder" in refused("train", write_recipe(tmp_path))


@pytest.mark.parametrize(
    "arguments",
    [("translate", "x"), ("evaluate", "--data", "builtin:test:2"), ("attention", "x", "-o", "map.png")],
    ids=lambda arguments: arguments[0],
)
def test_a_model_folder_that_is_missing_is_named(refused, tmp_path, arguments):
    command, *rest = arguments
    languages = ["--source", "ko", "--target", "en"] if command == "evaluate" else []
    assert "nowhere must be a folder with a model" in refused(command, tmp_path / "nowhere", *rest, *languages)


@pytest.fixture
def copy(model, tmp_path):
    return shutil.copytree(model, tmp_path / "copy")


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "must hold the weights of a model"),
        ("tokenizer_config.json", "has no tokenizer_config.json"),
        ("tokenizer.json", "tokenizer"),
    ],
)
def test_half_a_model_folder_is_refused(refused, copy, missing, message):
    (copy / missing).unlink()
    assert message in refused("translate", copy, "x")


@pytest.mark.parametrize("length", [0, 5, 1000])
def test_truncated_weights_are_refused(refused, copy, length):
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(content[:length])
    assert "copy cannot be loaded" in refused("translate", copy, "x")


def test_an_unknown_language_is_refused(refused, model):
    assert "`target_language`" in refused("translate", model, "x", "--to", "xx")


def test_more_translations_than_beams_are_refused(refused, model):
    message = refused("translate", model, "x", "--n-best", 3, "--num-beams", 2)
    assert "`num_return_sequences` must be at most `num_beams` (2), but is 3" in message


def test_a_layer_that_does_not_exist_is_refused(refused, model, tmp_path):
    assert "`layer`" in refused("attention", model, "x", "-o", tmp_path / "a.png", "--layer", 7)


def test_a_picture_of_an_unknown_kind_is_refused(refused, model, tmp_path):
    assert ".xyz" in refused("attention", model, SENTENCES[0], "-o", tmp_path / "a.xyz")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FloatingPointError("diverged"), 1),
        (KeyboardInterrupt(), 130),
        (ImportError("pip install"), 2),
    ],
)
def test_every_kind_of_end_has_its_exit_code(monkeypatch, heedful, tmp_path, error, code):
    def fail(*_):
        raise error

    monkeypatch.setattr("heedful.training.recipe_file.read_recipe", fail)
    ended, _, errors = heedful("train", tmp_path / "recipe.yaml")
    assert ended == code
    assert "Traceback" not in errors
    assert str(error) in errors


def test_an_interrupted_training_ends_with_130_and_tells_how_to_go_on(monkeypatch, heedful, tmp_path):
    from heedful.training.loop.loop import TrainingLoop

    step = TrainingLoop._step

    def step_and_be_told(loop):
        step(loop)
        if loop.progress.update == 1:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(TrainingLoop, "_step", step_and_be_told)
    code, output, errors = heedful("train", write_recipe(tmp_path))
    assert (code, output) == (130, "")
    assert "heedful: stopped after update 2; continue with resume=true" in errors


def test_a_bug_keeps_its_traceback(monkeypatch, tmp_path):
    def fail(*_):
        raise KeyError("ours")

    monkeypatch.setattr("heedful.training.recipe_file.read_recipe", fail)
    monkeypatch.setattr(sys, "argv", ["heedful", "train", str(tmp_path)])
    with pytest.raises(KeyError, match="ours"):
        cli.main()
