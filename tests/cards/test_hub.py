"""Models on the Hub, or rather on a stand-in of it: what is pushed is what others load, at every revision."""

import json
import shutil
from types import SimpleNamespace

import pytest

from card_facts import card_facts
from guides import blocks_of, python_of, text_of
from heedful.cards.hub import check_folder, files_to_push, push
from heedful.cards.model_card import write_model_card
from heedful.data.tokenizer_training import train_tokenizers
from heedful.files import check_inside
from helpers import CODE, assert_error, assert_refused, run_python
from hub_stand_in import HubStandIn
from memorised import PAIRS, SHOWN, memorised_model, saved_in, saved_model

KOREAN, ENGLISH = list(PAIRS), list(PAIRS.values())
LOUD = {source: target.upper() for source, target in PAIRS.items()}

PUSH = """
import json, sys
from heedful import HeedForConditionalGeneration
from heedful.data.tokenization import TokenizerPair
from heedful.cards.hub import push
folders = json.loads(sys.argv[1])
# A second commit, with tokenizers of its own for each side; a third, in shards, on a branch; a fourth like the first.
pushed = [push(folders["separate"], "me/tiny"), push(folders["sharded"], "me/tiny", revision="next")]
pushed.append(push(folders["joint"], "me/tiny", message="As before"))
model, tokenizers = (
    load.from_pretrained(folders["joint"]) for load in (HeedForConditionalGeneration, TokenizerPair)
)
model.push_to_hub("me/own", private=True)
tokenizers.source.push_to_hub("me/own")
from huggingface_hub import HfApi
HfApi().upload_file(path_or_fileobj=folders["joint"] + "/README.md", path_in_repo="README.md", repo_id="me/own")
from transformers import pipeline
pipeline("heed-translation", model=folders["separate"], device="cpu").push_to_hub("me/whole")
print(json.dumps([one.commit for one in pushed]))
"""

LOAD = """
import json, sys
sys.modules["heedful"] = None  # makes the import fail
import torch
from transformers import AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer, pipeline
texts, expected, loud, revisions, ids = json.loads(sys.argv[1])
trusted = {"trust_remote_code": True}

def translations(revision, **options):
    translate = pipeline(model="me/tiny", revision=revision, device="cpu", **trusted, **options)
    assert type(translate).__module__.startswith("transformers_modules."), type(translate)
    return [one["translation_text"] for one in translate(texts, batch_size=2)]

for revision, answers in zip(revisions, (expected, loud, expected, expected), strict=True):
    assert translations(revision) == answers, revision
assert translations(None) == expected
model = AutoModelForSeq2SeqLM.from_pretrained("me/tiny", revision=revisions[0], **trusted)
assert type(model).__module__.startswith("transformers_modules."), type(model)
assert revisions[0] in type(model).__module__, type(model)
tokenizer = AutoTokenizer.from_pretrained("me/tiny", revision=revisions[0], **trusted)
inputs = tokenizer(texts[:2], return_tensors="pt", padding=True)
found = model.generate(**inputs, num_beams=2).tolist()
assert found == ids, (found, ids)
assert type(AutoModel.from_pretrained("me/tiny", revision=revisions[2], **trusted)).__name__ == "HeedModel"
own = pipeline(model="me/own", device="cpu", **trusted)
assert own(texts[0]) == [{"translation_text": expected[0]}]
print("done")
"""

PRIVATE = """
import json, sys
if sys.argv[2] == "without heedful":
    sys.modules["heedful"] = None  # makes the import fail
else:
    import heedful
from transformers import pipeline
texts, _, loud, revisions, _ = json.loads(sys.argv[1])
task = {"trust_remote_code": True} if sys.argv[2] == "without heedful" else {"task": "heed-translation"}
translate = pipeline(model="me/tiny", revision=revisions[1], device="cpu", token="hf_mine", **task)
assert translate.target_tokenizer is not translate.tokenizer
assert [one["translation_text"] for one in translate(texts)] == loud
try:
    pipeline(model="me/tiny", revision=revisions[1], device="cpu", token="hf_other", **task)
except (OSError, ValueError) as error:
    assert "me/tiny" in str(error), error
else:
    raise AssertionError("a token of someone else opened a private repository")
print("done")
"""

WITH_HEED = """
import json, sys
from transformers import pipeline
from heedful import Translator
from heedful.decoding.loading import load_model
texts, expected, loud, revisions, _ = json.loads(sys.argv[1])
for revision, answers in zip([*revisions, "next", None], (expected, loud, expected, expected, expected, expected)):
    translator = Translator.from_pretrained("me/tiny", device="cpu", revision=revision)
    assert [one[0].text for one in translator.translate(texts)] == answers, revision
translate = pipeline("heed-translation", model="me/tiny", revision=revisions[1], device="cpu")
assert type(translate).__module__ == "heedful.pipeline_heed"
assert [one["translation_text"] for one in translate(texts)] == loud
for place, message in ((("me/none", None), "me/none must be"), (("me/tiny", "v9"), "me/tiny at revision v9 must be")):
    try:
        load_model(*place)
    except FileNotFoundError as error:
        assert str(error).startswith(message), error
    else:
        raise AssertionError(place)
print("done")
"""


def run(environment, *command):
    return run_python(*command, **environment).stdout.splitlines()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three folders with cards: joint tokenizers, separate ones with other answers, and the first in shards."""
    place = tmp_path_factory.mktemp("folders")
    joint = train_tokenizers(KOREAN, ENGLISH, vocab_size=272)
    separate = train_tokenizers(KOREAN, list(LOUD.values()), vocab_size=264, joint=False)
    model = memorised_model(joint, PAIRS)
    saved_in(place / "joint", model, joint)
    saved_in(place / "separate", memorised_model(separate, LOUD), separate)
    model.save_pretrained(place / "sharded", max_shard_size="40KB")
    joint.save_pretrained(place / "sharded")
    for name in ("joint", "separate", "sharded"):
        write_model_card(place / name, card_facts())
    (place / "joint" / "training_state").mkdir()
    (place / "joint" / "training_state" / "optimizer.pt").write_bytes(b"private")
    (place / "joint" / "log.jsonl").write_text("{}")
    for name in (".eval_results/mine.yaml", ".notes/private.txt"):
        (place / "joint" / name).parent.mkdir()
        (place / "joint" / name).write_text("mine")
    inputs = joint.source(KOREAN[:2], return_tensors="pt", padding=True)
    return place, model.generate(**inputs, num_beams=2).tolist()


@pytest.fixture(scope="module")
def pushed(folders, tmp_path_factory):
    """The stand-in after everything was pushed to it, and what a fresh process finds there."""
    place, ids = folders
    caches = tmp_path_factory.mktemp("caches")
    with HubStandIn() as stand_in:
        sender = stand_in.environment(caches / "sender")
        sent = run_python("-m", "heedful", "push", str(place / "joint"), "me/tiny", "--private", **sender)
        said = sent.stdout.splitlines()
        assert "'.notes', 'log.jsonl', 'training_state' in " in sent.stderr
        first = said[0].removeprefix("me/tiny at revision ")
        requests = list(stand_in.requests)
        paths = {name: str(place / name) for name in ("joint", "separate", "sharded")}
        revisions = [first, *json.loads(run(sender, "-c", PUSH, json.dumps(paths))[-1])]
        # As they were pushed: first, separate, sharded, joint again.
        answers = json.dumps([KOREAN, ENGLISH, list(LOUD.values()), revisions, ids])
        receiver = stand_in.environment(caches / "receiver")
        loaded = run(receiver, "-c", LOAD, answers)
        with_heed = run(stand_in.environment(caches / "heed"), "-c", WITH_HEED, answers)
        stand_in.token, private = "hf_mine", []
        for kind in ("with heedful", "without heedful"):
            environment = stand_in.environment(caches / kind) | {"HF_TOKEN": ""}
            private += run(environment, "-c", PRIVATE, answers, kind)[-1:]
    offline = receiver | {"HF_HUB_OFFLINE": "1"}
    found = {"hub": stand_in, "revisions": revisions, "said": said, "requests": requests, "answers": answers}
    return SimpleNamespace(**found, loaded=loaded, with_heed=with_heed, offline=offline, private=private)


def files_at(pushed, revision, repository="me/tiny"):
    return pushed.hub.repositories[repository].commits[revision]


@pytest.mark.slow
def test_one_push_is_one_commit_with_model_code_tokenizers_and_card(pushed, folders):
    commits = [request for request in pushed.requests if "/commit/" in request]
    assert commits == ["POST /api/models/me/tiny/commit/main"]
    files = files_at(pushed, pushed.revisions[0])
    others = ".gitattributes .eval_results/mine.yaml README.md config.json generation_config.json heed_checksums.json"
    assert set(files) == CODE | {*others.split(), "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    for name in set(files) - {".gitattributes"}:
        assert files[name] == (folders[0] / "joint" / name).read_bytes()
    assert pushed.hub.repositories["me/tiny"].private
    assert pushed.said[1] == f"{pushed.hub.url}/me/tiny/commit/{pushed.revisions[0]}"


@pytest.mark.slow
def test_pushes_leave_nothing_of_the_one_before_and_send_a_model_its_tokenizer_or_a_whole_pipeline(pushed):
    first, separate, sharded, again = (set(files_at(pushed, revision)) for revision in pushed.revisions)
    assert "target_tokenizer/tokenizer.json" in separate
    assert again == first
    assert "model.safetensors" not in sharded
    assert len([name for name in sharded if name.endswith(".safetensors")]) > 1
    branches = pushed.hub.repositories["me/tiny"].branches
    assert branches == {"main": pushed.revisions[3], "next": pushed.revisions[2]}
    own, whole = (pushed.hub.repositories[name] for name in ("me/own", "me/whole"))
    files = own.commits[own.branches["main"]]
    assert own.private
    assert CODE | {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(files)
    assert b"heed-tiny-ko-en" in files["README.md"]
    files = set(whole.commits[whole.branches["main"]])
    assert CODE | {"model.safetensors", "tokenizer.json", "target_tokenizer/tokenizer.json"} <= files


@pytest.mark.slow
def test_each_revision_loads_with_heed_without_it_without_the_network_and_with_a_token_of_its_own(pushed):
    assert pushed.loaded[-1:] == pushed.with_heed[-1:] == ["done"]
    assert run(pushed.offline, "-c", LOAD, pushed.answers)[-1:] == ["done"]
    assert pushed.hub.repositories["me/tiny"].private
    assert pushed.private == ["done", "done"]


@pytest.mark.slow
def test_the_guide_of_publishing_prints_what_it_says_and_the_code_of_the_pushed_card_runs(tmp_path):
    folder = saved_model(tmp_path / "runs/quickstart/model", SHOWN, vocab_size=272, norm_placement="post")
    write_model_card(folder, card_facts(example={"source": "제 이모는 변호사예요."}))
    mark = "--- next block"
    with HubStandIn() as hub:
        environment = hub.environment(tmp_path / "caches")
        setting = f"import os; os.chdir({json.dumps(str(tmp_path))})"
        script = f"\nprint({mark!r})\n".join([setting, *python_of(text_of("publish")), "print(revision)"])
        _, *published, revision = run_python("-c", script, **environment).stdout.split(f"{mark}\n")
        card = hub.repositories["me/model"].commits[revision.strip()]["README.md"].decode()
        code = "\n".join(python_of(card))
        printed = run_python("-c", code, **environment).stdout
    for (block, expected), found in zip(blocks_of(text_of("publish")), published, strict=True):
        assert found == expected, block
    assert 'repository = "me/model"' in code
    assert printed.splitlines() == ["My aunt is a lawyer."] * 3


# Before anything is sent


@pytest.fixture
def folder(folders, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi", lambda **_: pytest.fail("the Hub was asked"))
    shutil.copytree(folders[0] / "sharded", tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_that_lacks_a_file_has_anothers_tokenizers_or_an_unreadable_card_is_not_pushed(folder):
    path = folder / "README.md"
    card = path.read_text(encoding="utf-8")
    cases = [
        (("license: apache-2.0\n", ""), "must have `license`"),
        (("library_name: transformers\n", ""), "must have `library_name`"),
        (("language:\n- ko\n- en\n", ""), "must have `language`"),
        (("license: apache-2.0\n", "license: [\n"), "must begin with a model card's metadata"),
        (("      value: ", "      valu: "), "must begin with a model card's metadata"),
    ]

    def push_changed(change):
        assert change[0] in card
        path.write_text(card.replace(*change), encoding="utf-8")
        push(folder, "me/tiny")

    assert_refused(cases, push_changed)
    path.write_text(card, encoding="utf-8")
    check_folder(folder)
    names = [*sorted(CODE), "config.json", "README.md", "model-00002-of-*.safetensors", "tokenizer_config.json"]
    for (path,) in (list(folder.glob(name)) for name in names):
        content = path.read_bytes()
        path.unlink()
        assert_error(path.name, push, folder, "me/tiny", error=(FileNotFoundError, ValueError))
        path.write_bytes(content)
    train_tokenizers(KOREAN, ENGLISH, vocab_size=265).save_pretrained(folder)
    assert_error("`vocab_size` must be 265, but is 272", push, folder, "me/tiny")
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    cases = [(folder / "nowhere", "must be a folder with a model"), (folder, "weights")]
    assert_refused(cases, lambda place: push(place, "me/tiny"), FileNotFoundError)


def test_a_push_without_a_network_fails_in_one_line_and_only_what_belongs_to_a_model_is_sent(folder, monkeypatch):
    from huggingface_hub.errors import HfHubHTTPError

    def fail(*_, **__):
        raise HfHubHTTPError.__bases__[0]("[Errno -3] Temporary failure in name resolution\nand more")

    monkeypatch.setattr("huggingface_hub.HfApi", lambda **_: SimpleNamespace(create_repo=fail))
    with pytest.raises(ConnectionError, match=r"^The Hub cannot be reached to push me/model: .* in name r") as raised:
        push(folder, "me/model")
    assert str(raised.value).endswith(f"({folder} has passed its checks, and `--dry-run` lists the files).")
    private = """
        training_state/optimizer.pt log.jsonl training_args.bin checkpoint-5/model.safetensors a.tmp .env[prod] .env
        runs/x/events.out wandb/run/files/config.yaml my.py note.txt .a.model target_tokenizer/.x vocab.bak
        target_tokenizer/model.safetensors [m]odel.safetensors model_optimizer.safetensors pytorch_model.bin.tmp
        secret.model
    """
    public = ["LICENSE", "target_tokenizer/tokenizer.json", "recipe.yaml", "confidence.json", ".eval_results/a.yaml"]
    before = files_to_push(folder)
    for name in (*private.split(), *public):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "spm.model").symlink_to("training_args.bin")
    assert {*files_to_push(folder)} == {*before, *public}
    assert CODE | {"config.json", "README.md", "tokenizer.json"} < {*before}
    cached = folder.parent / "models--a--b" / "snapshots" / "1"
    shutil.move(folder, cached)
    (cached.parents[1] / "blobs").mkdir()
    for name in ("README.md", "config.json"):
        (cached / name).rename(cached.parents[1] / "blobs" / name)
        (cached / name).symlink_to(f"../../blobs/{name}")
    check_inside(cached)
    assert {*files_to_push(cached)} == {*before, *public}
