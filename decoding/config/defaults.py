"""Every number that decoding assumes where no setting says otherwise, with unit and reason.

Numbers of adaptive draft lengths stand in `speculation/draft_length.py`, those of the memory tiers
in `offload`, and sizes of measurements beside what they measure. docs/algorithm.md and
docs/memory.md tell more of those that were measured.
"""

from __future__ import annotations

# -- draft lengths, in tokens ----------------------------------------------------------------------

# The longest draft put before the target, where the length adapts.
MAX_DRAFT = 64
# The longest draft put before the retrieval level. It is short: its verification costs compute.
MAX_INNER_DRAFT = 16
# The first draft of an engine, where verifying costs link time, which is the same for many rows.
FIRST_DRAFT_OVER_LINK = 32
# The first draft of an engine, where verifying costs compute, which grows with the rows.
FIRST_DRAFT_ON_DEVICE = 6
FIRST_INNER_DRAFT = 2
# The n-gram that prompt lookup matches where it stands in for a draft model.
LOOKUP_NGRAM = 3

# -- the draft model -------------------------------------------------------------------------------

# Slots of the draft's cache, in tokens, that fill before its window slides.
DRAFT_SLACK = 64
# Bytes of weights from which a draft is split over the ranks: reading so many takes longer than
# the collectives of a split model.
SPLIT_DRAFT_BYTES = 3 << 30

# Texts at once where nothing is said, at most: what more of them would share is little.
MAX_CONCURRENCY = 8
# Bytes of a layer's weights on a rank, in the mean of the models whose short passes are recorded as
# CUDA graphs, from which texts share passes, of which many are not. So many take 2 TB/s as long as
# the launches of a layer, a dozen of 5 microseconds. Assumed; cautious for slower memory.
SHARED_LAYER_BYTES = 120e6

# -- the retrieval cache ---------------------------------------------------------------------------

# Tokens a head of the retrieval budget, where nothing is known of the models yet.
DEFAULT_RETRIEVAL_BUDGET = 4096
# The budgets of which one is chosen.
RETRIEVAL_BUDGETS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)
# Tokens that one selection serves at least. Over a link all keys come by anyway, so each
# verification selects; on the device a selection costs compute.
SELECTION_INTERVAL_OVER_LINK = 1
SELECTION_INTERVAL_ON_DEVICE = 16

# -- the target's cache ----------------------------------------------------------------------------

# Tokens of host layers that gather on the device before they are written back, without retrieval.
BOUNDARY_BLOCK = 256

# Tokens that stay in 16 bits on the device behind those with codes, at least, and how many get
# codes at a time.
SPLIT_RECENT = 64
SPLIT_BLOCK = 64

# -- texts ----------------------------------------------------------------------------------------

# Tokens that are written for a text, at most, where nobody says otherwise.
NEW_TOKENS = 512

# -- prefill ---------------------------------------------------------------------------------------

# Bytes that the activations of one chunk may take, and tokens of a chunk at most: few enough to
# bound memory, enough for large products.
PREFILL_ACTIVATION_BYTES = 256 << 20
MAX_PREFILL_CHUNK = 4096
# Tokens of the smallest chunk; larger ones are multiples of it.
PREFILL_CHUNK_STEP = 256

# -- memory ----------------------------------------------------------------------------------------

# The share of free device memory that is planned for. `python -m bench memory` holds plans to it.
USABLE_SHARE = 0.9
# What an allocator holds for activations, times those that live at once (`python -m bench memory`).
ALLOCATOR_FACTOR = 2
# Float32 values that a masked pass holds for each row of a head and slot, with another one that is
# recorded beside it.
MASKED_VALUES_PER_SCORE = 6
# Bytes of an entry of a row of logits: itself, its place in their order (int64), and what laws are
# made of and compared.
PROBS_BYTES_PER_LOGIT = 48

# -- acceptance ------------------------------------------------------------------------------------

# The target's acceptance rate with DEFAULT_RETRIEVAL_BUDGET that a prediction assumes: what the published
# 108 ms a token of Llama-2-7B imply (TriForce, arXiv 2404.11912).
ACCEPTANCE = 0.9
# The acceptance rate of the retrieval level, and the drafts that it is of. Assumed.
INNER_ACCEPTANCE = 0.7
INNER_DRAFT = 2
# Rejections fall with the budget to this power: SmolLM2 behind 7,424 tokens, from 768 to 2,048,
# 0.3 to 0.9 (docs/log.md). To 4,096, half of that context, it was 1.0 to 1.4: this is cautious.
REJECTION_EXPONENT = 0.7
# Rejections of what is drafted against the codes of all layers, as a share of those with
# DEFAULT_RETRIEVAL_BUDGET: on SmolLM2, against a tenth of the KV, 0.15 behind 7,424 tokens and 0.18 behind
# 15,872. Layers without codes add what retrieval rejects more, by their share of all layers to
# this power: 0, 8, 15, 22 and 30 of 30 layers with codes gave 0.077, 0.056, 0.053, 0.041 and 0.013
# (a prototype, docs/log.md).
SPLIT_REJECTION = 0.2
UNCOVERED_EXPONENT = 0.6
# What a code takes of an element's bytes, and of the time that it takes to attend to.
CODE_SHARE = 0.5
# Bytes of device memory that joining moves for a byte of elements: 12 of 16 bits in, 16 out.
RECONSTRUCTION_TRAFFIC = 1.75

# -- choosing by past texts ------------------------------------------------------------------------

# Before anything was seen: tokens rejected with DEFAULT_RETRIEVAL_BUDGET, as if seen on so many tokens.
PRIOR_REJECTION = 0.07
PRIOR_TOKENS = 24.0
# Tokens seen in one way from which its own rejections count for more than those of others.
OWN_HISTORY_TOKENS = 200.0
# What a text still counts after the next one with the same.
HISTORY_DECAY = 0.5
# A change must promise this share of the time a token takes now, or less.
SWITCH_THRESHOLD = 0.95
# Drafted tokens of a text that were tested, and rounds, without which it says nothing.
MIN_TESTED = 32
MIN_ROUNDS = 2
# A verification that takes so many times its link time is taken to wait for compute.
COMPUTE_BOUND_RATIO = 1.2
# Bytes of a copy, and seconds of copying, that tell the link's rate at start. The bytes are those
# of a slot of the transfer ring.
LINK_PROBE_BYTES = 4 << 20
LINK_PROBE_SECONDS = 0.1
