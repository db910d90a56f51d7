"""The studies at their smallest."""

from functools import cache

import pytest
import torch

from heedful_lab.studies.catalogue import NAMES
from heedful_lab.studies.models import dependence
from helpers import slow_but
from small_studies import run_smallest


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Run a study at its smallest, once for all tests of the file."""
    return cache(lambda name: run_smallest(name, tmp_path_factory.mktemp(name)))


# The others train more models, and run before a release.
QUICK = ("clue", "complexity", "gradients", "paths", "positions", "questions", "scaling")


@pytest.mark.parametrize("name", slow_but(QUICK, NAMES))
def test_a_study_runs_at_its_smallest_and_keeps_its_promises(small, name):
    small(name)


@pytest.mark.slow
def test_the_gradient_at_the_first_token_is_that_of_its_embedding(small):
    lab, *_ = small("dependence")
    pairs = dependence.joined_sentences("test", 9, seed=1)[:2]
    for training in lab.trainings[:3]:
        translator, embedded, shares = training.translator(), [], []
        model, tokenizers = translator.model, translator.tokenizers
        hook = model.get_input_embeddings().register_forward_hook(lambda *given, kept=embedded: kept.append(given[-1]))
        for source, target in pairs:
            embedded.clear()
            labels = torch.tensor([list(tokenizers.encode_target([target])[0])])
            loss = model(input_ids=torch.tensor([tokenizers.encode_source([source])[0]]), labels=labels).loss
            # The first is the encoder's: source and target may be looked up in one matrix.
            (gradient,) = torch.autograd.grad(loss, embedded[0])
            norms = gradient[0].norm(dim=-1)
            shares.append((norms[0] / norms.mean()).item())
        hook.remove()
        assert dependence._share_at_the_first(translator, pairs) == pytest.approx(sum(shares) / 2, rel=1e-3)
        assert dependence._share_at_the_first(translator, pairs[:1]) == pytest.approx(shares[0], rel=1e-3)
