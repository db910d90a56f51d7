"""Train from a recipe, on one device or many.

    python scripts/train.py quickstart
    accelerate launch --num_processes 8 scripts/train.py multi30k-de-en data.folder=…

It is `heedful train` as a file for `accelerate launch` and `torchrun`.
"""

import sys

from heedful.cli.main import main

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    main()
