"""ONNX Runtime on the CPU: one arena, every state bound as input and output on the same bytes, nothing allocated per step."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from edgekv import layout, machine, native
from edgekv.bundle import Bundle
from edgekv.engine import Occupancy, Reads, accounting, pool, products
from edgekv.engine.index import Index
from edgekv.errors import BundleError, CacheFullError, NativeError, UserError
from edgekv.retrieval import Retrieval

CPU = ["CPUExecutionProvider"]
ALIGNMENT = 256  # of the arena and of every state in it
_MAX_BINDINGS = 64  # remembered sizes of a step; each holds only references
_ORT_ERRORS = tuple(
    error for error in vars(ort.capi.onnxruntime_pybind11_state).values() if isinstance(error, type) and issubclass(error, Exception)
) + (RuntimeError,)
_OTHER_LAYER = "the state was made for a layer with other parameters"  # plugins/cpu/state.cpp says it of a state that is not the graph's


def _mib(count: int) -> str:
    return f"{count / (1 << 20):,.0f} MiB"


def check_memory(bundle: Bundle, logits_bytes: int, beside: Bundle | None = None) -> None:
    """Raises UserError before anything is allocated when weights, arena and logits exceed the memory that is available.

    Weights count once: ONNX Runtime maps the file, and pages that it repacks can be dropped again. `beside` is a second bundle.
    """
    bundles = [bundle] if beside is None else [bundle, beside]
    weights, arenas = sum(b.weight_bytes for b in bundles), sum(b.arena_bytes for b in bundles)
    needed, available = weights + arenas + logits_bytes, machine.available_memory()
    if needed > available:
        names = " and ".join(str(b.folder) for b in bundles)
        raise UserError(
            f"{names} need{'s' if beside is None else ''} {_mib(needed)} of memory (weights {_mib(weights)}, KV cache "
            f"{_mib(arenas)}, logits {_mib(logits_bytes)}) and {_mib(available)} are available; close other programs "
            "or export with a smaller --kv-budget or smaller --weights."
        )


def _query_plane(params: dict[str, Any], state: np.ndarray) -> np.ndarray:
    """The bytes of a state that hold the observed queries; empty for keep rules without scores."""
    at = layout.state_layout(params)
    size = params["q_heads"] * params.get("observe", 0) * params["key_dim"] * layout.element_bytes(params)
    return state[at.tail_q : at.tail_q + (size if layout.keeps_scores(params) else 0)]


def session_options(threads: int, library: Path = native.LIBRARY) -> ort.SessionOptions:
    """Options of every session that edgekv makes, with the operators of one library registered."""
    options = ort.SessionOptions()
    pool.use(options, threads)
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 4  # errors come back as exceptions; printing them too would break the one sentence
    # the int8 path of MatMulNBits: activations are quantised per block of 32, which the exporter's parity gate has judged
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "4")
    options.add_session_config_entry("session.intra_op.allow_spinning", "1")
    options.register_custom_ops_library(str(library))
    return options


def open_session(bundle: Bundle, options: ort.SessionOptions, providers: list) -> tuple[ort.InferenceSession, bool, products.CpuGraph | None]:
    """A session of the bundle's graph, whether the graph takes `shift`, and what was loaded in its place for the CPU. BundleError when
    graph and manifest disagree.
    """
    path, graph = bundle.graph_path, None
    try:
        if providers == CPU:
            # where the weights are that the graph names, since it comes as bytes and not from its folder
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
            graph = products.for_cpu(path.read_bytes())
            session = ort.InferenceSession(graph.data, options, providers=providers)
        else:
            session = ort.InferenceSession(str(path), options, providers=providers)
    except (*_ORT_ERRORS, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BundleError(f"ONNX Runtime {ort.__version__} cannot load {path}: {reason}") from None
    wanted = {f"state.{index}": [layer["bytes"]] for index, layer in enumerate(bundle.layers)}
    given = {item.name: item.shape for item in session.get_inputs()}
    states = {name: shape for name, shape in given.items() if name.startswith("state.")}
    others = given.keys() - states.keys()
    outputs, chosen = {item.name for item in session.get_outputs()}, {products.TILES} if graph is not None and graph.logit_bytes else set()
    if (
        states != wanted
        or not {"input_ids", "position", "rows"} <= others - chosen <= {"input_ids", "position", "rows", "shift"}
        or outputs != {"logits"} | {f"{name}.out" for name in wanted}
    ):
        raise BundleError(f"{path} does not have the inputs and outputs that its manifest describes; export the bundle again.")
    return session, "shift" in others, graph


def run_bound(session: ort.InferenceSession, binding: Any, bundle: Bundle) -> None:
    """Runs a step; NativeError with the operator's own sentence when it refuses, BundleError when states do not fit the graph."""
    try:
        session.run_with_iobinding(binding)
    except _ORT_ERRORS as error:
        if _OTHER_LAYER in str(error):
            raise BundleError(f"The graph and the manifest of {bundle.folder} describe different caches; export the bundle again.") from None
        raise NativeError(f"ONNX Runtime could not run {bundle.graph_path}: {error}") from None


class OnnxRuntimeEngine:
    """Runs a bundle on the CPU; see `edgekv.engine.Engine` for what each method promises.

    threads   of the graph and of compaction; None takes the physical cores this process may use, and a shared pool has its own number
    max_rows  rows of logits that one step can give
    beside    see `edgekv.engine.load`

    Raises UserError when memory or threads do not fit, BundleError when the graph and the manifest disagree.
    """

    def __init__(
        self,
        bundle: Bundle,
        threads: int | None = None,
        max_rows: int = 1,
        beside: Bundle | None = None,
    ):
        if threads is not None and not 1 <= threads <= 1024:
            raise UserError("--threads must be between 1 and 1024.")
        self.bundle = bundle
        self.threads = pool.size(threads or machine.default_threads())
        self.boundary = bundle.boundary
        self.chunk = min(bundle.chunk, self.boundary)
        self.max_rows = max_rows
        self.vocab = bundle.model["vocab"]
        self._params = [native.LayerParams(**layer["params"]) for layer in bundle.layers]
        tables = [np.asarray(bundle.inv_freq(index), np.float32) for index in range(len(bundle.layers))]
        self._inv_freq = [table if table.size else None for table in tables]
        self._ranked = bundle.layers[0]["params"].get("positions") == layout.POSITIONS["cache"]
        self._rank_limit = max(params.body_slots for params in self._params)
        self._held = [layout.held_tokens(layer["params"]) for layer in bundle.layers]
        self.capacity = bundle.capacity
        self.observe = max(layer["params"].get("observe", 0) for layer in bundle.layers)

        check_memory(bundle, max_rows * self.vocab * 4, beside)
        try:
            self.arena = native.aligned_bytes(bundle.arena_bytes, ALIGNMENT)
            self._logits = np.empty((1, max_rows, self.vocab), np.float32)
        except MemoryError:
            raise UserError(
                f"The system refused {_mib(bundle.arena_bytes)} for the KV cache; export with a smaller --kv-budget."
            ) from None
        starts = np.cumsum([0] + [-(-layer["bytes"] // ALIGNMENT) * ALIGNMENT for layer in bundle.layers])
        self._states = [self.arena[start : start + layer["bytes"]] for start, layer in zip(starts, bundle.layers, strict=False)]
        self._headers = [state[: layout.HEADER.itemsize].view(layout.HEADER) for state in self._states]
        first = layout.HEADER.fields["hidden_from"][1]
        self._hidden = [state[first : first + 8].view(np.int32) for state in self._states]  # hidden_from, hidden_to
        self._index = Index(bundle, self._states)
        # what hold_queries() found, until the compaction that it is for
        self._tail_q = [_query_plane(layer["params"], state) for layer, state in zip(bundle.layers, self._states, strict=True)]
        self._held_queries = [np.empty_like(plane) for plane in self._tail_q]
        self._holds_queries = False
        self._ids = np.zeros((1, self.chunk), np.int64)
        self._position, self._shift = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._rows = np.zeros(max_rows, np.int64)
        self._session: ort.InferenceSession | None = None
        # the first _tile_count name the tiles of logits that steps compute, 0: all; _chosen of them hold _chosen_tokens
        self._tiles, self._tile_count = np.zeros(-(-self.vocab // products.TILE), np.int32), 0
        self._chosen, self._chosen_tokens = 0, np.zeros(0, np.int64)
        self._open()
        machine.huge_pages()
        self._bindings: OrderedDict[tuple[int, int, int], Any] = OrderedDict()
        self._compact_layers: native.Compactor | None = native.Compactor(self._params, self._states, self._inv_freq)
        self.reset()

    def _open(self) -> None:
        """Makes the run-time's session."""
        self._session, self._has_shift, graph = open_session(self.bundle, session_options(self.threads), CPU)
        self._logit_bytes = graph.logit_bytes
        machine.populate(self.bundle.folder, graph.ranges)

    def _binding(self, count: int, wanted: int) -> Any:
        """The IO binding for blocks of T tokens with R rows of logits, all or those chosen: views of the one set of buffers."""
        key = (count, wanted, self._tile_count)
        if key in self._bindings:
            self._bindings.move_to_end(key)
            return self._bindings[key]
        value = ort.OrtValue.ortvalue_from_numpy
        binding = self._session.io_binding()
        binding.bind_ortvalue_input("input_ids", value(self._ids[:, :count]))
        binding.bind_ortvalue_input("position", value(self._position))
        binding.bind_ortvalue_input("rows", value(self._rows[:wanted]))
        if self._has_shift:
            binding.bind_ortvalue_input("shift", value(self._shift))
        if self._logit_bytes:
            binding.bind_ortvalue_input(products.TILES, value(self._tiles[: self._tile_count]))
        for index, state in enumerate(self._states):
            shared = value(state.view(np.int8))
            binding.bind_ortvalue_input(f"state.{index}", shared)
            binding.bind_ortvalue_output(f"state.{index}.out", shared)
        binding.bind_ortvalue_output("logits", value(self._logits[:, :wanted]))
        self._bindings[key] = binding
        if len(self._bindings) > _MAX_BINDINGS:
            self._bindings.popitem(last=False)
        return binding

    @property
    def retrieval(self) -> Retrieval | None:
        return self._index.amount

    def retrieve(self, amount: Retrieval, rerank: int | None = None) -> None:
        self._index.retrieve(amount, rerank)

    def reads(self) -> Reads:
        return self._index.reads()

    def step(self, tokens: np.ndarray, position: int, rows: np.ndarray) -> np.ndarray:
        self._index.choose()
        return self._run(tokens, position, rows)

    def read(self, tokens: np.ndarray, position: int, rows: np.ndarray) -> np.ndarray:
        self._index.attend_to_all()
        return self._run(tokens, position, rows)

    def _run(self, tokens: np.ndarray, position: int, rows: np.ndarray) -> np.ndarray:
        count, wanted = len(tokens), len(rows)
        if not (1 <= count <= self.chunk and 1 <= wanted <= self.max_rows):
            raise NativeError(f"a step of {count} tokens and {wanted} rows is outside 1..{self.chunk} and 1..{self.max_rows}")
        if not 0 <= position - self._tail_base <= self.boundary - count:
            raise NativeError(f"{count} tokens after position {position} do not fit the tail that starts at {self._tail_base}")
        self._ids[0, :count] = tokens
        self._position[0] = position
        self._rows[:wanted] = rows
        run_bound(self._session, self._binding(count, wanted), self.bundle)
        return self._logits[0, :wanted]

    def look(self, window: int | None, tokens: np.ndarray | None = None) -> int:
        lanes = layout.LANES
        self._index.limit(window)
        for params, header, hidden in zip(self._params, self._headers, self._hidden, strict=True):
            if params.format == layout.FORMATS["selfindex"]:
                continue
            end = 0 if window is None else (int(header["body_count"][0]) - window) // lanes * lanes
            hidden[:] = (lanes, end) if end > lanes else 0
        self._tile_count = 0
        if tokens is None or not self._logit_bytes:
            return 0
        if tokens is not self._chosen_tokens:
            tiles = np.unique(tokens // products.TILE)
            self._tiles[: tiles.size] = tiles
            self._chosen, self._chosen_tokens = tiles.size, tokens
        self._tile_count = self._chosen
        return self._logit_bytes * (self._tiles.size - self._chosen) // self._tiles.size

    def hold_queries(self) -> None:
        if self.observe < 1:
            raise NativeError("this cache chooses by no queries")
        for kept, plane in zip(self._held_queries, self._tail_q, strict=True):
            kept[:] = plane
        self._holds_queries = True

    def compact(self, position: int) -> None:
        rank = min(position, self._rank_limit) if self._ranked else position
        for params in self._params:
            held = self._held[params.layer]
            if params.keep == layout.KEEPS["full"] and position > held:
                raise CacheFullError(f"layer {params.layer} holds {held} tokens and evicts none")
        if self._holds_queries:
            for plane, kept in zip(self._tail_q, self._held_queries, strict=True):
                plane[:] = kept
            self._holds_queries = False
        self._compact_layers(position, rank, self.threads)
        self._index.grown()
        self._tail_base = position
        self._shift[0] = position - rank

    def reset(self) -> None:
        self._holds_queries = False
        for params, state in zip(self._params, self._states, strict=True):
            native.state_init(params, state)
        self._index.grown()
        self._tail_base = 0
        self._shift[0] = 0

    def state_hash(self, position: int) -> int:
        return accounting.combined(native.state_hash(p, state, position) for p, state in zip(self._params, self._states, strict=True))

    def occupancy(self, position: int) -> Occupancy:
        return accounting.occupancy(self.bundle, self._headers, position - self._tail_base)

    def close(self) -> None:
        self._bindings.clear()
        self._session = self._compact_layers = None
        self._states, self._headers, self._hidden, self._tail_q, self._held_queries = [], [], [], [], []
        self._index.close()
        self.arena = np.empty(0, np.uint8)
