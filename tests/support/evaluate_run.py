"""The program of each process in test_cli.py: it runs `heedful` and writes down which sentences it translated.

python evaluate_run.py FOLDER ARGUMENTS…
"""

import json
import os
import sys
from pathlib import Path

from heedful.cli import main as cli
from heedful.decoding.translation import Translator

if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))

    def noting(translate):
        def note(self, texts, *arguments, **settings):
            (folder / f"sentences-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(list(texts)))
            return translate(self, texts, *arguments, **settings)

        note.__kwdefaults__ = translate.__kwdefaults__
        return note

    for name in ("translate", "translate_lines"):
        setattr(Translator, name, noting(getattr(Translator, name)))
    cli.main()
