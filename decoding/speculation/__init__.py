"""Draft tokens and their exact verification: sampling, nested decoders, prompt lookup, draft
lengths.
"""
