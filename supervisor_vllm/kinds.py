"""The kinds of death: one table. What the operator reads in `status`, and what the policy switches on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """`oom`: memory ran out. `needs_person`: held at once, no launch can cure it."""

    name: str
    oom: bool
    means: str
    needs_person: bool = False


_TABLE = (
    Kind("gpu_weights", True, "the weights do not fit on the device"),
    Kind("gpu_profile", True, "the profile run (activations, multimodal encoder) ran out of device memory"),
    Kind("gpu_warmup", True, "the sampler or pooler warm-up ran out of device memory"),
    Kind("gpu_kv_none", True, "nothing is left for KV cache blocks"),
    Kind("gpu_kv_small", True, "the KV cache is smaller than one request of max_model_len"),
    Kind("gpu_kv_alloc", True, "allocating the KV cache tensors ran out of device memory"),
    Kind("gpu_graph", True, "CUDA graph capture ran out of device memory"),
    Kind("gpu_runtime", True, "device memory ran out while serving"),
    Kind("gpu_neighbour", True, "other processes hold the device memory at the start"),
    Kind("gpu_unstable", True, "free device memory moved while vLLM was profiling"),
    Kind("gpu_oom", True, "device memory ran out, the phase is not known"),
    Kind("host_oom_kill", True, "the kernel or a memory daemon killed it, or a process of it, for memory"),
    Kind("host_alloc", True, "a host memory allocation failed"),
    Kind("shm_full", True, "/dev/shm is full"),
    Kind("port_in_use", False, "the port is taken"),
    Kind("bad_arguments", False, "vLLM refused its arguments", needs_person=True),
    Kind("bad_model", False, "the model can not be loaded", needs_person=True),
    Kind("gpu_unavailable", False, "no usable device or driver", needs_person=True),
    Kind("gpu_fault", False, "the device or its driver is faulty", needs_person=True),
    Kind("engine_crash", False, "an exception or a fatal signal that is not about memory"),
    Kind("hung", False, "alive, but a completion does not come back"),
    Kind("killed", False, "killed by a signal, with no proof that memory was the reason"),
    Kind("stopped", False, "a person or a shutdown asked for it"),
    Kind("exited", False, "a one-shot program that ended by itself with an expected status"),
    Kind("unknown", False, "nothing decides it"),
)

KINDS = {kind.name: kind for kind in _TABLE}
