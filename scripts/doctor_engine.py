"""Say for scripts/doctor which engine a start would take and whether the memory suffices for it. Changes nothing.

Asks the service's own choice, which looks at settings, model, processor and compiler and builds nothing here. Before
there is a .venv its packages are missing: the fast engine is then taken for granted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from doctor_machine import Finding

from inference_api.backend.memory import check_memory, free_bytes
from inference_api.errors import InferenceApiError

if TYPE_CHECKING:
    from inference_api.config import Settings
    from inference_api.model_image import ModelImage

DEFAULT_WEIGHT_BYTES = 134_515_008 * 4
DEFAULT_KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4
"""What the default model takes in memory, in fp32: 30 layers of keys and values, 3 heads of 64 (its config.json)."""
DEFAULT_CONTEXT_TOKENS = 8192
FP32_BITS, FAST_WEIGHT_BITS, TORCH_WEIGHT_BITS, FAST_KV_BITS = 32, 9, 36, 10
"""Of a number in fp32, and in the fast engine as `engine_choice.py` has it."""


def check_engine(settings: Settings, image: ModelImage) -> list[Finding]:
    """Tell which engine is chosen for a prepared model and why, and compare what it needs with the free memory."""
    from inference_api.backend.engine_choice import choose_engine
    from inference_api.backend.engines.fused_library import find_obstacle

    try:
        choice = choose_engine(settings, image, find_obstacle)
        context_tokens = min(settings.context_tokens, image.context_tokens)
        needed_bytes = choice.needed_bytes(image, settings.rows, context_tokens)
    except InferenceApiError as error:
        return [Finding("engine", "fault", str(error), "or leave INFERENCE_API_ENGINE away")]
    return [_engine_finding(choice.engine, choice.reason), _check_memory(settings, needed_bytes, context_tokens)]


def check_default_engine(settings: Settings) -> list[Finding]:
    """Do the same for the default model, before there is an image of it."""
    weight_bits, kv_bits, findings = FAST_WEIGHT_BITS, FAST_KV_BITS, []
    try:
        from inference_api.backend.engine_choice import choose_engine
        from inference_api.backend.engines.fused_library import find_obstacle

        choice = choose_engine(settings, None, find_obstacle)
        if choice.engine != "fused":
            weight_bits, kv_bits = FP32_BITS, FP32_BITS
        elif not choice.native:
            weight_bits = TORCH_WEIGHT_BITS
        findings.append(_engine_finding(choice.engine, choice.reason))
    except ImportError:
        pass
    if settings.layers or settings.no_weights:
        return findings
    context_tokens = min(settings.context_tokens, DEFAULT_CONTEXT_TOKENS)
    kv_bytes = settings.rows * context_tokens * DEFAULT_KV_BYTES_PER_TOKEN
    needed_bytes = (DEFAULT_WEIGHT_BYTES * weight_bits + kv_bytes * kv_bits) // FP32_BITS
    return [*findings, _check_memory(settings, needed_bytes, context_tokens)]


def _engine_finding(engine: str, reason: str) -> Finding:
    if engine == "fused" and reason:
        advice = "on Debian and Ubuntu: apt-get install g++" if "g++" in reason else "a processor with AVX2 and F16C"
        return Finding("engine", "warning", f"fused, without its fast library: {reason}", advice)
    return Finding("engine", "ok", f"{engine}, because {reason}" if reason else engine)


def _check_memory(settings: Settings, needed_bytes: int, context_tokens: int) -> Finding:
    free = free_bytes()
    try:
        check_memory(needed_bytes, free, settings.rows, context_tokens)
    except InferenceApiError as error:
        return Finding("memory", "fault", str(error), "or stop what holds the memory")
    text = f"{needed_bytes / 2**20:.0f} MiB for weights and KV cache, {free / 2**20:.0f} MiB free"
    return Finding("memory", "ok", text)
