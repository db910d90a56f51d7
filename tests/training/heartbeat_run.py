"""A process that waits for another which never comes: python heartbeat_run.py FOLDER, started like torchrun's."""

import sys
import time
from pathlib import Path

from accelerate import Accelerator

from heedful.training.processes.heartbeat import Heartbeat

if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    folder = Path(sys.argv[1])
    with Heartbeat(accelerator, period=0.2, patience=3.0) as heartbeat:
        with heartbeat.paused():  # longer than the patience, and nobody minds
            time.sleep(4.0)
        accelerator.wait_for_everyone()
        (folder / f"waiting-{accelerator.process_index}").touch()
        time.sleep(120)
