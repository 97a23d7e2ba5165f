"""Times: of passes, refreshes, transfers, prefill, decoding, and settings that are found while
decoding.
"""
