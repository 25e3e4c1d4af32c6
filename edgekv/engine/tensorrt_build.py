"""Builds a TensorRT engine from a lowered graph (edgekv.export.to_tensorrt). Works with TensorRT 10.3 to 11 and with TensorRT-RTX."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgekv import protobuf
from edgekv.errors import UserError

LEAST_VERSION = (10, 3)  # aliased plugin inputs and outputs
LEAST_WITHOUT_PLUGIN = (10, 15)  # TensorScatter: caches that TensorRT itself updates in place
# Bytes of host memory that building takes at its peak, per byte of weights, beside a fixed part (docs/tensorrt.md: measured).
PEAK_PER_WEIGHT_BYTE, PEAK_FIXED = 3.0, 900 << 20
_loaded: set[tuple[str, str]] = set()  # (TensorRT, library) of this process
PLUGINS = {("edgekv", "BoundedCacheAttention"), ("edgekv", "SignVQRetrieval")}


@dataclass(frozen=True)
class Profile:
    """Shapes the engine is tuned for: up to `tokens` tokens per step (best at `best`) and `rows` rows of logits."""

    name: str
    tokens: int
    best: int
    rows: int


def profiles(chunk: int, rows: int) -> list[Profile]:
    """One for decoding and verification, one for prefill."""
    short = min(rows, chunk)
    made = [Profile("decode", short, 1, rows)]
    if chunk > short:
        made.append(Profile("prefill", chunk, chunk, rows))
    return made


def is_rtx(trt: Any) -> bool:
    """TensorRT-RTX numbers its versions on its own (1.x) and can build for a device that is not here."""
    return "rtx" in trt.__name__


def check_version(trt: Any, with_plugin: bool = True) -> None:
    """UserError for a TensorRT that is too old; the standard operators need a newer one than the plugin."""
    if is_rtx(trt):
        return
    version = tuple(int(part) for part in trt.__version__.split(".")[:2])
    if version < LEAST_VERSION:
        wanted = ".".join(map(str, LEAST_VERSION))
        raise UserError(f"TensorRT {trt.__version__} cannot update a cache in place; {wanted} or newer is needed (JetPack 6.1).")
    if version < LEAST_WITHOUT_PLUGIN and not with_plugin:
        wanted = ".".join(map(str, LEAST_WITHOUT_PLUGIN))
        raise UserError(
            f"TensorRT {trt.__version__} cannot update a cache in place without edgekv's plugin; {wanted} or newer is needed (JetPack 7.2), "
            "or leave out --no-plugin."
        )


def estimated_peak(weight_bytes: int) -> int:
    """Host memory that building needs, in bytes."""
    return PEAK_FIXED + int(PEAK_PER_WEIGHT_BYTE * weight_bytes)


def load_plugins(trt: Any, plugin: Path) -> set[tuple[str, str]]:
    """Loads the plugin library; returns the (namespace, name) pairs that TensorRT can now make."""
    registry = trt.get_plugin_registry()
    key = (trt.__name__, str(plugin.resolve()))
    if key not in _loaded:  # a second time TensorRT finds its creators taken and says no
        try:
            handle = registry.load_library(str(plugin))
        except Exception as error:  # the bindings raise several kinds
            raise UserError(f"TensorRT {trt.__version__} refuses the plugin library {plugin}: {error}.") from None
        if handle is None:
            raise UserError(f"TensorRT {trt.__version__} refuses the plugin library {plugin}.")
        _loaded.add(key)
    creators = registry.all_creators if hasattr(registry, "all_creators") else registry.plugin_creator_list
    return {(creator.plugin_namespace, creator.name) for creator in creators}


def missing_operators(trt: Any, parser: Any, graph: Path, plugins: Iterable[tuple[str, str]]) -> list[str]:
    """Operators of the graph that neither the parser nor a loaded plugin offers, before anything is built."""
    _, operators = protobuf.scan_model(graph)
    offered = set(plugins)
    missing = []
    for domain, name in sorted(operators):
        if domain in ("", "ai.onnx"):
            if not parser.supports_operator(name):
                missing.append(name)
        elif (domain, name) not in offered:
            missing.append(f"{domain}::{name}")
    return missing


def build(
    trt: Any,
    graph: Path,
    plugin: Path | None,
    wanted: list[Profile],
    *,
    messages: list[str],
    logger: Any,
    workspace: int | None = None,
    timing_cache: Path | None = None,
    sm: int | None = None,
    level: int | None = None,
    masks: Iterable[int] = (),
    progress: Callable[[str], None] | None = None,
) -> bytes:
    """The serialised engine.

    graph         model.onnx with its data beside it
    plugin        library to load first, None for a graph without plugins
    messages      what the logger has collected; the last one explains a failure
    workspace     most device memory for temporary data, in bytes
    timing_cache  file to read tactics' timings from and write them to
    sm            compute capability to build for, for TensorRT-RTX: 86
    masks         slots of mask.0, mask.1, ... of a graph without the plugin
    progress      told what TensorRT is at, such as "Building Engine, 3 of 7"

    Raises UserError with TensorRT's own reason.
    """

    def reason() -> str:
        return messages[-1].rstrip(".") if messages else "it gave no reason"

    check_version(trt, plugin is not None)
    offered = load_plugins(trt, plugin) if plugin else set()
    builder = trt.Builder(logger)
    flags = trt.NetworkDefinitionCreationFlag
    network = builder.create_network(1 << int(flags.STRONGLY_TYPED) if hasattr(flags, "STRONGLY_TYPED") else 0)
    parser = trt.OnnxParser(network, logger)
    missing = missing_operators(trt, parser, graph, offered)
    if missing:
        raise UserError(f"TensorRT {trt.__version__} lacks what the graph needs: {', '.join(missing)}.")
    if not parser.parse_from_file(str(graph)):
        first = parser.get_error(0).desc() if parser.num_errors else reason()
        raise UserError(f"TensorRT {trt.__version__} cannot parse {graph}: {first}.")

    config = builder.create_builder_config()
    if hasattr(trt.PreviewFeature, "ALIASED_PLUGIN_IO_10_03"):
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    if workspace:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace)
    if level is not None:
        config.builder_optimization_level = level
    if is_rtx(trt) and sm is not None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), 0)
    cache = _read_timing_cache(config, timing_cache)
    for profile in wanted:
        ranges = builder.create_optimization_profile()
        ranges.set_shape("input_ids", (1, 1), (1, profile.best), (1, profile.tokens))
        ranges.set_shape("rows", (1,), (1,), (profile.rows,))
        for index, slots in enumerate(masks):
            ranges.set_shape(f"mask.{index}", *((1, 1, rows, slots) for rows in (1, profile.best, profile.tokens)))
        config.add_optimization_profile(ranges)
    monitor = make_monitor(trt, progress) if progress and hasattr(trt, "IProgressMonitor") else None
    if monitor is not None:
        config.progress_monitor = monitor
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise UserError(f"TensorRT {trt.__version__} could not build the engine: {reason()}.")
    if cache is not None:
        timing_cache.write_bytes(bytes(cache.serialize()))
    return bytes(plan)


def make_monitor(trt: Any, progress: Callable[[str], None]) -> Any:
    """TensorRT's progress monitor that tells `progress` about the outermost phase."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self):
            trt.IProgressMonitor.__init__(self)
            self.outer: tuple[str, int] | None = None

        def phase_start(self, phase_name, parent_phase, num_steps):
            if self.outer is None:
                self.outer = phase_name, num_steps

        def step_complete(self, phase_name, step):
            if self.outer and phase_name == self.outer[0]:
                progress(f"{phase_name}, {step + 1} of {self.outer[1]}")
            return True

        def phase_finish(self, phase_name):
            if self.outer and phase_name == self.outer[0]:
                self.outer = None

    return Monitor()


def _read_timing_cache(config: Any, path: Path | None) -> Any:
    if path is None:
        return None
    cache = config.create_timing_cache(path.read_bytes() if path.is_file() else b"")
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        cache = config.create_timing_cache(b"")  # of another version or device: measured anew
        config.set_timing_cache(cache, ignore_mismatch=False)
    return cache
