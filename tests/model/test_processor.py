"""What the processor can do decides precision, matrix products and kernels; each fact can be another processor's."""

import os

import pytest
import torch

from heedful import fast_paths_heed, processor_heed
from heedful.decoding.native import kernels

AVX512 = ("avx2", "avx512_f")
NAMES = {
    "zen4": ("AMD EPYC 9454P", "AVX512", (*AVX512, "avx512_bf16", "avx512_vnni")),
    "ice lake": ("Intel Xeon Platinum 8375C", "AVX512", (*AVX512, "avx512_vnni")),
    "sapphire rapids": ("Intel Xeon 8488C", "AVX512_BF16", (*AVX512, "avx512_bf16", "amx_bf16", "avx512_vnni")),
    "limited zen4": ("AMD EPYC 9454P", "AVX2", (*AVX512, "avx512_bf16", "avx512_vnni", "avx_vnni")),
    "alder lake": ("12th Gen Intel Core i7", "AVX2", ("avx2", "avx_vnni")),
    "haswell": ("Intel Xeon E5-2680 v3", "AVX2", ("avx2",)),
    "graviton": ("Neoverse V1", "DEFAULT", ("bf16",)),
}


@pytest.fixture
def processor(monkeypatch):
    def become(name):
        maker, registers, instructions = NAMES[name]
        architecture = "aarch64" if name == "graviton" else "x86_64"
        facts = {"cpu_name": maker, "architecture": architecture, **dict.fromkeys(instructions, True)}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: facts)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: registers)
        processor_heed.multiplies_by_onednn.cache_clear()

    yield become
    processor_heed.multiplies_by_onednn.cache_clear()


@pytest.mark.parametrize(
    ("name", "vendor", "has_bfloat16", "has_exact_bytes", "by_onednn"),
    [
        ("zen4", "AMD", True, True, True),
        ("ice lake", "Intel", False, True, False),
        ("sapphire rapids", "Intel", True, True, False),
        ("limited zen4", "AMD", False, False, False),
        ("alder lake", "Intel", False, True, False),
        ("haswell", "Intel", False, False, False),
        ("graviton", "other", True, True, False),
    ],
)
def test_a_processor_has_what_its_instructions_say(processor, name, vendor, has_bfloat16, has_exact_bytes, by_onednn):
    processor(name)
    assert processor_heed.vendor() == vendor
    assert processor_heed.has_bfloat16() == has_bfloat16
    assert processor_heed.multiplies_bytes_exactly() == has_exact_bytes
    assert processor_heed.multiplies_by_onednn() == (by_onednn and torch.backends.mkldnn.is_available())
    assert f"{vendor} CPU with {processor_heed.registers()}, " in processor_heed.kind()


def test_float32_products_are_torchs_where_no_measurement_says_that_onednns_are_faster(processor, monkeypatch):
    monkeypatch.setattr(fast_paths_heed.OneDnnProduct, "apply", lambda *_: pytest.fail("oneDNN was taken"))
    weight, states = torch.randn(6, 8), torch.randn(9, 8)
    for name in ("ice lake", "limited zen4", "graviton"):
        processor(name)
        torch.testing.assert_close(fast_paths_heed.linear(states, weight, None), states @ weight.T)


def test_kernels_are_compiled_for_the_registers_that_torch_uses(processor, monkeypatch):
    compiled = []

    def note(flags):
        compiled.append(set(flags))
        raise OSError("not compiled in this test")

    monkeypatch.setattr(kernels, "_loaded", note)
    for name in ("zen4", "limited zen4"):
        processor(name)
        with pytest.warns(UserWarning, match="slowly: not compiled"):
            kernels.library.__wrapped__()
    processor("graviton")
    assert kernels.library.__wrapped__() is None
    assert (
        ["-mavx512vnni" in flags for flags in compiled]
        == ["-mavx512f" in flags for flags in compiled]
        == [True, False]
    )


def test_a_process_may_use_the_cores_of_its_affinity_and_of_its_containers_quota(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.setattr(processor_heed, "QUOTA", tmp_path / "cpu.max")
    assert processor_heed.usable_cores() == 6
    for quota, cores in {"max 100000": 6, "250000 100000": 2, "10000 100000": 1, "900000 100000": 6}.items():
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
        assert processor_heed.usable_cores() == cores
