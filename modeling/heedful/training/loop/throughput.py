"""Operations of a model, and the peak of a card."""

import torch
from accelerate import Accelerator

from heedful.protocols import Seq2SeqModel

# Dense bfloat16 operations per second, by a part of the card's name.
PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}


def operations_of_pairs(model: Seq2SeqModel, source_tokens: float, target_tokens: float) -> float:
    """Return the floating-point operations of a training step on tokens without padding."""
    # A matrix takes two for each number and token, and four backwards; attention scores, about 1 %, are left out.
    of_source = of_target = 0
    for name, parameter in model.named_parameters():
        reads_source = ".encoder." in name or ("cross_attn" in name and name.rsplit(".", 2)[1] in ("k_proj", "v_proj"))
        if parameter.dim() > 1 and not any(part in name for part in ("embed_tokens", "embed_positions", "lm_head")):
            of_source += parameter.numel() * reads_source
            of_target += parameter.numel() * (not reads_source)
    of_target += int(model.get_output_embeddings().weight.numel())
    return 6.0 * (of_source * source_tokens + of_target * target_tokens)


def peak_operations(device: torch.device) -> float | None:
    """Return a card's operations per second in bfloat16; `None` if unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def device_values(model: Seq2SeqModel, window: dict[str, float], accelerator: Accelerator) -> dict[str, float]:
    """Return a GPU's peak of memory in GiB and, if its peak is known, the share of it in use."""
    values = {"train/peak_memory_gib": torch.cuda.max_memory_allocated(accelerator.device) / 2**30}
    torch.cuda.reset_peak_memory_stats(accelerator.device)
    if (peak := peak_operations(accelerator.device)) is not None:
        tokens = window["tokens"] - window["target_tokens"], window["target_tokens"]
        able = peak * accelerator.num_processes * max(window["seconds"], 1e-9)
        values["train/model_flops_utilization"] = operations_of_pairs(model, *tokens) / able
    return values
