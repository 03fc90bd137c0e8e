"""What an engine can be told. Sizes that are measured at start-up are arguments elsewhere, never written back here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Meta(description="weights and KV; auto: bfloat16 where the processor has it, else float32"),
    ] = "auto"
    device: Annotated[str, Meta(description="auto, cpu, cuda, cuda:N")] = "auto"
    quantization: Annotated[
        Literal["none", "int8"],
        Meta(
            description="int8: the matrices as whole numbers with a scale per row: half of bfloat16's memory; on CPUs"
        ),
    ] = "none"
    batch_invariant: Annotated[
        bool, Meta(description="a token's logits are the same to the bit whatever else is computed with it; on CPUs")
    ] = False
    max_model_len: Annotated[
        int,
        Meta(
            ge=0,
            extra_json_schema={"unit": "tokens"},
            description="longest prompt + output; 0: the model's own, or what the KV pool holds",
        ),
    ] = 0
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096, description="most requests in one step")] = 64
    max_num_batched_tokens: Annotated[
        int, Meta(ge=16, le=1 << 20, extra_json_schema={"unit": "tokens"}, description="most tokens in one step")
    ] = 2048
    max_prefill_chunk: Annotated[
        int,
        Meta(
            ge=0,
            extra_json_schema={"unit": "tokens"},
            description="most new tokens of one request in a step; 0: no cap",
        ),
    ] = 1536
    max_step_ms: Annotated[
        int, Meta(ge=1, le=60_000, extra_json_schema={"unit": "ms"}, description="no step is planned longer than this")
    ] = 500
    composer: Annotated[
        Literal["value", "fcfs", "static"],
        Meta(
            description="who is in a step; value: by class, deadline and cost; to compare with: fcfs: first come first "
            "served; static: a batch runs until all of it ended"
        ),
    ] = "value"
    block_size: Annotated[
        Literal[8, 16, 32, 64, 128], Meta(extra_json_schema={"unit": "tokens"}, description="tokens per KV block")
    ] = 16
    enable_prefix_caching: Annotated[bool, Meta(description="reuse the KV of common prompt prefixes")] = True
    eviction: Annotated[
        Literal["lookahead", "lru", "s3fifo"],
        Meta(
            description="which cached KV block is given up first: the one of which the fewest uses are expected, as "
            "learned from how often and after which pause others were used, where that clearly finds more, and "
            "elsewhere the least recently used; always the least recently used; by S3-FIFO"
        ),
    ] = "lookahead"
    gpu_memory_utilization: Annotated[
        float, Meta(gt=0, lt=1, description="share of a GPU's memory for weights, activations and KV")
    ] = 0.90
    kv_cache_bytes: Annotated[
        int,
        Meta(
            ge=0,
            extra_json_schema={"unit": "bytes"},
            description="size of the KV pool; 0: a GPU's share above, on a CPU min(2 GB, 25 % of memory)",
        ),
    ] = 0
    host_cache_bytes: Annotated[
        int,
        Meta(
            ge=0,
            extra_json_schema={"unit": "bytes"},
            description="main memory to which the KV of preempted requests is copied, instead of being computed again; "
            "0: none. On a CPU it would copy main memory to main memory",
        ),
    ] = 0
    host_copy_bytes_per_s: Annotated[
        int,
        Meta(
            ge=0,
            extra_json_schema={"unit": "bytes/s"},
            description="most that is copied to and from that memory, so that computing has the rest of its bandwidth; "
            "0: no limit",
        ),
    ] = 0
    kv_disk_folder: Annotated[
        str,
        Meta(
            description="where each engine keeps prefix blocks, in a folder of its own, also for its next start; "
            "they are read into the memory of host_cache_bytes. Empty: nowhere"
        ),
    ] = ""
    kv_disk_bytes: Annotated[
        int, Meta(ge=0, extra_json_schema={"unit": "bytes"}, description="most that an engine keeps there")
    ] = 0
    peer_address: Annotated[
        str,
        Meta(
            description="where the engine lends KV blocks to other engines, and that it fetches theirs: tcp:HOST:PORT, "
            "unix:PATH; port 0: any that is free; empty: neither"
        ),
    ] = "tcp:127.0.0.1:0"
    peer_bytes_per_s: Annotated[
        int,
        Meta(
            ge=0,
            extra_json_schema={"unit": "bytes/s"},
            description="what another engine is believed to send before it was measured; 0: nothing is fetched",
        ),
    ] = 500_000_000
    peer_max_bytes_per_s: Annotated[
        int,
        Meta(
            ge=0,
            extra_json_schema={"unit": "bytes/s"},
            description="most that is fetched from other engines, and as much again that is lent to them, so that "
            "computing has the rest of the memory's bandwidth; 0: no limit",
        ),
    ] = 0
    role: Annotated[
        Literal["both", "prefill", "decode"],
        Meta(
            description="what the replica is meant for, until `shoal role` says otherwise: computing prompts, which "
            "others then decode, going on with what others computed, or both"
        ),
    ] = "both"
    threads: Annotated[
        int, Meta(ge=0, description="CPU threads for tensor work; 0: the cores that are really there")
    ] = 0
    kernels: Annotated[
        Literal["auto", "off"],
        Meta(description="auto: shoal's own kernels on a CPU, where a C++ compiler is found; off: torch alone"),
    ] = "auto"
    tensor_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="processes that share each layer of the model, and its KV; must divide the model's heads; "
            "kv_cache_bytes, host_cache_bytes and threads are for all of them together",
        ),
    ] = 1
    context_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=16,
            description="groups of such processes that share the KV of each request: a KV block has block_size "
            "tokens in each of them",
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Meta(
            ge=1, le=16, description="groups of such processes that have some of the layers each, one after the other"
        ),
    ] = 1
    steps_in_flight: Annotated[
        int,
        Meta(
            ge=1,
            le=8,
            description="plans made before the first result returns; at least pipeline_parallel_size",
        ),
    ] = 1
    journal: Annotated[
        str, Meta(description="file that records every input and output of the scheduler; empty: off")
    ] = ""
