"""Grammars of answers: what they are, whether they can be followed, and their form for a model's
tokenizer; knows nothing of models.
"""
