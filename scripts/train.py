"""Train by a recipe, on one device or many.

    python scripts/train.py quickstart
    accelerate launch --num_processes 8 scripts/train.py multi30k-de-en data.folder=…

The same as `heedful train`, as a file that `accelerate launch` and `torchrun` can start.
"""

import sys

from heedful.cli.main import main

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    main()
