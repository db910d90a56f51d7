"""Run the tests with other processors' instructions, as far as this processor can: `make machines`.

    python scripts/upkeep/machines.py                            # all tests on each machine
    python scripts/upkeep/machines.py --only avx2 tests/model    # some tests on one
    python scripts/upkeep/machines.py --quick                    # the fast part, for `.ci/run`

It prints a line for each machine; the exit code is 1 if a test fails. Environment variables limit the instructions of
torch, oneDNN and MKL, also in processes that tests start.
"""

import argparse
import sys

from newest import pytest, summary

# Environment variables, and options of pytest and tests/conftest.py.
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
# Processors differ most in products, quantized weights, kernels and exports.
QUICK = ("tests/model", "tests/decoding/test_native_kernels.py", "tests/decoding/test_native_decoder.py")
QUICK += ("tests/export/test_export_transformers.py",)
QUICK_MACHINES = ("no AVX", "avx2")


def main() -> None:
    """Run the tests as on each machine, then print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MACHINES, action="append", help="a machine; can be repeated")
    parser.add_argument("--quick", action="store_true", help="the fast part")
    parser.add_argument("tests", nargs="*", help="test files or folders; default: all")
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
