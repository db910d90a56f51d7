"""Exports of ONNX compute what the model does at any size, or leave nothing behind."""

import json
import re
import shutil
import sys
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from test_export_forms import OPTIONS
from transformers import MarianConfig, MarianMTModel

from guides import printing_of, text_of
from heedful import HeedForConditionalGeneration
from heedful.checksums_heed import CHECKSUMS_FILE
from heedful.data.sources import sample
from heedful.export.comparison import sentences_to_compare
from heedful.export.onnx import onnx_export as exporter
from heedful.export.onnx import onnx_graphs
from heedful.export.onnx.onnx_export import export_onnx
from heedful.export.onnx.onnx_graphs import check_exportable, write_onnx, write_part
from heedful.export.onnx.onnx_model import ONNX_FILES, OnnxModel
from heedful.training.recipe_file import to_yaml
from heedful.versions_heed import cache_of
from helpers import VARIANTS, assert_error, assert_near, assert_refused, padded, sentences, tiny_model
from memorised import PAIRS, SHOWN, saved_model
from tiny_runs import tiny_recipe

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

# One layer says as much of an option as two, and is traced twice as fast.
SHALLOW = {"encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 100}
NAMES = (*VARIANTS, "everything_at_once", "encoder_neighbourhood", "decoder_neighbourhood", "umt5")
EXPORTED = {name: {**SHALLOW, **OPTIONS[name]} for name in NAMES if name in OPTIONS}


@pytest.fixture(scope="module", params=EXPORTED)
def exported(request, tmp_path_factory):
    """A model with one option changed, and its ONNX files; what is traced has 2 rows of 5 and 3 tokens."""
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny_model(**EXPORTED[request.param])
    write_onnx(model, folder)
    return model, OnnxModel.from_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "side"), [((1,), "right"), ((5, 5), "left"), ((9, 1, 23, 6), "right"), ((3, 90, 41), "left")]
)
@torch.no_grad()
def test_logits_states_and_generated_tokens_are_the_same_at_any_size(exported, lengths, side):
    model, ours = exported
    ids, mask = padded(sentences(*lengths), side)
    source = {"input_ids": ids, "attention_mask": mask}
    for target_length in (1, 4, 80):
        target = torch.randint(14, 71, (len(lengths), target_length))
        assert_near(*(each(**source, decoder_input_ids=target).logits for each in (ours, model)), 1e-5)
    expected, found = (each.get_encoder()(**source)[0][mask.bool()] for each in (model, ours))
    assert_near(found, expected, 1e-5)
    ours.generation_config = model.generation_config
    settings = {"max_length": 40, "min_new_tokens": 3, "return_dict_in_generate": True, "output_logits": True}
    for search in ({"num_beams": 1, "decoder_input_ids": target[:, :3]}, {"num_beams": 3}):
        expected, found = (each.generate(**source, **settings, **search) for each in (model, ours))
        assert found.sequences.tolist() == expected.sequences.tolist()
        assert_near(torch.stack(found.logits), torch.stack(expected.logits), 1e-4)


class OfTheFirstInput(torch.nn.Sequential):
    def forward(self, *inputs):
        return super().forward(inputs[0])


@torch.no_grad()
def test_large_weights_lie_in_a_file_beside(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_graphs, "LARGEST_FILE", 1_000)
    network = OfTheFirstInput(torch.nn.Linear(32, 64)).eval()
    write_part(tmp_path / "network.onnx", network, {"states": (torch.randn(2, 3, 32), {0: "rows"})}, ["output"])
    weights = sum(parameter.nbytes for parameter in network.parameters() if parameter.dim() > 1)
    assert (tmp_path / "network.onnx_data").stat().st_size >= weights
    assert (tmp_path / "network.onnx").stat().st_size < weights
    other = torch.randn(4, 3, 32)
    (found,) = onnxruntime.InferenceSession(tmp_path / "network.onnx").run(None, {"states": other.numpy()})
    assert_near(torch.from_numpy(found), network(other), 1e-5)


# One real folder: a layer that knows some pairs by heart, saved in half precision; it is exported in float32.

KNOWN = PAIRS | SHOWN


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256}  # for int8
    folder = saved_model(tmp_path_factory.mktemp("saved") / "model", KNOWN, **sizes)
    HeedForConditionalGeneration.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def traced(saved, tmp_path_factory):
    """Trace the model; what is returned lets exports copy those files instead."""
    plain = tmp_path_factory.mktemp("plain")
    write_onnx(HeedForConditionalGeneration.from_pretrained(saved), plain)

    def write(model, target):
        torch.nn.Module.float(model).eval().set_attn_implementation("eager")
        shutil.copytree(plain, target, dirs_exist_ok=True)

    @contextmanager
    def copied():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exporter, "write_onnx", write)
            yield

    return copied


@pytest.fixture
def untraced(traced):
    with traced():
        yield


@pytest.fixture(scope="module")
def folder(saved, traced) -> Path:
    """The export that the tests look at, and must not change."""
    target = saved.parent / "onnx"
    with traced():
        result = export_onnx(saved, target, list(KNOWN))
    assert result.folder == target
    compared = {name: (each.sentences, each.differences) for name, each in result.comparisons.items()}
    assert compared == dict.fromkeys(("greedy", "4 beams"), (len(KNOWN), ()))
    assert 0 < result.difference < 1e-4
    assert result.size == sum((target / name).stat().st_size for name in ONNX_FILES)
    return target


def check_names(folder):
    """Check the inputs and outputs of the files of a model of one layer, as optimum names them."""
    cached = [f"0.{side}.{part}" for side in ("decoder", "encoder") for part in ("key", "value")]
    expected = {
        "encoder_model.onnx": (["input_ids", "attention_mask"], ["last_hidden_state"]),
        "decoder_model.onnx": (
            ["input_ids", "encoder_hidden_states", "encoder_attention_mask"],
            ["logits", *(f"present.{name}" for name in cached)],
        ),
        "decoder_with_past_model.onnx": (
            ["input_ids", "encoder_attention_mask", *(f"past_key_values.{name}" for name in cached)],
            ["logits", *(f"present.{name}" for name in cached[:2])],
        ),
    }
    for name, (inputs, outputs) in expected.items():
        session = onnxruntime.InferenceSession(folder / name)
        assert [each.name for each in session.get_inputs()] == inputs
        assert [each.name for each in session.get_outputs()] == outputs
        assert session.get_inputs()[0].shape[0] == "batch_size"


def test_the_folder_holds_the_names_that_optimum_looks_for_and_tells_nothing_of_the_machine(folder):
    texts = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", CHECKSUMS_FILE}
    assert {path.name for path in folder.iterdir()} == {*ONNX_FILES, *texts}
    assert not list(folder.parent.glob(".*"))
    check_names(folder)
    for name in ONNX_FILES:
        onnx.checker.check_model(str(folder / name), full_check=True)
    for path in folder.iterdir():
        held = path.read_bytes()
        assert b".py" not in held, path.name
        assert str(Path.home()).encode() not in held
        assert str(Path(exporter.__file__).parents[3]).encode() not in held
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert not {"auto_map", "custom_pipelines"} & set(config)


def test_the_command_says_what_it_compared_and_int8_is_about_half_the_size(saved, folder, tmp_path, untraced, printed):
    (tmp_path / "sentences.txt").write_text("\n\n".join(PAIRS) + "\n", encoding="utf-8")
    words = ["--sentences", tmp_path / "sentences.txt", "--count", 4]
    output = printed("export", "onnx", saved, tmp_path / "float32", *words)
    for search in ("greedy", "4 beams"):
        assert f"{search}: 0 of 4 sentences differ from generate()'s" in output
    assert re.search(r"logits differ by \d\.\de-\d\d at most\n0\.\d MB in float32", output)
    output = printed("export", "onnx", saved, tmp_path / "int8", *words, "--quantization", "int8")
    assert re.search(r"greedy: \d of 4 sentences differ from generate\(\)'s", output)
    assert "MB in int8" in output
    assert "logits" not in output
    for name in ONNX_FILES:
        assert (tmp_path / "int8" / name).stat().st_size < 0.6 * (folder / name).stat().st_size
    for each in ("float32", "int8"):
        assert {path.name for path in (tmp_path / each).iterdir()} == {path.name for path in folder.iterdir()}


def test_the_guide_runs_as_it_is_written(saved, folder, tmp_path, monkeypatch, capsys):
    section = text_of("serve").split("\n## ONNX\n")[1].split("\n## ")[0]
    blocks = printing_of(section)
    assert len(blocks) == 2
    shutil.copytree(saved, tmp_path / "runs" / "quickstart" / "model")
    shutil.copytree(folder, tmp_path / "runs" / "quickstart" / "onnx")
    monkeypatch.chdir(tmp_path)
    for code, printed in blocks:
        exec(code, {})
        assert capsys.readouterr().out == printed
    for name in (*ONNX_FILES, "--quantization int8", "--count", "500", f"{exporter.TOLERANCE:.0e}".replace("0", "")):
        assert name in section


def changed_weights(path: Path, name_part: str, factor: float):
    """Multiply the weights of one matrix in a written file."""
    model = onnx.load(path)
    weights = [each for each in model.graph.initializer if name_part in each.name and len(each.dims) > 0]
    assert weights
    for weight in weights:
        array = onnx.numpy_helper.to_array(weight) * factor
        weight.CopyFrom(onnx.numpy_helper.from_array(array.astype("float32"), weight.name))
    onnx.save(model, path)


def test_an_export_that_differs_or_is_interrupted_leaves_nothing(saved, tmp_path, untraced, monkeypatch):
    write, export = exporter.write_onnx, partial(export_onnx, saved, tmp_path / "out", list(PAIRS)[:2])

    def wrongly(write, name, factor, *given):
        write(*given)
        changed_weights(given[-1] / name, "norm.weight", factor)

    def write_half(model, target):
        (target / "encoder_model.onnx").write_bytes(b"half")
        raise KeyboardInterrupt

    faults = {-3.0: r"differs from generate\(\)'s for \d of 2", 1.001: r"logits differ by \d\.\de-"}
    for name, (factor, message) in product(ONNX_FILES, faults.items()):
        monkeypatch.setattr(exporter, "write_onnx", partial(wrongly, write, name, factor))
        assert_error(message, export)
    monkeypatch.setattr(exporter, "write_onnx", write)
    monkeypatch.setattr(exporter, "quantize_file", partial(wrongly, exporter.quantize_file, "", -3.0))
    assert_error(r"`quantization` int8 ruins the model.* have \d+ % of their tokens", export, "int8")
    monkeypatch.setattr(exporter, "write_onnx", write_half)
    assert_error("", export, error=KeyboardInterrupt)
    assert not list(tmp_path.iterdir())


# Wrong input


def test_what_cannot_be_exported_is_refused_in_a_line_leaving_nothing(saved, tmp_path, monkeypatch, heedful_command):
    empty, binary, used = tmp_path / "empty.txt", tmp_path / "binary.txt", tmp_path / "used"
    empty.write_text(" \n\n")
    binary.write_bytes(b"\xff\xfe\x00")
    used.mkdir()
    sizes = {"vocab_size": 270, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    MarianMTModel(MarianConfig(**sizes, **heads, pad_token_id=0)).save_pretrained(tmp_path / "marian")
    out = tmp_path / "out"

    def export(arguments):
        code, _, errors = heedful_command("export", "onnx", *arguments)
        assert code != 0
        assert not out.exists()
        assert not list(used.iterdir())
        assert not list(tmp_path.glob(".*"))
        raise ValueError(" ".join(errors.split()))

    cases = [
        ((saved, used), "must be a folder that does not exist yet"),
        ((saved, out, "--sentences", empty), "has none"),
        ((saved, out, "--sentences", binary), "UTF-8"),
        ((saved, out, "--sentences", "nowhere.txt"), r"nowhere\.txt"),
        ((saved, out, "--count", "0"), "`--count` must be at least 1"),
        ((tmp_path / "marian", out), "`model_type` must be heed to be exported, but is marian"),
    ]
    assert_refused(cases, export)
    cases = [
        ((["", " "], "float32"), "`sentences` must hold a sentence"),
        ((list(PAIRS), "int4"), "`quantization` must be one of float32, int8, but is 'int4'"),
    ]
    assert_refused(cases, lambda case: export_onnx(saved, out, *case))
    for name in ("onnxruntime", "onnxscript", "onnx"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            assert_refused([((saved, out), r"pip install 'heedful\[onnx\]'")], export)


def test_the_built_in_sentences_or_those_of_a_runs_validation_are_compared(tmp_path):
    for count in (1, 2, 500):
        with pytest.warns(UserWarning, match="built-in Korean and English sentences. Choose others with"):
            assert len(set(sentences_to_compare(tmp_path, count=count))) == count
    lines = [f"{number}\tnumber {number}\n" for number in range(9)]
    for name in ("train", "validation"):
        (tmp_path / f"{name}.tsv").write_text("source\ttarget\n" + "".join(lines[name == "validation" :]))
    files = {"data.train": str(tmp_path / "train.tsv"), "data.source": "source", "data.target": "target"}
    for validation, first in ((str(tmp_path / "validation.tsv"), "1"), (None, "0")):
        recipe = tiny_recipe(tmp_path / "run", files | {"data.validation": validation})
        (tmp_path / "recipe.yaml").write_text(to_yaml(recipe))
        every = [str(number) for number in range(int(first), 9)]
        assert sentences_to_compare(tmp_path) == every
        assert sentences_to_compare(tmp_path, count=3) == sample(every, 3) != every[:3]
    (tmp_path / "train.tsv").unlink()
    with pytest.warns(UserWarning, match="built-in"):
        assert len(sentences_to_compare(tmp_path, count=3)) == 3


def test_quantized_weights_are_refused():
    model = tiny_model(**SHALLOW)
    check_exportable(model)
    model.config.quantization_config = {"quant_method": "torchao"}
    assert_error("`quantization_config` must be absent", check_exportable, model)


def test_what_the_exported_files_cannot_compute_and_a_broken_folder_are_refused(folder, tmp_path):
    model, source = OnnxModel.from_pretrained(folder), torch.tensor([[5, 6, 2]])
    cases = [
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"decoder_attention_mask": torch.tensor([[0, 1]])}, "decoder_attention_mask"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    ]
    prompt = {"decoder_input_ids": torch.tensor([[0, 1]]), "max_length": 6}
    assert_refused(cases, lambda settings: model.generate(source, **prompt, **settings))
    output = model.generate(source, return_dict_in_generate=True, max_length=4)
    with pytest.raises(ValueError, match="one token with a filled cache, but has 2"):
        model(source, decoder_input_ids=torch.tensor([[4, 5]]), past_key_values=cache_of(output))
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "decoder_model.onnx").unlink()
    cases = [(tmp_path, r"config\.json"), (tmp_path / "copy", r"decoder_model\.onnx")]
    assert_refused(cases, OnnxModel.from_pretrained, FileNotFoundError)
