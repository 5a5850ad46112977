"""Text to token ids and back: tokenizer, chat template, detokenizer, stop strings.

Knows no engine, no cache and no tensor; `transformers` is imported where a tokenizer is loaded, nowhere else.
"""
