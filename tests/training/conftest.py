"""A corpus that is read and tokenized once, and loops on it."""

import pytest

from heedful.training.loop.loop import TrainingLoop
from heedful.training.preparation import prepare_corpus
from heedful.training.processes.devices import make_accelerator
from process_checks import with_teacher, write_teacher
from tiny_runs import tiny_recipe


@pytest.fixture(autouse=True)
def fresh_accelerate_for_each_test(fresh_accelerate):
    """Every test of this folder trains."""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    return prepare_corpus(tiny_recipe(folder), folder / "tokenizer")


@pytest.fixture(scope="session")
def distillation(corpus, tmp_path_factory) -> dict:
    """The keys of a recipe that learns from a teacher of the corpus."""
    return write_teacher(tmp_path_factory.mktemp("teacher") / "tokens", corpus.tokenizers)


@pytest.fixture
def make_loop(corpus, tmp_path):
    def make(changes=None, folder=None, data=corpus) -> TrainingLoop:
        recipe = tiny_recipe(folder or tmp_path / "run", changes)
        recipe.folder.mkdir(exist_ok=True)
        return TrainingLoop(recipe, with_teacher(data, recipe), make_accelerator(recipe.optimization))

    return make
