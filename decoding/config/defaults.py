"""Defaults and assumptions of decoding, with unit and reason.

Constants of adaptive draft lengths are in `speculation/draft_length.py`, those of the memory tiers
in `offload`, and sizes of measurements next to what they measure. docs/algorithm.md and
docs/memory.md have more on the measured ones.
"""

from __future__ import annotations

# -- draft lengths, in tokens ----------------------------------------------------------------------

# Longest adaptive draft that the target verifies.
MAX_DRAFT = 64
# The same in split modes, where few draft tokens are rejected.
MAX_SPLIT_DRAFT = 128
# Longest draft that the retrieval level verifies. Short, since this verification costs compute.
MAX_INNER_DRAFT = 16
# First draft of an engine if verification is bound by the host link: its time does not depend on
# the number of rows.
FIRST_DRAFT_OVER_LINK = 32
# First draft of an engine if verification is bound by compute, which grows with the rows.
FIRST_DRAFT_ON_DEVICE = 6
FIRST_INNER_DRAFT = 2
# Size of the n-gram of prompt lookup when it replaces a draft model.
LOOKUP_NGRAM = 3

# -- the draft model -------------------------------------------------------------------------------

# Slots of the draft's cache, in tokens, that are filled before its window slides.
DRAFT_SLACK = 64
# Bytes of weights from which a draft model is sharded over the ranks: reading them takes longer
# than the collectives of a sharded model.
SPLIT_DRAFT_BYTES = 3 << 30

# Maximum number of concurrent requests if none is set: more of them would save little.
MAX_CONCURRENCY = 8

# -- the retrieval cache ---------------------------------------------------------------------------

# Retrieval budget before anything is known of the models, in tokens per head.
DEFAULT_RETRIEVAL_BUDGET = 4096
# Candidate budgets, in tokens per head.
RETRIEVAL_BUDGETS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)
# Multiple of tokens that the cache of a context within the budget has room for, with CUDA graphs.
WHOLE_CONTEXT_STEP = 512
# Minimum number of tokens between selections. Over a link, verification streams all keys anyway, so
# each one also selects; on the device a selection costs compute.
SELECTION_INTERVAL_OVER_LINK = 1
SELECTION_INTERVAL_ON_DEVICE = 16

# -- the target's cache ----------------------------------------------------------------------------

# Tokens of host layers that accumulate on the device before they are written back, without
# retrieval.
BOUNDARY_BLOCK = 256

# Minimum number of recent tokens that stay in 16 bits on the device, after the split ones, and the
# number of tokens that are split at a time.
SPLIT_RECENT = 64
SPLIT_BLOCK = 64

# Candidate budgets of split layers are none, and powers of two from the first share of the context
# to the second, 512 or more (docs/results/more.md has what they gain).
SPLIT_BUDGET_SHARES = (1 / 5, 1 / 1.7)

# -- requests --------------------------------------------------------------------------------------

# Maximum number of new tokens of a request that does not set one.
NEW_TOKENS = 512

# -- prefill ---------------------------------------------------------------------------------------

# Maximum activation bytes and tokens of a prefill chunk: small enough to bound memory, large enough
# for efficient matmuls.
PREFILL_ACTIVATION_BYTES = 256 << 20
MAX_PREFILL_CHUNK = 4096
# Smallest chunk, in tokens; larger chunks are multiples of it.
PREFILL_CHUNK_STEP = 256

# -- memory ----------------------------------------------------------------------------------------

# Share of free device memory that plans may use. `python -m bench memory` checks plans against it.
USABLE_SHARE = 0.9
# Bytes of CUDA graphs' launches, relative to what plans may use, from which on no more are
# captured. They are in what plans leave: half of it.
MAX_GRAPH_SHARE = 0.05
# largest share of a rank's memory for weights in 16 bits, where they could stay packed: the rest is
# for KV
MAX_WHOLE_SHARE = 0.5
# Bytes that the allocator reserves for activations, relative to those that are live at once
# (`python -m bench memory`).
ALLOCATOR_FACTOR = 2
# Float32 values per query row, head and slot of a masked forward, together with another forward
# that is captured concurrently. Fused kernels take less.
MASKED_VALUES_PER_SCORE = 6
# Rows of logits of which a verification computes the distributions at once.
PROBS_ROWS = 16
# Bytes per logit of these rows, beside the logits themselves: changed logits, those divided by the
# temperature, their probabilities, these in order, and their indices (int64); and what sorting
# takes on a GPU, where torch sorts all rows as one: pairs of row and index (int32) twice, and keys
# and pairs of a radix sort.
PROBS_BYTES_PER_LOGIT = 56
# Float32 tensors of all rows during a verification: logits, distributions, and those of the draft.
# Log-probabilities for a client follow, once no distributions are computed any more.
LOGIT_TENSORS = 3

# -- acceptance ------------------------------------------------------------------------------------

# Acceptance rate of the target with DEFAULT_RETRIEVAL_BUDGET that predictions assume: the one that
# the published 108 ms/token of Llama-2-7B imply (TriForce, arXiv 2404.11912).
ACCEPTANCE = 0.9
# Acceptance rate of the retrieval level, and the draft length it applies to. Assumed.
INNER_ACCEPTANCE = 0.7
INNER_DRAFT = 2
# The rejection ratio falls with the budget to this power: measured with SmolLM2 after 7,424 tokens,
# 0.3 to 0.9 for budgets from 768 to 2,048 (docs/log.md), and 1.0 to 1.4 up to 4,096, half of that
# context. This is conservative.
REJECTION_EXPONENT = 0.7
# Rejection ratio of drafts that attend to the high bytes of all layers, relative to that with
# DEFAULT_RETRIEVAL_BUDGET: with SmolLM2, relative to a tenth of the KV, 0.15 after 7,424 tokens and
# 0.18 after 15,872. Layers that are not split add the excess rejections of retrieval, by their
# share of all layers to the power of UNCOVERED_EXPONENT: with 0, 8, 15, 22 and 30 of 30 layers
# split, the rejection ratio was 0.077, 0.056, 0.053, 0.041 and 0.013 (a prototype, docs/log.md).
SPLIT_REJECTION = 0.2
UNCOVERED_EXPONENT = 0.6
# Rejection ratio of drafts that attend to high bytes and the low bits of all keys, relative to high
# bytes alone, and the power of the share of keys with which it falls if others lack these: 0.22,
# and 0.29, 0.40 and 0.51 with 4,096, 2,048 and 1,024 of 7,424 (docs/log.md).
EXACT_KEYS_REJECTION = 0.22
SPLIT_BUDGET_EXPONENT = 0.42
# Share of the high byte in the bytes of an element, and in the seconds of attending to it.
HIGH_BYTE_SHARE = 0.5
# Bytes of device memory traffic per byte of reconstructed elements: 12 of 16 bits in, 16 out.
RECONSTRUCTION_TRAFFIC = 1.75

# -- strategy selection by past requests -----------------------------------------------------------

# Weight of the assumed acceptance rate against measured ones, in tokens.
PRIOR_TOKENS = 24.0
# Tokens with one strategy from which its own rejections outweigh those of other strategies.
OWN_HISTORY_TOKENS = 200.0
# Weight of a request after the next one with the same strategy.
HISTORY_DECAY = 0.5
# Weight of a request in the ratios of other strategies, measured to predicted seconds.
UNUSED_DRIFT = 0.1
# A switch needs predicted seconds per token of at most this share of the current ones.
SWITCH_THRESHOLD = 0.95
# Minimum verified draft tokens and rounds of a request that calibrates the cost model.
MIN_TESTED = 32
MIN_ROUNDS = 2
# Bytes of a copy, and seconds of copying, when the link's rate is measured at startup. The bytes
# are those of a slot of the transfer ring.
LINK_PROBE_BYTES = 4 << 20
LINK_PROBE_SECONDS = 0.1
