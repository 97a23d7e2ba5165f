"""Forward passes: batched, captured as CUDA graphs, on all ranks; independent of sampling."""
