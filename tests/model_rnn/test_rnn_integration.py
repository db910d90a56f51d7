"""Everything around a model knows recurrent ones: translation, engines, exports, checks, pipeline, adapters."""

from functools import partial

import pytest
import torch
from transformers import pipeline

from heedful import HeedRNNForConditionalGeneration, Translator, prepare_for_inference
from heedful.conversion.model_conversion import convert
from heedful.data.tokenization import TokenizerPair
from heedful.data.tokenizer_training import train_tokenizers
from heedful.decoding.loading import load_model
from heedful.decoding.native.engine import NativeDecoder
from heedful.export.ctranslate2_export import export_ctranslate2
from heedful.export.onnx.onnx_export import export_onnx
from heedful.verification.verification import check_attentions, check_cache, check_special_ids, check_tied_weights
from helpers import SUTSKEVER, assert_error, assert_refused, tiny_rnn
from memorised import PAIRS, saved_in

TEXTS = ["나는 사과를 먹는다.", "", "그녀는 책을 읽는다."]


@pytest.fixture(scope="module", params=["joint", "separate"])
def folder(request, tmp_path_factory):
    joint = request.param == "joint"
    sizes = {"vocab_size": 270} if joint else {"vocab_size": 268, "target_vocab_size": 266}
    tokenizers = train_tokenizers(list(PAIRS), list(PAIRS.values()), joint=joint, **sizes)
    sizes = {"vocab_size": len(tokenizers.source), "decoder_vocab_size": len(tokenizers.target)}
    model = tiny_rnn(**sizes, share_encoder_decoder_embeddings=joint, **tokenizers.special_ids())
    model.generation_config.update(eos_token_id=2, max_length=12)
    return saved_in(tmp_path_factory.mktemp(request.param), model, tokenizers)


@pytest.mark.filterwarnings("ignore:.*")
def test_text_is_translated_by_generate_whatever_the_batch_and_by_the_pipeline(folder):
    translator = Translator.from_pretrained(folder, "cpu")
    assert isinstance(translator.model, HeedRNNForConditionalGeneration)
    for beams in (1, 3):
        together = translator.translate(TEXTS, num_beams=beams)
        alone = [translator.translate([text], num_beams=beams)[0] for text in TEXTS]
        assert [row[0].token_ids for row in together] == [row[0].token_ids for row in alone]
        assert [row[0].score for row in together] == pytest.approx([row[0].score for row in alone], abs=1e-5)
        assert len(together[0][0].token_ids) > 1
        assert together[1][0].text == ""
    translate = pipeline("heed-translation", model=str(folder), device="cpu")
    expected = [row[0].text for row in translator.translate(TEXTS)]
    assert [result["translation_text"] for result in translate(TEXTS)] == expected


def test_what_knows_no_recurrent_cells_refuses_them_by_name_and_leaves_nothing(folder, tmp_path):
    pytest.importorskip("ctranslate2")
    kind = "must be a HeedForConditionalGeneration, but is a HeedRNNForConditional"
    exported = r"`model_type` must be heed to be exported, but is heed_rnn.*gru cells"
    module = "transformers_modules.model.modeling_heed"  # as transformers imports the code of a trusted folder
    of_the_folder = object.__new__(type("HeedForConditionalGeneration", (), {"__module__": module}))
    target, translator = tmp_path / "target", partial(Translator.from_pretrained, folder, "cpu")
    cases = [
        (partial(translator, engine="native"), kind),
        *((partial(prepare, tiny_rnn()), kind) for prepare in (prepare_for_inference, NativeDecoder)),
        (partial(NativeDecoder, of_the_folder), "is a HeedForC.* of the code in its folder .*after `import heedful`"),
        *((partial(export, folder, target, TEXTS[:1]), exported) for export in (export_onnx, export_ctranslate2)),
        (partial(convert, folder, target), r"`model_type` must be one of .*, but is heed_rnn"),
    ]
    assert_refused(cases, lambda call: call())
    assert not target.exists()


def test_the_checks_of_a_model_pass_and_fail_as_they_should(folder):
    model, tokenizers = load_model(folder), TokenizerPair.from_pretrained(folder)
    check_special_ids(model, tokenizers).assert_passed()
    for check in (check_attentions, check_cache, check_tied_weights):
        verdict = check(model)
        verdict.assert_passed()
        assert verdict.passed
    verdict = check_attentions(tiny_rnn(**SUTSKEVER))
    assert verdict.level == "skipped"
    assert "`attention` is none" in verdict.message
    assert check_special_ids(tiny_rnn(), tokenizers).level == "FAIL"
    assert_error("vocab_size", Translator, tiny_rnn(), tokenizers)


def test_wrong_ids_beside_an_adapter_are_refused():
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=4, target_modules=["embed_tokens"])
    with pytest.raises(ValueError, match="below 99, but one is 99"):
        peft.get_peft_model(tiny_rnn(), adapter)(input_ids=torch.tensor([[99]]), labels=torch.tensor([[8]]))
