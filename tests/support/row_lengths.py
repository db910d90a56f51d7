"""Row lengths, random and natural, for batch tests."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

lengths = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=60)
several = settings(max_examples=60, deadline=None)


def padded_tokens(rows, source, target):
    return len(rows) * (max(source[row] for row in rows) + max(target[row] for row in rows)) if rows else 0


def padding_share(batches, source, target):
    """Return the share of padding, from 0 to 1, in all padded tokens of batches of row numbers."""
    padded = sum(padded_tokens(batch, source, target) for batch in batches)
    return 1 - sum(source[row] + target[row] for batch in batches for row in batch) / padded if padded else 0.0


def rows_of(update):
    return sorted(row for bucket in update for row in bucket)


def natural_lengths(rows, seed=0):
    generator = np.random.default_rng(seed)
    source = np.maximum(1, generator.lognormal(np.log(15) - 0.125, 0.5, rows).round()).astype(int)
    target = np.maximum(1, (source * generator.lognormal(0, 0.2, rows)).round()).astype(int)
    return source.tolist(), target.tolist()
