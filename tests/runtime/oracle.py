"""The tiny model of tests/tiny_bundle.py in NumPy over the reference cache: what an engine must compute."""

import numpy as np
import onnx

from edgekv import layout
from edgekv.reference import ReferenceCache
from edgekv.reference.rotary import rotate
from edgekv.reference.self_index import SelfIndexCache
from edgekv.retrieval import candidates_for, parse_retrieval


class OracleModel:
    """Feeds one token at a time and compacts at boundaries; `position` is committed."""

    def __init__(self, bundle):
        self.bundle = bundle
        model = onnx.load(bundle.graph_path)
        self.w = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
        self.caches = [
            SelfIndexCache(p) if layout.is_selfindex(p) else ReferenceCache(p, bundle.inv_freq(i))
            for i, p in enumerate(layer["params"] for layer in bundle.layers)
        ]
        self.retrieval = parse_retrieval(bundle.manifest["policy"]["retrieve"]) if bundle.compressed else None
        self.inv_freq = np.asarray(bundle.inv_freq(0), np.float32)
        self.position = self.base = self.shift = 0
        self.rank_limit = max(layout.held_tokens(layer["params"]) for layer in bundle.layers)
        self.ranked = bundle.layers[0]["params"]["positions"] == 1

    def feed(self, token: int, prompt: bool = False) -> np.ndarray:
        """Logits float32 [vocab] after this token; a token of a prompt attends to every compressed token."""
        if self.retrieval is not None:
            for cache in self.caches:
                cache.retrieve = None if prompt else self.retrieval.resolve(cache.count) or None
                cache.candidates = candidates_for(cache.retrieve or 0, self.bundle.manifest["policy"]["rerank"])
        x = np.eye(self.w["embedding"].shape[0], dtype=np.float32)[token]
        place = np.array([self.position - self.shift])
        for i, cache in enumerate(self.caches):
            p = cache.params
            q = (x @ self.w[f"wq{i}"]).reshape(1, p["q_heads"], p["key_dim"])
            k = (x @ self.w[f"wk{i}"]).reshape(1, p["kv_heads"], p["key_dim"])
            v = (x @ self.w[f"wv{i}"]).reshape(1, p["kv_heads"], p["value_dim"])
            q, k = (self._rotate(a, place) for a in (q, k))
            x = x + cache.attend(q, k, v, self.position).reshape(-1) @ self.w[f"wo{i}"]
        self.position += 1
        full = self.caches[0].params["keep"] == 0 and self.position > self.rank_limit  # the text ends here
        if self.position == self.base + self.bundle.boundary and not full:
            rank = min(self.position, self.rank_limit) if self.ranked else self.position
            for cache in self.caches:
                cache.compact(self.position, *([] if self.retrieval is not None else [rank]))
            self.base, self.shift = self.position, self.position - rank
        return x @ self.w["head"]

    def read(self, tokens) -> np.ndarray:
        """Logits after the last of these tokens, which are a prompt."""
        for token in tokens:
            logits = self.feed(int(token), prompt=True)
        return logits

    def _rotate(self, heads: np.ndarray, place: np.ndarray) -> np.ndarray:
        return rotate(heads.transpose(1, 0, 2), place, self.inv_freq, 2 * self.inv_freq.size).transpose(1, 0, 2)
