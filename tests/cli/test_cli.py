"""The `heedful` command: one model is trained through the real entry point, and everything else uses it."""

import json
import re
import subprocess
import sys
from functools import partial
from importlib.metadata import entry_points
from itertools import chain
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import yaml
from huggingface_hub.errors import StrictDataclassFieldValidationError

from heedful.cli import main as cli
from heedful.training.processes.heartbeat import ProcessLostError
from heedful.training.processes.signals import TrainingInterrupted
from heedful.training.run_folder.folder import foreign_files
from heedful_lab.korean_english.pairs import korean_english_pairs
from helpers import assert_error, run_python
from tiny_runs import logged, recipe_file

SIZES = {"d_model": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
SIZES |= {"encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "encoder_layers": 1, "decoder_layers": 1}
LEARNING = {
    "data.train": "builtin:train:3000",
    "data.validation": "builtin:validation:100",
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished `heedful train`, with the process's answer and the folder of the run."""
    folder = tmp_path_factory.mktemp("trained")
    settings = ["optimization.max_updates=210", "seed=3", "publish.also=[transformers]"]
    return run_python("-m", "heedful", "train", recipe_file(folder, LEARNING), *settings), folder / "run"


@pytest.fixture(scope="module")
def model(trained):
    return trained[1] / "model"


def test_training_learns_and_tells_what_it_made_and_writes_no_line_that_is_not_ours(trained):
    pytest.importorskip("matplotlib")
    finished, run = trained
    losses, training = logged(run, "validation/loss"), logged(run, "train/loss")
    assert training[0] > 5
    assert losses[-1] < 0.45 * training[0]
    assert losses[-1] < 0.5 * max(losses[0], 5)
    metrics = json.loads((run / "model" / "metrics.json").read_text())
    assert metrics["unseen"]["chrf"] > 18
    assert metrics["validation"]["loss"] < 2.5
    lines = finished.stdout.splitlines()
    told = ["validation", "unseen", lines[2], "model", "card", "learning curve", "as a class of transformers' own"]
    assert [line.split(":")[0] for line in lines] == told
    assert lines[2].startswith("210 updates")
    assert lines[3:5] == [f"model: {run / 'model'}", f"card: {run / 'model' / 'README.md'}"]
    # Its data, its bar, its validations, its warnings, its weights.
    ours = ["training the tokenizer", "`vocab_size` is ", "3000 training pairs", "kept ", r".*% *\|", r"update \d+ \("]
    ours = "|".join([*ours, "warning: ", "publishing "])
    lines = finished.stderr.replace("\r", "\n").splitlines()
    assert any(line.startswith("3000 training pairs") for line in lines)
    assert [line for line in lines if line.strip() and not re.match(ours, line)] == []


def test_the_published_folder_is_the_runs_own_with_all_forms(trained, model, heedful_command, tmp_path):
    pytest.importorskip("matplotlib")
    assert foreign_files(model) == []  # so that a run that goes on replaces the picture too
    assert (model / "learning_curve.png").is_file()
    assert "tiny" in (model / "README.md").read_text(encoding="utf-8")
    written = yaml.safe_load((model / "recipe.yaml").read_text())
    assert (written["optimization"]["max_updates"], written["seed"]) == (210, 3)  # as the command line said
    picture = tmp_path / "curve.svg"
    assert heedful_command("plot", trained[1], "-o", picture) == (0, f"{picture}\n", "")
    assert "validation/loss" in picture.read_text(encoding="utf-8")
    stock = trained[1] / "transformers"
    assert json.loads((stock / "config.json").read_text())["architectures"] == ["MarianMTModel"]
    assert "# tiny\n" in (stock / "README.md").read_text(encoding="utf-8")
    assert f"as a class of transformers' own: {stock}" in trained[0].stdout


SENTENCES = [pair["ko"] for pair in korean_english_pairs("test", 5)]
KO_EN = ["--source", "ko", "--target", "en"]


def test_translations_keep_the_order_from_arguments_a_pipe_and_a_file_with_its_line_ends(model, printed, tmp_path):
    alone = [printed("translate", model, sentence).strip() for sentence in SENTENCES]
    assert len(set(alone)) > 2
    assert printed("translate", model, *SENTENCES).splitlines() == alone
    assert printed("translate", model, stdin="\n".join(SENTENCES)).splitlines() == alone
    output = printed("translate", model, stdin=f"\n{SENTENCES[0]}\n\n")
    assert output.split("\n") == ["", alone[0], "", ""]  # an empty line stays one
    text = f"- {SENTENCES[0]}  {SENTENCES[1]}\r\n\n---\n{SENTENCES[0]}"
    (tmp_path / "page.md").write_bytes(text.encode())
    printed("translate", model, "--input", tmp_path / "page.md", "--paragraphs", "-o", tmp_path / "out.md")
    expected = f"- {alone[0]}  {alone[1]}\r\n\n---\n{alone[0]}"
    assert (tmp_path / "out.md").read_bytes().decode() == expected


def test_what_is_wrong_with_a_file_is_told_with_its_line_and_the_rest_translated(model, heedful_command, tmp_path):
    alone = heedful_command("translate", model, *SENTENCES)[1].splitlines()
    first, broken, _, *rest = (sentence.encode() for sentence in SENTENCES)
    text = b"\n".join([b"\xef\xbb\xbf" + first, broken[:3] + b"\xff" + broken[3:], b"x" * 10_000, *rest, b""])
    (tmp_path / "in.txt").write_bytes(text)
    with pytest.warns(UserWarning, match="too long") as told:
        found = heedful_command("translate", model, "--input", tmp_path / "in.txt", "--output", tmp_path / "out.txt")
    assert found[:2] == (0, "")
    found = (tmp_path / "out.txt").read_text(encoding="utf-8").splitlines()
    assert found == [*alone[:2], "", *alone[3:]]
    byte, length = (str(warning.message) for warning in told)
    assert byte == "Line 2 must be UTF-8, but has byte 0xff at position 3: the byte is left out."
    assert length.startswith("Sentence 3 with 10001 tokens is too long to be translated")
    with pytest.warns(UserWarning, match="UTF-8"):
        assert heedful_command("translate", model, stdin=text)[1].splitlines() == found


def test_many_bad_lines_are_counted_and_another_encoding_is_named(model, printed, refused):
    with pytest.warns(UserWarning, match="UTF-8") as told:
        printed("translate", model, stdin=b"\xff\n" * 9)
    assert len(told) == 4
    assert "6 more lines are not UTF-8" in str(told[3].message)
    for text, encoding, line in ((SENTENCES[0], "UTF-16", 1), ("네.\n질문 하나\n", "CP949", 2)):
        like = f"it looks like {encoding}; `iconv -f {encoding} -t UTF-8"
        message = f"Standard input must be UTF-8, but line {line} is not: {like}"
        assert message in refused("translate", model, stdin=text.encode(encoding))


def test_the_published_model_knows_its_longest_source_and_warns_of_longer_ones(model, printed):
    settings = json.loads((model / "generation_config.json").read_text())
    longest, (shortest_ratio, usual, _) = settings["longest_trained_source"], settings["usual_length_ratios"]
    assert 10 < longest < 100
    assert 0.1 < 3 * shortest_ratio <= usual + 1e-3 < 9
    text, alone = " ".join(SENTENCES * 3), printed("translate", model, *SENTENCES).splitlines()
    with pytest.warns(UserWarning, match=f"longer than the {longest} tokens"):
        printed("translate", model, text)
    assert printed("translate", model, text, "--split").strip() == " ".join(alone * 3)


def test_confidence_is_the_folders_and_its_reliability_in_the_card(model, printed, refused, monkeypatch):
    found, translate = json.loads((model / "confidence.json").read_text()), partial(printed, "translate", model)
    assert (found["measure"], found["num_beams"]) == ("chrf", 1)
    assert sum(count for *_, count in found["reliability"]) == 100
    for said, was, count in found["reliability"]:
        assert f"| {said:.1f} | {was:.1f} | {count} |" in (model / "README.md").read_text()
    scored = [line.split("\t") for line in translate(*SENTENCES, "--scores").splitlines()]
    likely = [line.split("\t") for line in translate(*SENTENCES, "--confidence").splitlines()]
    lines = translate(*SENTENCES, "--json", "--confidence").splitlines()
    for (score, text), (confidence, same), line in zip(scored, likely, lines, strict=True):
        rated = None if confidence == "not calibrated" else float(confidence)  # it was cut off
        if rated is not None:
            assert rated == pytest.approx(np.interp(float(score), found["scores"], found["values"]), abs=0.2)
        values = {"score": pytest.approx(float(score), abs=1e-4), "confidence": rated}
        assert json.loads(line) == {"text": text, **values}
        assert text == same
    assert sum(confidence != "not calibrated" for confidence, _ in likely) >= 2
    for arguments in (["https://example.com/page?id=12:30"], [SENTENCES[0], "--max-new-tokens", 1]):
        assert translate(*arguments, "--confidence").startswith("not calibrated\t")
    assert json.loads(translate("", "--json", "--confidence"))["confidence"] is None  # there is nothing to be sure of
    assert translate("", "--confidence") == "\t\n"
    monkeypatch.setattr("heedful.cli.options.writes_unicode", lambda: False)
    line = translate("<b 😀>", "--paragraphs", "--json")
    assert (line.isascii(), json.loads(line)["text"]) == (True, "<b 😀>")
    for options, message in (
        (["--confidence", "--num-beams", 2], "`--num-beams` must be 1 with"),
        (["--confidence", "--n-best", 2], "`--confidence` must not come with --n-best"),
        (["--scores", "--json"], "`--json` must not come with --scores"),
        (["--n-best=9", "--num-beams=2"], "`--n-best` must be at most `--num-beams` (2), but is 9"),
        (["--device", "cuda"], "`--device` must be one that this machine has"),
        (["--to", "xx"], "`--to`"),
    ):
        assert message in refused("translate", model, "네.", *options)


def test_what_a_command_could_not_end_with_is_told_before_the_model_is_loaded(refused, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "in.txt").write_text("x")
    (tmp_path / "pairs.tsv").write_text("ko\ten\n" + "".join(f"네, {n}.\tYes, {n}.\n" for n in range(20)))
    missing, pairs = tmp_path / "no" / "out.txt", tmp_path / "pairs.tsv"
    data = ["--data", "builtin:test:20", *KO_EN]
    sentences = ["none", tmp_path / "out", "--sentences", tmp_path / "none.txt"]
    no_model = "nowhere must be a folder with a model"
    both = f"must not be an input file, but {pairs} is one"
    for arguments, message in (
        (["evaluate", "none", *data, "--predictions", missing], "`--predictions` must lie in an existing folder"),
        (["evaluate", "none", *data, "--tokenize", "nope"], "`--tokenize` must be one of"),
        (["evaluate", "none", *data, "--bootstrap", 3], "`--bootstrap` must be 0 or at least 40"),
        (["translate", "none", "x", "--output", missing], "`--output` must lie in an existing folder"),
        (["translate", "none", "x", "--output", tmp_path], "`--output` must be a file to write"),
        (["translate", "none", "--input", missing], "`--input` must be a text file"),
        (["translate", "none", "x", "--input", tmp_path / "in.txt"], "`--input` must be left out if TEXT is"),
        (["translate", "none", "a\udcff"], "must be UTF-8, but 'a\\udcff' is not"),
        (["init", "--data", pairs, "--output", pairs], "`--output` must be a file that does not exist yet"),
        (["train", tmp_path], "The recipe must be a YAML file, but"),
        (["train", missing], f"heedful: The recipe {missing} does not exist: `heedful recipes` lists"),
        (["verify", "none", "--data", tmp_path], "`--data` must be a text file"),
        (["export", "onnx", *sentences], "`--sentences` must be a text file, but"),
        (["translate", "none", "--input", pairs, "-o", pairs], both),
        (["evaluate", "none", "--data", pairs, "--predictions", pairs], both),
        (["score", "none", pairs, "-o", pairs], both),
        (["distill", "none", "--data", pairs, "-o", pairs], both),
        (["translate", tmp_path / "nowhere", "x"], no_model),
        (["attention", tmp_path / "nowhere", "x", "-o", "map.png"], no_model),
        (["evaluate", "none", "--data", missing], "`--data` must be a file that exists"),
        (["evaluate", "none", *data, "--ignore", "("], "`--ignore` must be a regular expression, but is '('"),
        (["evaluate", "none", *data, "--ignore", "."], "`--ignore` must leave some text in the references"),
        (["evaluate", "none", *data, "--references", "a"], "`a` must be a list of texts, but is missing"),
        (["evaluate", "none", *data, "--confusions", -1], "`--confusions` must be at least 0"),
        (["score", "none", missing], "`PAIRS` must be a file that exists"),
        (["page", "none", "-o", tmp_path / "page.txt"], "`--output` must end in one of .html"),
        (["export", "onnx", "none", tmp_path], f"`OUT` must be a folder that does not exist yet, but {tmp_path} d"),
    ):
        assert message in refused(*arguments)


def test_a_reader_that_leaves_ends_the_command_quietly_which_imported_little_and_collected_none_of_it(model):
    script = (
        "import gc, sys\nfrom heedful.cli.main import main\ntry: main()\nfinally:\n"
        f" print([n for n in {HEAVY} if sys.modules.get(n)], gc.get_freeze_count() > 0, file=sys.stderr)"
    )
    command = [sys.executable, "-W", "error", "-c", script, "translate", model, "--max-new-tokens", "2"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as running:
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


def test_a_sentence_may_begin_with_a_dash_or_be_a_files_name(model, printed, heedful_command, tmp_path, monkeypatch):
    assert len(printed("translate", model, "--", f"-{SENTENCES[0]}").splitlines()) == 1
    code, output, errors = heedful_command("translate", model, f"-{SENTENCES[0]}")
    assert (code, output, "last, after --" in errors) == (2, "", True)
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text(SENTENCES[0])
    with pytest.warns(UserWarning, match=r"in\.txt is translated as a text.*`--input in\.txt`") as told:
        output = printed("translate", model, "in.txt", SENTENCES[0])
    assert (len(output.splitlines()), len(told)) == (2, 1)


def test_the_n_best_come_with_their_scores_best_first(model, printed):
    output = printed("translate", model, "--num-beams", 4, "--n-best", 3, "--scores", *SENTENCES[:2])
    rows = [line.split("\t") for line in output.splitlines()]
    scores = [float(score) for score, _ in rows]
    assert scores == [*sorted(scores[:3], reverse=True), *sorted(scores[3:], reverse=True)]
    assert max(scores) < 0
    assert (len(rows), len({text for _, text in rows[:3]})) == (6, 3)
    assert printed("translate", model, "--scores", " ") == "\t\n"  # a blank line has none
    assert json.loads(printed("translate", model, "--json", "")) == {"text": "", "score": None}


def test_evaluation_is_what_training_measured_and_people_see_intervals(model, printed, tmp_path):
    settings = ["--data", "builtin:test:20", *KO_EN, "--bootstrap", 0, "--json", "--predictions", tmp_path / "out.txt"]
    measured = json.loads((model / "metrics.json").read_text())
    assert json.loads(printed("evaluate", model, *settings)) == measured["unseen"]
    assert len((tmp_path / "out.txt").read_text(encoding="utf-8").splitlines()) == 20
    for key in ("ko", "en"):
        lines = [pair[key] + "\n" for pair in korean_english_pairs("test", 6)]
        (tmp_path / f"a.{key}").write_text("".join(lines), encoding="utf-8")
    data = ["--data", tmp_path / "a.ko", "--data", tmp_path / "a.en"]
    first, *lines = printed("evaluate", model, *data, "--bootstrap", 40).splitlines()
    assert first == "6 pairs"
    *lines, faults = lines
    assert [line.split()[0] for line in lines] == ["BLEU", "chrF", "chrF++", "TER", "exact", "token", "character"]
    assert faults.split()[0] == "faults"  # by chance, a model of a few updates repeats itself
    assert all("(95 %:" in line for line in lines)
    assert "tok:13a" in lines[0]


def test_an_evaluation_shows_its_progress_and_warns_of_its_direction(model, heedful_command, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    settings = ["--data", "builtin:test:3", "--bootstrap", "0", "--max-new-tokens", "2", "--token-budget", "1"]
    told = f"`--source` and `--target` should be ko and en, as {model} was trained, but are en and ko instead."
    with pytest.warns(UserWarning, match=re.escape(told)):
        heedful_command("evaluate", model, *settings, "--source", "en", "--target", "ko")
    with pytest.warns(UserWarning, match="cut off") as record:
        code, _, errors = heedful_command("evaluate", model, *settings, *KO_EN)
    assert (code, "0/3 [" in errors) == (0, True)
    assert not any("should be" in str(each.message) for each in record)


def test_help_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['heedful', '--help']\n"
        "from heedful.cli.main import main\ntry: main()\nexcept SystemExit as e:\n"
        " assert not e.code\nprint([n for n in ('torch', 'transformers', 'numpy', 'datasets') if n in sys.modules])"
    )
    output = run_python("-c", code).stdout
    assert output.splitlines()[-1] == "[]"
    for command in ("train", "evaluate", "translate", "attention"):
        assert command in output


def test_the_versions_are_told_and_a_shell_completes_commands(heedful_command, printed, monkeypatch):
    lines = printed("--version").splitlines()
    assert [line.split()[0] for line in lines][:3] == ["heedful", "transformers", "torch"]
    for name, value in {"_HEEDFUL_COMPLETE": "complete_bash", "COMP_WORDS": "heedful tr", "COMP_CWORD": "1"}.items():
        monkeypatch.setenv(name, value)
    assert heedful_command()[1].split() == ["train", "translate"]


def test_help_shows_every_command_in_its_panel_and_has_no_pictures(printed):
    plugins = sorted(entry_points(group="heedful.commands").names)
    expected = {title: [*names] for title, names in cli.PANELS.items()} | {cli.PLUGINS: plugins}
    more = [[], ["pairs", "scan"], ["export", "onnx"]]
    for command in [*more, *([name] for name in chain.from_iterable(expected.values()))]:
        assert not [letter for letter in printed(*command, "--help") if ord(letter) > 0x1F000], command
    panels = re.split("╭─ (.*?) ─+╮", printed("--help"))
    shown = zip(panels[1::2], panels[2::2], strict=True)
    found = {title: re.findall("^│ ([a-z][a-z-]*)  ", rows, re.M) for title, rows in shown if title != "Options"}
    assert found | {cli.PLUGINS: sorted(found[cli.PLUGINS])} == expected


def test_every_end_has_its_exit_code_but_a_bug_its_traceback(monkeypatch, heedful_command, refused, tmp_path):
    no_yaml = ModuleNotFoundError("No module named 'yaml'", name="yaml.safe")
    no_number = StrictDataclassFieldValidationError("dropout", TypeError("no number"))
    for error, code, message in (
        (FloatingPointError("diverged"), 1, "diverged"),
        (ProcessLostError("a process has ended"), 1, "a process has ended"),
        (MemoryError("too large"), 1, "too large"),
        (KeyboardInterrupt(), 130, ""),
        (TrainingInterrupted("stopped"), 130, "stopped"),
        (ImportError("pip install"), 2, "pip install"),
        (no_yaml, 2, "heedful: No module named 'yaml': pip install pyyaml\n"),
        (no_number, 2, str(no_number)),
        (FileNotFoundError("nowhere"), 2, "nowhere"),
    ):
        monkeypatch.setattr("heedful.training.recipe_file.read_recipe", Mock(side_effect=error))
        ended, _, errors = heedful_command("train", tmp_path / "recipe.yaml")
        assert (ended, "Traceback" in errors) == (code, False), error
        assert message in errors
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = refused("evaluate", "none", "--data", "builtin:test:2", *KO_EN, "--device", "cuda:1")
    assert "`--device` must be cpu or cuda if several processes run" in message
    monkeypatch.setattr("heedful.training.recipe_file.read_recipe", Mock(side_effect=KeyError("ours")))
    monkeypatch.setattr(sys, "argv", ["heedful", "train", str(tmp_path)])
    assert_error("ours", cli.main, error=KeyError)


def test_data_and_keys_that_cannot_be_trained_on_are_named(refused, tmp_path):
    (tmp_path / "a.tsv").write_text("ko\ten\n하나\tone\n", encoding="utf-8")
    train = str(tmp_path / "a.tsv")
    for changes, *messages in (
        ({"data.folder": str(tmp_path), "data.train": "none.tsv"}, str(tmp_path / "none.tsv")),
        ({"data.train": train, "data.validation": train}, "must leave at least one pair", "overlap"),
        ({"optimization.max_update": 5}, "heedful: `optimization.max_update` is not a key of a recipe; did you mean"),
    ):
        found = refused("train", recipe_file(tmp_path, changes))
        assert all(message in found for message in messages), found


@pytest.mark.multiprocess
def test_two_processes_share_a_test_set_and_tell_what_one_tells(model, tmp_path, printed):
    data = ["--data", "builtin:test:11", *KO_EN]  # which two processes cannot share evenly
    settings = [*data, "--max-new-tokens", "8", "--bootstrap", "40", "--json", "--predictions"]
    one = printed("evaluate", model, *settings, tmp_path / "one.txt")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    script = Path(__file__).parents[1] / "support" / "evaluate_run.py"
    finished = run_python(*launcher, script, tmp_path, "evaluate", model, *settings, tmp_path / "two.txt")
    # Each sentence was translated by one process.
    shares = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("sentences-*.json"))]
    assert [len(share) for share in shares] == [6, 5]
    assert sorted(chain(*shares)) == sorted(pair["ko"] for pair in korean_english_pairs("test", 11))
    assert json.loads(finished.stdout) == json.loads(one)  # it is there once, although two processes ran
    assert json.loads(one)["count"] == 11
    ours, theirs = ((tmp_path / f"{name}.txt").read_text(encoding="utf-8") for name in ("two", "one"))
    assert ours == theirs
    assert len(set(ours.splitlines())) > 5
