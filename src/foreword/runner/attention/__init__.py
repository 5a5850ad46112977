"""Attention over paged KV: what models call (`interface`), what a step needs (`tiles`), and who computes (`tiled`).

A model's attention layers reach this room through the library's `AttentionInterface`. The step at hand travels with
the call as a keyword argument of the model's forward; nothing here is global.
"""
