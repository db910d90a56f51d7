"""Do the tests pass on other processors? `make machines` computes as they do, as far as this processor can.

    python scripts/upkeep/machines.py                            # all tests, as on each of them
    python scripts/upkeep/machines.py --only avx2 tests/model    # some tests, as on one
    python scripts/upkeep/machines.py --quick                    # the fast part, which `.ci/run` runs

It ends with a line for each machine, and with exit code 1 if a test fails. torch, oneDNN and MKL take fewer
instructions by variables of the environment, which the processes that tests start inherit.
"""

import argparse
import sys

from newest import pytest, summary

# Variables of the environment, and options of pytest; `--threads` and `--ice-lake` are of tests/conftest.py.
MACHINES: dict[str, tuple[dict[str, str], list[str]]] = {
    "no AVX": (
        {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
        [],
    ),
    "avx2": (
        {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
        [],
    ),
    "ice lake": ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, ["--ice-lake"]),
    "four threads": ({}, ["--threads", "4"]),
}
# Where processors differ the most: products, quantized weights, kernels, exports.
QUICK = ("tests/model", "tests/decoding/test_native_kernels.py", "tests/decoding/test_native_decoder.py")
QUICK += ("tests/export/test_export_transformers.py",)
QUICK_MACHINES = ("no AVX", "avx2")


def main() -> None:
    """Run the tests as on each machine, then say what passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MACHINES, action="append", help="one machine; may be given several times")
    parser.add_argument("--quick", action="store_true", help="the fast part")
    parser.add_argument("tests", nargs="*", help="files or folders; default: all")
    options = parser.parse_args()
    chosen = options.only or (QUICK_MACHINES if options.quick else MACHINES)
    tests = options.tests or (QUICK if options.quick else ())
    found = {name: pytest(*MACHINES[name][1], *tests, **MACHINES[name][0]) for name in chosen}
    print()
    for name, counts in found.items():
        print(f"as on {name}: {summary(counts)}")
    sys.exit(any(counts["failed"] for counts in found.values()))


if __name__ == "__main__":
    main()
