"""A converted model computes, generates and tokenizes what the checkpoint does, and what cannot be is refused."""

import json
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, BartConfig, BartForSequenceClassification, LongT5Config

from guides import printing_of, python_of, text_of
from heedful import HeedConfig, HeedForConditionalGeneration, TokenizerPair, Translator
from heedful.cards.hub import check_folder, read_card
from heedful.conversion import model_conversion as conversion
from heedful.conversion.model_conversion import Conversion, convert, convert_config, convert_model
from heedful.conversion.tokenizer_conversion import TEXTS
from heedful.data.tokenization import GAP, TARGET_FOLDER
from heedful.decoding.loading import STOCK
from heedful.export.page import write_page
from heedful.training.run import train
from heedful_lab.course.embeddings import word_states
from helpers import assert_error, assert_near, assert_refused, change_json, padded
from pretrained_checkpoints import BUILDERS, ENGLISH, KOREAN, SIZES, bart, m2m100, nllb
from tiny_runs import logged, tiny_recipe

HAS_LANGUAGES = ("mbart50", "mbart", "nllb", "m2m100")


@dataclass
class Converted:
    name: str
    source: Path
    result: Conversion

    def __post_init__(self):
        folders = (self.result.folder, self.source)
        load = partial(AutoModelForSeq2SeqLM.from_pretrained, attn_implementation="eager")
        self.models = [load(folder).eval() for folder in folders]
        self.tokenizer = AutoTokenizer.from_pretrained(self.source)
        self.pair = TokenizerPair.from_pretrained(self.result.folder)
        self.language = "de" if self.name == "madlad" else None
        self.settings = json.loads((self.result.folder / "generation_config.json").read_text())
        # Beam search of transformers 5.17 takes the source's number of tokens for the target's.
        config = self.models[1].config
        config.vocab_size = getattr(config, "decoder_vocab_size", None) or config.vocab_size

    def tokens(self, texts: list[str], side: str = "source") -> list[list[int]]:
        """The ids that the checkpoint's own tokenizer gives."""
        tokenizer = self.tokenizer
        if side == "source" and self.language:
            texts = [f"<2{self.language}> {text}" for text in texts]
        return tokenizer(texts)["input_ids"] if side == "source" else tokenizer(text_target=texts)["input_ids"]

    def inputs(self, count: int) -> dict[str, torch.Tensor]:
        rows, pad = [torch.tensor(ids) for ids in self.tokens(KOREAN[:count])], self.models[0].config.pad_token_id
        source = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
        return {"input_ids": source, "attention_mask": (source != pad).long()}


@pytest.fixture(scope="module", params=BUILDERS)
def converted(request, tmp_path_factory) -> Converted:
    folder = tmp_path_factory.mktemp("conversion")
    source = BUILDERS[request.param](folder / request.param)
    return Converted(request.param, source, convert(source, folder / "heed"))


def test_logits_and_loss_are_the_same(converted):
    ours, theirs = converted.models
    assert isinstance(ours, HeedForConditionalGeneration)
    inputs = converted.inputs(4)
    assert not inputs["attention_mask"].all()
    # Of one length, for mBART takes the decoder's start from each row's last label.
    last = converted.tokens(ENGLISH[:1], "target")[0][-1]
    labels = torch.randint(4, 80, (4, 9))
    labels[:, -1] = last
    our_outputs, their_outputs = (model(**inputs, labels=labels) for model in (ours, theirs))
    if converted.name == "mbart50":  # its class would begin with the end of the target
        assert last == ours.config.decoder_start_token_id
    assert their_outputs.logits.std() > 0.3
    assert (our_outputs.logits - their_outputs.logits).abs().max() < 1e-4
    assert_near(our_outputs.loss, their_outputs.loss)
    assert converted.result.difference < 1e-5


@torch.no_grad()
def test_the_longest_sentences_and_those_padded_on_the_left_have_the_logits_that_theirs_have_alone(converted):
    ours, theirs = converted.models
    rows, targets = [torch.randint(4, 80, (length,)) for length in (64, 9, 4)], torch.randint(4, 80, (3, 64))
    source, mask = padded(rows, "left")
    source = source.masked_fill(mask == 0, ours.config.pad_token_id)
    together = ours(input_ids=source, attention_mask=mask, decoder_input_ids=targets).logits
    for row, logits, target in zip(rows, together, targets, strict=True):
        assert_near(logits, theirs(input_ids=row[None], decoder_input_ids=target[None]).logits[0], 2e-5)


def test_generated_tokens_are_the_same_with_the_generation_configs_of_both_folders(converted):
    ours, theirs = converted.models
    # The folder's own configs decide on the rest; of the language theirs knows nothing.
    names = ("decoder_start_token_id", "forced_bos_token_id")
    given = {name: getattr(ours.generation_config, name) for name in names}
    for beams in (1, 4):
        inputs = {**converted.inputs(5), "num_beams": beams}
        expected = theirs.generate(**inputs, **given).tolist()
        assert len({id_ for row in expected for id_ in row}) > 10
        assert ours.generate(**inputs).tolist() == expected
    given = {name: value for name, value in given.items() if value is not None}
    expected = [theirs.generate(torch.tensor(converted.tokens([text])), **given)[0, 1:] for text in KOREAN[:2]]
    translate = Translator.from_pretrained(converted.result.folder).translate
    translated = translate(KOREAN[:2], target_language=converted.language)
    assert [list(best.token_ids) for best, *_ in translated] == [row.tolist() for row in expected]
    assert all(best.text for best, *_ in translated)


def test_the_generation_config_is_the_checkpoints_and_names_the_language(converted):
    ours, theirs = converted.settings, json.loads((converted.source / "generation_config.json").read_text())
    added = {"forced_bos_token_id", "decoder_start_token_id", "transformers_version"}
    assert {k: v for k, v in ours.items() if k not in added} == {k: v for k, v in theirs.items() if k not in added}
    assert theirs["num_beams"] == 4
    if converted.name in HAS_LANGUAGES:
        token = {"nllb": "eng_Latn", "m2m100": "__en__"}.get(converted.name, "en_XX")
        key = "decoder_start_token_id" if converted.name == "mbart" else "forced_bos_token_id"
        assert ours[key] == converted.tokenizer.convert_tokens_to_ids(token)
    if converted.name.startswith("marian"):
        assert ours["bad_words_ids"] == [[ours["pad_token_id"]]]


def test_tokenizers_give_the_same_ids_and_text_and_what_looks_like_a_special_token_is_text(converted):
    pair, tokenizer, texts = converted.pair, converted.tokenizer, [*TEXTS, *KOREAN, *ENGLISH]
    encode_source = partial(pair.encode_source, target_language=converted.language)
    assert encode_source(texts) == converted.tokens([text.strip() for text in texts])
    labels = converted.tokens(texts, "target")
    assert pair.encode_target(texts) == labels
    if converted.name in HAS_LANGUAGES:
        assert encode_source(texts) != labels
    labels = [[id_ for id_ in row if id_ != tokenizer.unk_token_id] for row in labels]  # which only ours shows
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    assert pair.decode_target(labels) == tokenizer.batch_decode(labels, **options)
    assert pair.decode_target(labels)[-1] == ENGLISH[-1]
    pair.check_config(converted.models[0].config)
    gaps = ["The <extra_id_0> was in<extra_id_7>", "<mask> and <extra_id_0>  a <mask>"]  # texts that shall be filled
    assert (encode_source(gaps), pair.encode_target(gaps)) == (
        converted.tokens(gaps),
        converted.tokens(gaps, "target"),
    )
    tokens = [token for token in map(str, tokenizer.added_tokens_decoder.values()) if not GAP.fullmatch(token)]
    tokens += list(getattr(tokenizer, "lang_token_to_id", ()))
    assert len(tokens) >= 3
    for encode, side in ((encode_source, pair.source), (pair.encode_target, pair.target)):
        special = {side.convert_tokens_to_ids(token) for token in tokens} - {side.unk_token_id}
        expected = [id_ for id_ in encode(["a b"])[0] if id_ in special]
        for token, ids in zip(tokens, encode([f"a {token} b {token}" for token in tokens]), strict=True):
            assert [id_ for id_ in ids if id_ in special] == expected, token


@pytest.mark.parametrize("converted", ["marian", "m2m100"], indirect=True)
def test_threads_get_the_language_of_their_own_side(converted, monkeypatch):
    pair, switch = converted.pair, converted.pair.target._switch_to_target_mode
    jobs = [(side, [text]) for text in ENGLISH[:4] for side in (pair.encode_source, pair.encode_target)]
    expected = [side(texts) for side, texts in jobs]
    # Another thread is let in while the tokenizer is the target's.
    monkeypatch.setattr(pair.target, "_switch_to_target_mode", lambda: (switch(), time.sleep(0.02)))
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda job: job[0](job[1]), jobs)) == expected


def test_notes_and_the_card_say_what_was_kept_and_left_out_and_the_folder_can_be_pushed(converted):
    notes, folder = " ".join(converted.result.notes), converted.result.folder
    is_kept = converted.name.startswith(("marian", "m2m", "byt5"))
    assert ("no plain fast tokenizer" in notes) == is_kept
    has_dropped = bool(getattr(converted.models[1].config, "encoder_layerdrop", 0))
    assert ("Layer dropout (`encoder_layerdrop`" in notes) == has_dropped
    has_two = (folder / TARGET_FOLDER).exists()
    assert has_two == (converted.name in ("marian_separate", "mbart50", "mbart", "nllb"))
    kind = json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"]
    assert (kind == ("HeedSourceTokenizer" if has_two else "PreTrainedTokenizerFast")) != is_kept
    check_folder(folder)
    facts, text = metadata_of(folder), (folder / "README.md").read_text()
    assert facts["language"] == (["ko", "en"] if converted.name in HAS_LANGUAGES else ["und"])
    assert (facts["license"], facts.get("base_model")) == ("unknown", None)
    told = [converted.source.name, f"{converted.result.parameters:,}", f"by {converted.result.difference:.1e} at most"]
    told += [f"- {note}".replace("`", r"\`") for note in converted.result.notes]
    assert [each for each in told if each not in text] == []


@pytest.mark.parametrize("converted", ["marian_separate", "nllb"], indirect=True)
def test_a_converted_model_is_trained_further(tmp_path, converted):
    folder = converted.result.folder
    changes = {"model": {"start_from": str(folder)}, "tokenizer": {}, "optimization.max_updates": 3}
    result = train(tiny_recipe(tmp_path / "run", changes))
    before, after = load_file(folder / "model.safetensors"), load_file(result.folder / "model.safetensors")
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[key], after[key]) for key in before if key.endswith("fc1.weight"))
    losses = logged(tmp_path / "run", "train/loss")
    assert losses[-1] < losses[0]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return bart(tmp_path_factory.mktemp("source") / "bart")


@pytest.fixture(scope="module")
def languages(tmp_path_factory) -> Path:
    return nllb(tmp_path_factory.mktemp("source") / "nllb")


def test_a_bias_of_zeros_is_left_out_another_kept_and_no_memory_shared(source):
    theirs = AutoModelForSeq2SeqLM.from_pretrained(source)
    ours = convert_model(theirs)
    assert ours.config.output_bias
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    assert all(parameter.any() for parameter in theirs.parameters())
    theirs.final_logits_bias.zero_()
    without = convert_model(theirs)
    assert not without.config.output_bias
    assert without.lm_head.bias is None


BROKEN = {  # by checkpoint and file: what it says instead, whole or in part, and what a message says of it
    ("bart", "config.json"): [
        ({"architectures": ["BartModel"]}, r"`architectures` must be BartForConditionalGeneration, but is BartModel"),
        ({"decoder_start_token_id": None}, "`decoder_start_token_id` must be set, but is None instead"),
        ({"is_decoder": True, "pad_token_id": None}, "`is_decoder` must be False, but .*`pad_token_id` must be"),
        ({"is_encoder_decoder": False}, "`is_encoder_decoder` must be True, but is False instead"),
        ({"quantization_config": {"quant_method": "awq"}}, "`quantization_config` must be absent, but is .*awq"),
        ({"decoder_layers": 1}, "have, unknown to the model, model.decoder.layers.1"),
        ({"decoder_layers": 3}, "lack model.decoder.layers.2"),
        ({"encoder_ffn_dim": 48}, r"must have the shapes of its config, but are model\.encoder\.layers\.0\.fc1"),
    ],
    ("marian", "config.json"): [
        ({"encoder_layers": 10**9}, "`encoder_layers` of .* must be at most 10,000"),
        ({"max_position_embeddings": 10**8}, "config has 6,400,.* parameters, but its weights only"),
        ({"encoder_attention_heads": 0}, "cannot be loaded: ZeroDivisionError"),
        ({"dtype": "system"}, "cannot be loaded: AttributeError"),
    ],
    ("marian", "vocab.json"): [
        (["a"], "tokenizer cannot be loaded: KeyError"),
        ({"<unk>": 1.5}, r"source's tokenizer must give ids from 0 to \d+, but gives 1\.5"),
    ],
    ("marian", "source.spm"): [(b"{}", "tokenizer cannot be loaded: RuntimeError")],
    ("marian", "generation_config.json"): [
        ({"forced_bos_token_id": 10**9}, "`forced_bos_token_id` of the generation config must"),
        ([1], "must be a JSON object, but is list"),
    ],
    ("marian", "model.safetensors"): [
        ("cut", "cannot be loaded: .*SafetensorError"),
        (b"", "cannot be loaded: .*config has .* parameters, .* only 0 bytes"),
    ],
}


def test_what_cannot_be_expressed_or_read_is_named_in_a_sentence_and_nothing_is_left(tmp_path, source):
    places = {"bart": source, "marian": BUILDERS["marian"](tmp_path / "marian")}

    def try_to_convert(case):
        name, file, content = case
        folder = shutil.copytree(places[name], tmp_path / "changed", dirs_exist_ok=True)
        if isinstance(content, dict):
            change_json(folder / file, **content)
        else:
            whole = (folder / file).read_bytes()
            forms = {str: lambda: whole[:-9], bytes: lambda: content, list: lambda: json.dumps(content).encode()}
            (folder / file).write_bytes(forms[type(content)]())
        convert(folder, tmp_path / "heed")
        shutil.rmtree(folder)

    rows = [((*place, content), message) for place, cases in BROKEN.items() for content, message in cases]
    assert_refused(rows, try_to_convert)
    assert {path.name for path in tmp_path.iterdir()} == {"marian", "changed"}


def test_other_kinds_of_models_are_named(tmp_path):
    assert set(STOCK) == set(conversion.FAMILIES)  # those that whoever loads one is told to convert
    message = "`model_type` must be one of bart, m2m_100, marian, mbart, mt5, pegasus, t5, umt5, but is longt5"
    assert_error(message, convert_config, LongT5Config())
    BartForSequenceClassification(BartConfig(**SIZES, vocab_size=99)).save_pretrained(tmp_path / "classifier")
    with pytest.raises(ValueError, match=r"`architectures` must be .*, but is BartForSequenceClassification"):
        convert(tmp_path / "classifier", tmp_path / "heed")


def test_a_published_model_is_named_with_the_command_that_converts_it(converted):
    if converted.name in ("pegasus", "byt5"):  # whose tokenizers Heedful takes as they are
        assert Translator.from_pretrained(converted.source).translate(KOREAN[:1], max_new_tokens=3)
        return
    languages = " --source-language … --target-language …" if converted.name in HAS_LANGUAGES else ""
    command = f"`heedful convert {converted.source} NEW_FOLDER{languages}`"
    with pytest.raises(ValueError, match=f"must be a Heed model, but is a .* {re.escape(command)}"):
        Translator.from_pretrained(converted.source)


@pytest.mark.parametrize(
    ("name", "dtype"), [("marian", torch.float16), ("pegasus", torch.bfloat16), ("nllb", torch.float16)]
)
def test_a_checkpoint_in_half_precision_is_converted_as_exactly_and_stays_so_to_the_bit(tmp_path, name, dtype):
    source = BUILDERS[name](tmp_path / name)
    model = AutoModelForSeq2SeqLM.from_pretrained(source).to(dtype)
    model.save_pretrained(source)
    result = convert(source, tmp_path / "heed")
    assert result.difference < 1e-5
    weights = load_file(result.folder / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {dtype}
    assert torch.equal(weights["model.encoder.layers.1.feed_forward.fc2.bias"], model.model.encoder.layers[1].fc2.bias)
    ours = AutoModelForSeq2SeqLM.from_pretrained(result.folder).eval()
    inputs = {"input_ids": torch.randint(5, 80, (2, 9)), "decoder_input_ids": torch.randint(5, 80, (2, 4))}
    expected = model.eval()(**inputs).logits
    assert_near(ours(**inputs).logits, expected, 16 * torch.finfo(dtype).eps)


@torch.no_grad()
@pytest.mark.parametrize(("name", "factor"), [("t5", 20000), ("umt5", 20000), ("nllb", 1), ("marian", 1)])
def test_in_float16_it_is_as_near_to_float32_as_the_checkpoint_and_finite_where_that_is(tmp_path, name, factor):
    source = BUILDERS[name](tmp_path / name)
    model = AutoModelForSeq2SeqLM.from_pretrained(source)
    for part, weight in model.named_parameters():  # in large T5s what a network writes leaves the range of float16
        weight.data *= factor if part.endswith("wo.weight") else 1
    model.save_pretrained(source)
    folder = convert(source, tmp_path / "heed").folder
    inputs = {"input_ids": torch.randint(4, 80, (3, 12)), "decoder_input_ids": torch.randint(4, 80, (3, 9))}
    exact, theirs, ours = (
        AutoModelForSeq2SeqLM.from_pretrained(place, dtype=dtype).eval()(**inputs).logits.float()
        for place, dtype in ((source, torch.float32), (source, torch.float16), (folder, torch.float16))
    )
    assert (theirs - exact).abs().max() < exact.std() / 5
    assert (ours - exact).abs().max() < 2 * (theirs - exact).abs().max()
    # Converted to float16 as a whole, T5's states are cut off at its range, as transformers' own are.
    assert AutoModelForSeq2SeqLM.from_pretrained(folder).half()(**inputs).logits.isfinite().all()


def test_what_looks_into_a_tokenizer_names_one_that_it_cannot_look_into(tmp_path):
    folder = convert(BUILDERS["marian"](tmp_path / "marian"), tmp_path / "heed").folder
    change_json(folder / "config.json", activation_function="relu")  # which a page can compute
    translator = Translator.from_pretrained(folder)
    looks = (
        lambda: write_page([folder], tmp_path / "page.html"),
        lambda: word_states(translator, translator.tokenizers, KOREAN[0].split()[0]),
    )
    message = r"must be a fast one .*, but is a MarianTokenizer instead"
    assert_refused([(look, message) for look in looks], lambda look: look())
    assert {path.name for path in tmp_path.iterdir()} == {"marian", "heed"}


def test_what_differs_or_cannot_be_written_leaves_nothing(tmp_path, source, languages, monkeypatch):
    def fail(self, folder):
        assert (folder / "model.safetensors").is_file()
        raise OSError("no space left on device")

    marian = BUILDERS["marian"](tmp_path / "marian")
    model = AutoModelForSeq2SeqLM.from_pretrained(marian)
    weights = load_file(marian / "model.safetensors")
    weights["model.encoder.embed_positions.weight"] = model.model.encoder.embed_positions.weight + 0.01
    save_file(weights, marian / "model.safetensors", metadata={"format": "pt"})
    larger = shutil.copytree(source, tmp_path / "larger")
    tokenizer = AutoTokenizer.from_pretrained(larger)
    tokenizer.add_tokens(["<one>", "<more>"])
    tokenizer.save_pretrained(larger)
    cases = [
        (marian, r"`model.encoder.embed_positions.weight` must hold the sinusoids .* 1.0e-02"),
        (larger, r"must have at most (\d+) tokens, the model's `vocab_size`.*, but has \d+"),
    ]
    assert_refused(cases, lambda folder: convert(folder, tmp_path / "heed"))
    with monkeypatch.context() as patch:
        patch.setitem(conversion.FAMILIES["m2m_100"].options, "sinusoid_layout", "concatenated")
        assert_error("logits differ by", convert, languages, tmp_path / "heed")
    with monkeypatch.context() as patch:
        patch.setattr(TokenizerPair, "save_pretrained", fail)
        assert_error("no space", convert, source, tmp_path / "heed", error=OSError)
    assert_error(r"`target` must be a folder that does not exist yet, but .*larger does", convert, source, larger)
    assert {path.name for path in tmp_path.iterdir()} == {"marian", "larger"}


def test_languages_are_chosen_checked_and_refused_where_there_are_none(tmp_path, source, languages, printed):
    cases = [
        ((languages, "kor_Hang", "de"), r"`target_language` must be one of .*deu_Latn.*, but is 'de' instead"),
        ((source, "ko", None), r"`source_language` must be None for a .*, but is 'ko' instead"),
    ]
    assert_refused(cases, lambda given: convert(given[0], tmp_path / "heed", *given[1:]))
    chosen = ["--source-language", "fra_Latn", "--target-language", "deu_Latn"]
    output = printed("convert", languages, tmp_path / "heed", *chosen)
    assert "m2m_100: " in output
    assert "logits differ by 0" in output
    tokenizer = AutoTokenizer.from_pretrained(languages, src_lang="fra_Latn", tgt_lang="deu_Latn")
    pair = TokenizerPair.from_pretrained(tmp_path / "heed")
    assert pair.encode_source(["a b"]) == tokenizer(["a b"])["input_ids"]
    assert pair.encode_target(["a b"]) == tokenizer(text_target=["a b"])["input_ids"]
    settings = json.loads((tmp_path / "heed" / "generation_config.json").read_text())
    assert settings["forced_bos_token_id"] == tokenizer.convert_tokens_to_ids("deu_Latn")


def test_models_without_a_tokenizer_or_with_one_that_does_not_count_its_languages_are_converted(tmp_path, source):
    AutoModelForSeq2SeqLM.from_pretrained(source).save_pretrained(tmp_path / "alone")
    result = convert(tmp_path / "alone", tmp_path / "heed")
    assert "no tokenizer" in result.notes[0]
    assert not (result.folder / "tokenizer_config.json").exists()
    with pytest.raises(ValueError, match="`target_language` needs a tokenizer"):
        convert(tmp_path / "alone", tmp_path / "other", target_language="de")
    folder = convert(m2m100(tmp_path / "m2m100", counted=False), tmp_path / "counted").folder
    pair = TokenizerPair.from_pretrained(folder)
    (ids,) = pair.encode_target(["a"])
    assert pair.target.convert_ids_to_tokens(ids[0]) == "__en__"
    assert pair.decode_target([ids]) == ["a"]
    assert not any("__" in best.text for best, *_ in Translator.from_pretrained(folder).translate(KOREAN[:3]))


def memorise(folder: Path) -> None:
    """Teach the checkpoint two pairs of other directions by heart."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    model.generation_config.no_repeat_ngram_size = 0
    batches = []
    for source, target, pair in (
        ("kor_Hang", "eng_Latn", ("여자는 친절했어요.", "The woman was kind.")),
        ("eng_Latn", "fra_Latn", ("You are here.", "Tu es ici.")),
    ):
        tokenizer = AutoTokenizer.from_pretrained(folder, src_lang=source, tgt_lang=target)
        batches.append(tokenizer(pair[0], text_target=pair[1], return_tensors="pt"))
    optimizer = torch.optim.Adam(model.parameters(), lr=8e-3)
    for step in range(60):
        model(**batches[step % 2]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def test_the_python_of_the_guide_runs_and_prints_what_it_says(tmp_path, languages, monkeypatch, capsys):
    guide = text_of("convert")
    rows = re.findall(r"^\| .* \| (.*) \|$", guide, flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)", row)}
    assert {"position_offset", "embedding_norm", "output_bias"} <= named <= set(HeedConfig.__dataclass_fields__)
    blocks = printing_of(guide)
    assert len(blocks) == guide.count("```python") == 3
    shutil.copytree(languages, tmp_path / "checkpoints/nllb")
    memorise(tmp_path / "checkpoints/nllb")
    monkeypatch.chdir(tmp_path)
    for code, expected in blocks:
        exec(code, {})
        assert capsys.readouterr().out == expected, code


# The card


def metadata_of(folder: Path) -> dict:
    return read_card(folder / "README.md").data.to_dict()


def test_license_languages_and_origin_are_carried_over_and_a_card_that_cannot_be_read_is_as_none(tmp_path, source):
    folder = shutil.copytree(source, tmp_path / "with_card")
    change_json(folder / "config.json", _name_or_path="someone/bart-ko-en")
    metadata = "license: other\nlicense_name: mine\nlicense_link: LICENSE\nlanguage:\n- ko\n- en"
    cards = [f"---\n{metadata}\ntags:\n- theirs\n---\n# Theirs\n", "---\nlicense: [\n---\n", "no metadata", ""]
    found = []
    for number, card in enumerate(cards):
        (folder / "README.md").write_text(card, encoding="utf-8")
        found.append(convert(folder, tmp_path / str(number)).folder)
    check_folder(found[0])
    facts = metadata_of(found[0])
    assert (facts["license"], facts["license_name"], facts["license_link"]) == ("other", "mine", "LICENSE")
    assert (facts["language"], facts["base_model"]) == (["ko", "en"], "someone/bart-ko-en")
    assert "theirs" not in facts["tags"]
    assert "https://huggingface.co/someone/bart-ko-en" in (found[0] / "README.md").read_text(encoding="utf-8")
    for facts in map(metadata_of, found[1:]):
        assert (facts["license"], facts["language"]) == ("unknown", ["und"])


def test_the_code_of_the_card_runs(tmp_path, source, capsys):
    folder = convert(source, tmp_path / "heed").folder
    names = {}
    for code in python_of((folder / "README.md").read_text(encoding="utf-8")):
        code = code.replace('repository = "heed"', f"repository = {str(folder)!r}").replace('"main"', "None")
        exec(code.replace('"…"', repr(KOREAN[0])), names)
    printed = capsys.readouterr().out
    half = len(printed) // 2
    assert printed[:half] == printed[half:]
    assert len(printed.strip()) > 10
