"""Whose threads a session computes with: its own ones, or those of one pool that all sessions of the process share.

Threads of a pool spin for a while after a step. With a pool each, those of a target that has just verified take the processors from
the draft that goes on, and the other way round.
"""

from __future__ import annotations

import onnxruntime as ort

from edgekv import machine

_shared: int | None = None  # threads of the process's pool, once there is one


def share(threads: int | None) -> None:
    """From now on all sessions of this process compute with the same threads, by default as many as an engine takes by default. For programs,
    before they load engines.

    There is no way back in a process, so a second call changes nothing. Versions of ONNX Runtime that cannot do it go on with a pool
    for each session, whose threads sleep as soon as a step has ended.
    """
    global _shared
    if _shared is None:
        _shared = threads or machine.default_threads()
        if _can_share():
            ort.set_global_thread_pool_sizes(_shared, 1)


def size(threads: int) -> int:
    """Threads that a session gets which asks for `threads`."""
    return threads if _shared is None else _shared


def use(options: ort.SessionOptions, threads: int) -> None:
    """Gives a session `threads` threads of its own, or those of the process's pool."""
    if _shared is not None and _can_share():
        options.use_per_session_threads = False
        return
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    if _shared is not None:
        options.add_session_config_entry("session.force_spinning_stop", "1")


def _can_share() -> bool:
    return hasattr(ort, "set_global_thread_pool_sizes")
